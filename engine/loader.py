"""Reads adapters in the background; the state hears of it through `deliver` alone."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from purestep.engine.adapters import AdapterFailed, AdapterLoaded, read
from purestep.engine.config import Config
from purestep.models.adapter_files import CONFIG_FILE
from purestep.state.errors import AdapterError

Resolver = Callable[[str], str | None]
"""From an adapter's name to where its weights can be read; None for names it does not know."""


def folder_resolver(root: str | os.PathLike) -> Resolver:
    """Finds the adapter called `name` in the folder `root/name`, which holds a PEFT adapter.

    Names that lead out of `root`, also over a link, are not known. Raises nothing, nor does what it
    returns.
    """
    top = Path(root).expanduser().resolve()

    def resolve(name: str) -> str | None:
        try:
            folder = (top / name).resolve()
            known = (
                folder != top and folder.is_relative_to(top) and (folder / CONFIG_FILE).is_file()
            )
        except (OSError, ValueError):  # too long, or with a null byte inside
            return None
        return str(folder) if known else None

    return resolve


_WORK_S = 0.0005  # what a thread works between two pauses
_PAUSE = 2.0  # how long a pause lasts, in the time worked before it


def pacer(
    rest: Callable[[float], object], clock: Callable[[], float] = time.perf_counter
) -> Callable[[], None]:
    """What one load calls behind each piece of its work. It calls `rest` with `_PAUSE` times the
    seconds that were worked since the last rest by `clock`, once these are `_WORK_S`."""
    since = clock()

    def pause() -> None:
        nonlocal since
        worked = clock() - since
        if worked >= _WORK_S:
            rest(_PAUSE * worked)
            since = clock()

    return pause


class Loader:
    """An edge: threads that read adapter files while steps go on. Use as a context manager.

    Steps and loads share the machine's memory. So a load reads about 1 MiB at a time and pauses for
    twice as long as that took, unless somebody waits for it in `events`: so the steps beside it go
    on nearly as if alone, and a load takes three times as long as it could.
    """

    def __init__(self, config: Config, num_threads: int = 1) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(
            num_threads,
            thread_name_prefix="purestep-loader",
            initializer=torch.set_num_threads,
            initargs=(1,),
        )
        self._start_threads(num_threads)
        self._pending: list[Future[AdapterLoaded | AdapterFailed]] = []
        self._awaited = threading.Event()

    def _start_threads(self, count: int) -> None:
        """With one torch thread each: they would else fight with the steps for the cores, and 84 MB
        were seen to take 13 s in place of 0.5. torch takes the last number that any thread set as
        the default of later threads, so that is put back."""
        default = torch.get_num_threads()
        wait([self._threads.submit(torch.get_num_threads) for _ in range(count)])
        torch.set_num_threads(default)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, loads: Iterable[tuple[str, str]]) -> None:
        """Start the loads a plan asks for, (name, source) each."""
        self._pending += [self._threads.submit(self._load, name, src) for name, src in loads]

    def events(self, block: bool) -> list[AdapterLoaded | AdapterFailed]:
        """What has come back since the last call, in the order asked for; with `block`, waits for
        at least one. A load that fails, whatever the reason, is an AdapterFailed like any other."""
        if block and self._pending:
            self._awaited.set()
            wait(self._pending, return_when=FIRST_COMPLETED)
            self._awaited.clear()
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        return [future.result() for future in done]

    def _load(self, name: str, source: str) -> AdapterLoaded | AdapterFailed:
        try:
            adapter = read(self._config, source, name, pacer(self._awaited.wait))
        except (AdapterError, OSError) as error:
            return AdapterFailed(name=name, error=str(error), source=source)
        except Exception as error:  # out of memory, a warning that is an error: this load's alone
            reason = f"adapter {name!r} ({source}): {type(error).__name__}: {error}"
            return AdapterFailed(name=name, error=reason, source=source)
        return AdapterLoaded(name=name, source=source, adapter=adapter)
