"""The background loader: what it reads, what a failure costs, and how it paces itself.

No test here depends on how fast anything is: clocks and rests are made up, and where a thread has
to be in the middle of its work it is held there.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from purestep.engine import Loader, generate, init, register_adapter
from purestep.engine import loader as loader_module
from purestep.engine.adapters import AdapterFailed, AdapterLoaded, deliver, read
from purestep.engine.loader import pacer
from purestep.models.adapter_files import Adapter
from purestep.state.request import FinishReason
from tests.engine.tiny import adapter_folder, prompt, request, tiny_program

CONFIG = tiny_program().config
TICK = 2.0**-14  # s; sums of it are exact


def collected(loader: Loader, count: int) -> list[AdapterLoaded | AdapterFailed]:
    """So many events, and no more than these."""
    events: list[AdapterLoaded | AdapterFailed] = []
    while len(events) < count:
        found = loader.events(block=True)
        assert found, "a blocking call came back with nothing"
        events += found
    assert len(events) == count
    assert loader.events(block=True) == [], "nothing is left to wait for"
    return events


def same(one: Adapter, two: Adapter) -> None:
    assert (one.version, one.rank, one.modules) == (two.version, two.rank, two.modules)
    assert one.arenas.keys() == two.arenas.keys()
    for name, arena in one.arenas.items():
        torch.testing.assert_close(arena.a_LSRD, two.arenas[name].a_LSRD, rtol=0, atol=0)
        torch.testing.assert_close(arena.b_LRO, two.arenas[name].b_LRO, rtol=0, atol=0)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_loads_at_once_each_bring_what_reading_alone_brings(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Each behind every piece of its work at rest, so that they take turns."""
    rests: list[float] = []
    monkeypatch.setattr(loader_module, "_WORK_S", 0.0)
    monkeypatch.setattr(loader_module, "_PAUSE", 0.1)
    monkeypatch.setattr(loader_module, "pacer", lambda rest: pacer(both(rests.append, rest)))
    folders = {f"{name}{n}": str(adapter_folder(name)) for n in range(5) for name in "abcd"}
    with Loader(CONFIG, num_threads) as loader:
        names = list(folders)
        loader.ask((name, folders[name]) for name in names[:3])
        loader.ask((name, folders[name]) for name in names[3:])
        events = collected(loader, len(folders))
    assert {event.name: event.source for event in events} == folders
    for event in events:
        same(event.adapter, read(CONFIG, folders[event.name], event.name))
    assert len(rests) >= sum(event.adapter.num_tensors for event in events)


def both(*calls: Callable[[float], object]) -> Callable[[float], None]:
    def call(seconds: float) -> None:
        for one in calls:
            one(seconds)

    return call


def damaged(tmp_path: Path) -> dict[str, str]:
    """Sources that cannot be read, by name, for different reasons."""
    folders = {name: tmp_path / name for name in ("empty", "no json", "no weights", "cut off")}
    for folder in folders.values():
        folder.mkdir()
    settings = (adapter_folder("a") / "adapter_config.json").read_bytes()
    weights = (adapter_folder("a") / "adapter_model.safetensors").read_bytes()
    (folders["no json"] / "adapter_config.json").write_text("{")
    for name in ("no weights", "cut off"):
        (folders[name] / "adapter_config.json").write_bytes(settings)
    (folders["cut off"] / "adapter_model.safetensors").write_bytes(weights[: len(weights) // 2])
    return {"nowhere": str(tmp_path / "nowhere"), **{n: str(f) for n, f in folders.items()}}


def test_a_load_that_fails_is_told_by_name_and_hurts_no_other(tmp_path: Path) -> None:
    bad = damaged(tmp_path)
    good = dict(zip("abcde", map(str, map(adapter_folder, "abcda")), strict=True))
    mixed = [pair for pairs in zip(bad.items(), good.items(), strict=True) for pair in pairs]
    with Loader(CONFIG, 2) as loader:
        loader.ask(mixed)
        events = {event.name: event for event in collected(loader, len(mixed))}
    for name, source in mixed:
        assert events[name].source == source
        if name in bad:
            assert isinstance(events[name], AdapterFailed)
            assert repr(name) in events[name].error or name in events[name].error
        else:
            same(events[name].adapter, read(CONFIG, source, name))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't allocate memory"), MemoryError("none"), UserWarning("target_modules")],
    ids=lambda error: type(error).__name__,
)
def test_an_unforeseen_error_is_that_load_s_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Were it raised in `events`, it would take along all that came back at the same time."""

    def reads(config: Any, source: str, name: str, pause: Callable[[], object]) -> Adapter:
        if name == "bad":
            raise error
        return read(config, source, name, pause)

    monkeypatch.setattr(loader_module, "read", reads)
    source = str(adapter_folder("a"))
    with Loader(CONFIG) as loader:
        loader.ask([("bad", source), ("good", source)])
        bad, good = sorted(collected(loader, 2), key=lambda event: event.name)
    assert isinstance(good, AdapterLoaded)
    assert bad == AdapterFailed(
        name="bad",
        error=f"adapter 'bad' ({source}): {type(error).__name__}: {error}",
        source=source,
    )


def test_only_requests_of_an_adapter_that_fails_end_with_an_error(tmp_path: Path) -> None:
    """And the name may be tried again: its source is whole by then."""
    program, broken = tiny_program(), tmp_path / "late"
    sources = {"good": adapter_folder("b"), "late": broken}
    items = [
        request(f"{name} {n}", prompt(n, 5), name)
        for n, name in enumerate(["late", "good", None, "late", "good", None])
    ]
    done = {c.id: c for c in generate(program, items, adapters=sources)}
    ends = {key: c.finish_reason for key, c in done.items()}
    assert [key for key, end in ends.items() if end == FinishReason.ERROR] == ["late 0", "late 3"]
    assert "late" in done["late 0"].error
    state = register_adapter(init(program), broken, name="late")
    with Loader(program.config) as loader:
        for whole in (False, True):
            if whole:
                broken.symlink_to(adapter_folder("a"))
            loader.ask([("late", str(broken))])
            (event,) = collected(loader, 1)
            assert isinstance(event, AdapterLoaded) == whole
            state = deliver(state, event)
    same(state.blobs[state.host.adapters.names["late"]], read(CONFIG, str(adapter_folder("a")), ""))


def test_nothing_comes_back_before_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One load is held in its middle, then goes on: `events` tells of those that are done."""
    held, goes_on = threading.Event(), threading.Event()

    def reads(config: Any, source: str, name: str, pause: Callable[[], object]) -> Adapter:
        if name == "held":
            held.set()
            assert goes_on.wait(60)
        return read(config, source, name, pause)

    monkeypatch.setattr(loader_module, "read", reads)
    source = str(adapter_folder("a"))
    with Loader(CONFIG, 2) as loader:
        loader.ask([("held", source)])
        assert held.wait(60)
        assert loader.events(block=False) == []
        loader.ask([("other", source)])
        assert [event.name for event in loader.events(block=True)] == ["other"]
        assert loader.events(block=False) == []
        goes_on.set()
        assert [event.name for event in collected(loader, 1)] == ["held"]


def test_whoever_waits_for_a_load_ends_its_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece would be followed by a minute's rest."""
    cut: list[bool] = []

    def rests(rest: Callable[[float], bool]) -> Callable[[], None]:
        return lambda: cut.append(rest(60))

    monkeypatch.setattr(loader_module, "pacer", rests)
    with Loader(CONFIG) as loader:
        loader.ask([("a", str(adapter_folder("a")))])
        (event,) = collected(loader, 1)
    assert len(cut) >= event.adapter.num_tensors
    assert all(cut), "a rest went on to its end"


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rests: list[float] = []

    def __call__(self) -> float:
        return self.now

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds


def paced(works: Iterable[int], clock: Clock) -> list[float]:
    """The time worked up to each rest, by hand, and the rests by the pacer on `clock`."""
    pause, expected, worked = pacer(clock.rest, clock), [], 0.0
    for work in works:
        clock.now += work * TICK
        worked += work * TICK
        pause()
        if worked >= loader_module._WORK_S:
            expected.append(worked)
            worked = 0.0
    return expected


@given(st.lists(st.integers(0, 40), max_size=60))
def test_rests_are_in_proportion_to_the_work_before_them(works: list[int]) -> None:
    """Whatever the pieces: small ones add up to a rest, no work is counted twice, a rest itself is
    no work, and what is left over at the end is less than what a rest is worth."""
    clock = Clock()
    worked = paced(works, clock)
    assert clock.rests == [loader_module._PAUSE * seconds for seconds in worked]
    left = sum(works) * TICK - sum(worked)
    assert 0 <= left < loader_module._WORK_S
    assert clock.now == sum(works) * TICK + sum(clock.rests)
    assert sum(clock.rests) <= 4 * sum(works) * TICK, "a load takes at most five times its work"
