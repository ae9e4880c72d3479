"""Reads adapters in the background; the state hears of it through `deliver` alone."""

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from purestep.engine.adapters import AdapterFailed, AdapterLoaded, read
from purestep.engine.config import Config
from purestep.state.errors import AdapterError


class Loader:
    """An edge: threads that read adapter files while steps go on. Use as a context manager."""

    def __init__(self, config: Config, num_threads: int = 1) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="purestep-loader")
        self._pending: list[Future[AdapterLoaded | AdapterFailed]] = []

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, loads: Iterable[tuple[str, str]]) -> None:
        """Start the loads a plan asks for."""
        self._pending += [self._threads.submit(self._load, name, src) for name, src in loads]

    def events(self, block: bool) -> list[AdapterLoaded | AdapterFailed]:
        """What has come back since the last call; with `block`, waits for at least one."""
        if block and self._pending:
            wait(self._pending, return_when=FIRST_COMPLETED)
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        return [future.result() for future in done]

    def _load(self, name: str, source: str) -> AdapterLoaded | AdapterFailed:
        try:
            adapter = read(self._config, source, name)
        except (AdapterError, OSError) as error:
            return AdapterFailed(name=name, error=str(error), source=source)
        return AdapterLoaded(name=name, source=source, adapter=adapter)
