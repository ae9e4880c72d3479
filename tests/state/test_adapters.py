"""The adapter ledger: two LRU tiers, pins, versions, rows (multi_lora.md, 9, 13, 21: 1 to 5)."""

from collections.abc import Callable, Iterable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from purestep.engine.adapters import deliver, deliver_loaded, register_adapter
from purestep.engine.requests import submit
from purestep.simulation.device import toy_step
from purestep.simulation.world import loaded, toy_config, toy_state
from purestep.state.adapter_places import activate, free_row_blocks, victims_for
from purestep.state.adapters import (
    ROW_BLOCK,
    AdapterInfo,
    AdapterLedger,
    add_adapter,
    add_source,
    check_adapters,
    count_users,
    empty_adapters,
    evict,
    known_names,
    load_asked,
    load_failed,
    pin,
    pinned_versions,
    resolve,
    touch,
    unpin,
)
from purestep.state.canonical import to_plain
from purestep.state.errors import AdapterError, UnknownAdapterError
from purestep.state.request import FinishReason, Request
from purestep.state.sampling import SamplingParams

NAMES = ("a", "b", "c", "d")
RANKS = {"v1": 8, "v2": 4, "v3": 16, "v4": 17, "v5": 32, "v6": 1}


def info(version: str, rank: int = 8) -> AdapterInfo:
    return AdapterInfo(version=version, rank=rank, nbytes=rank * 10, modules=("q_proj",))


def ledger_with(names: Iterable[str], slots: int, rows: int, registered: int) -> AdapterLedger:
    """Adapters called like their versions, rank 8, readable again."""
    ledger = empty_adapters(slots, rows, registered)
    for name in names:
        ledger = add_adapter(ledger, name, info(name), f"/{name}")
    return ledger


def use(ledger: AdapterLedger, versions: Iterable[str]) -> AdapterLedger:
    """What a step does with its adapters; those that find no place are left out."""
    wanted, got = list(versions), []
    for version in wanted:
        if version not in ledger.resident:
            victims = victims_for(ledger, version, wanted)
            if victims is None:
                continue
            ledger = activate(ledger, version, victims)
        got.append(version)
    return touch(ledger, got)


class AdapterMachine(RuleBasedStateMachine):
    """The ledger beside plain dicts and lists, through every call, refused ones included."""

    @initialize(slots=st.integers(1, 3), row_blocks=st.integers(1, 5), registered=st.integers(3, 5))
    def begin(self, slots: int, row_blocks: int, registered: int) -> None:
        self.ledger = empty_adapters(slots, row_blocks, registered)
        self.names: dict[str, str] = {}
        self.sources: dict[str, str] = {}
        self.users: dict[str, int] = {}
        self.pins: set[str] = set()
        self.host: list[str] = []  # least recently used first
        self.device: list[str] = []
        self.loading: list[str] = []
        self.old: list[tuple[AdapterLedger, Any]] = []

    def become(self, ledger: AdapterLedger) -> None:
        self.old.append((self.ledger, to_plain(self.ledger)))
        self.ledger = ledger

    def refused(self, kind: type[Exception], call: Callable[[], object]) -> str:
        before = to_plain(self.ledger)
        with pytest.raises(kind) as caught:
            call()
        assert to_plain(self.ledger) == before
        return str(caught.value)

    def needs(self, version: str) -> int:
        return -(-RANKS[version] // ROW_BLOCK)

    def in_use(self) -> set[str]:
        return {*self.names.values(), *self.users}

    def drop(self, version: str) -> None:
        self.names = {n: v for n, v in self.names.items() if v != version}
        self.host = [v for v in self.host if v != version]
        self.device = [v for v in self.device if v != version]

    def drop_unnamed(self) -> None:
        for version in [v for v in self.host if v not in self.in_use()]:
            self.drop(version)

    @rule(name=st.sampled_from(NAMES), version=st.sampled_from(sorted(RANKS)), again=st.booleans())
    def add(self, name: str, version: str, again: bool) -> None:
        """Bind a name; the version it had goes once unused (9.2, 13.3; LS-03, LS-08)."""
        source = f"/{name}" if again else None

        def call() -> AdapterLedger:
            return add_adapter(self.ledger, name, info(version, RANKS[version]), source)

        if self.needs(version) > self.ledger.num_row_blocks:
            message = self.refused(AdapterError, call)
            assert f"rank {RANKS[version]}" in message
            assert f"lora_rows={self.ledger.num_row_blocks * ROW_BLOCK}" in message
            return
        names = {**self.names, name: version}
        if not self.fits({names[p] for p in self.pins}):
            self.refused(AdapterError, call)  # a pin promises a place
            return
        sources = {**self.sources, name: source}
        kept = {*names.values(), *self.users}
        host = [v for v in self.host if v in kept and v != version] + [version]
        victim = None
        if len(host) > self.ledger.max_registered:
            victim = next((v for v in host[:-1] if self.spare(v, names, sources)), None)
            if victim is None:
                message = self.refused(AdapterError, call)
                assert f"max_registered_adapters={self.ledger.max_registered}" in message
                return
        self.become(call())
        self.names, self.host = names, host
        self.sources = {n: s for n, s in sources.items() if s is not None}
        self.device = [v for v in self.device if v in host]
        self.loading = [n for n in self.loading if n != name]
        if victim is not None:
            self.drop(victim)

    def spare(self, version: str, names: dict[str, str], sources: dict[str, str | None]) -> bool:
        bound = [n for n, v in names.items() if v == version]
        readable = all(sources.get(n) for n in bound)
        return readable and not self.pins & set(bound) and version not in self.users

    def fits(self, versions: set[str]) -> bool:
        rows = sum(map(self.needs, versions))
        return len(versions) <= self.ledger.num_slots and rows <= self.ledger.num_row_blocks

    @precondition(lambda self: set(NAMES) - set(self.names))
    @rule(data=st.data())
    def add_source(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(NAMES) - set(self.names))))
        self.become(add_source(self.ledger, name, f"/{name}"))
        self.sources[name] = f"/{name}"

    @precondition(lambda self: self.host)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A step's adapters: activated in order, none of them nor a pin evicted (9.4)."""
        wanted = data.draw(st.lists(st.sampled_from(self.host), unique=True, max_size=3))
        ledger, got = self.ledger, []
        for version in wanted:
            if version not in ledger.resident:
                victims = victims_for(ledger, version, got)
                assert (victims is None) == (not self.place_for(version, got))
                if victims is None:
                    continue
                spared = {*got, *(self.names[p] for p in self.pins)}
                candidates = [v for v in self.device if v not in spared]
                assert list(victims) == candidates[: len(victims)], "not the least recently used"
                if victims:
                    assert not self.room(version, victims[:-1]), "one victim too many"
                ledger = activate(ledger, version, victims)
                self.device = [v for v in self.device if v not in victims] + [version]
            got.append(version)
        self.become(touch(ledger, got))
        self.host = [v for v in self.host if v not in got] + got
        self.device = [v for v in self.device if v not in got] + got

    def place_for(self, version: str, protected: list[str]) -> bool:
        spared = {*protected, *(self.names[p] for p in self.pins)}
        return self.room(version, [v for v in self.device if v not in spared])

    def room(self, version: str, without: Iterable[str]) -> bool:
        left = [v for v in self.device if v not in without]
        rows = sum(map(self.needs, left)) + self.needs(version)
        return len(left) < self.ledger.num_slots and rows <= self.ledger.num_row_blocks

    @precondition(lambda self: self.names)
    @rule(data=st.data(), count=st.integers(1, 2))
    def requests_begin(self, data: st.DataObject, count: int) -> None:
        version = self.names[data.draw(st.sampled_from(sorted(self.names)))]
        self.become(count_users(self.ledger, [(version, 1), (None, 1)] * count))
        self.users[version] = self.users.get(version, 0) + count

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.users)))
        self.become(count_users(self.ledger, [(version, -1), (None, -1)]))
        self.users[version] -= 1
        if not self.users[version]:
            del self.users[version]
        self.drop_unnamed()

    @rule(name=st.sampled_from(NAMES))
    def pin(self, name: str) -> None:
        if name not in self.names:
            message = self.refused(UnknownAdapterError, lambda: pin(self.ledger, name))
            assert repr(name) in message
        elif not self.fits({self.names[p] for p in {*self.pins, name}}):
            self.refused(AdapterError, lambda: pin(self.ledger, name))
        else:
            self.become(pin(self.ledger, name))
            self.pins.add(name)

    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        if name in self.pins:
            self.become(unpin(self.ledger, name))
            self.pins.remove(name)
        else:
            self.refused(UnknownAdapterError, lambda: unpin(self.ledger, name))

    @rule(version=st.sampled_from(sorted(RANKS)))
    def evict(self, version: str) -> None:
        """Off the device, still registered; not being there is no error (recover)."""
        self.become(evict(self.ledger, version))
        self.device = [v for v in self.device if v != version]

    @rule(name=st.sampled_from(NAMES), works=st.booleans())
    def load(self, name: str, works: bool) -> None:
        if name in self.sources and name not in self.names and name not in self.loading:
            self.become(load_asked(self.ledger, [name]))
            self.loading.append(name)
        elif not works:
            self.become(load_failed(self.ledger, name))
            self.loading = [n for n in self.loading if n != name]

    @invariant()
    def ledger_is_the_model(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        check_adapters(ledger)
        assert dict(ledger.names) == self.names
        assert dict(ledger.sources) == self.sources
        assert dict(ledger.users) == self.users
        assert set(ledger.pins) == self.pins
        assert list(ledger.host_order) == self.host
        assert list(ledger.device_order) == self.device
        assert list(ledger.loading) == self.loading
        assert known_names(ledger) == sorted({*self.names, *self.sources})
        taken = sum(self.needs(v) for v in self.device)
        assert len(free_row_blocks(ledger)) == ledger.num_row_blocks - taken
        assert self.fits({self.names[p] for p in self.pins}), "the pinned do not fit together"

    def teardown(self) -> None:
        for ledger, before in getattr(self, "old", ()):
            assert to_plain(ledger) == before, "an old ledger has changed"


def test_ledger_is_two_lists_and_some_dicts() -> None:
    run_state_machine_as_test(
        AdapterMachine, settings=settings(max_examples=80, stateful_step_count=30)
    )


# 9.3: event, loads, host order, device order, slots. Orders are least recently used first.
TRACE_9_3 = (
    ("use 1", True, "1", "1", "1-"),
    ("use 2", True, "12", "12", "12"),
    ("use 1", False, "21", "21", "12"),
    ("use 3", True, "213", "13", "13"),
    ("use 4", True, "134", "34", "43"),
    ("use 2", True, "342", "42", "42"),
    ("pin 4", False, "342", "42", "42"),
    ("use 5", True, "425", "45", "45"),
    ("use 6", True, "456", "46", "46"),
    ("pin 6", False, "456", "46", "46"),
    ("use 7", True, "467", "46", "46"),
)


def test_trace_of_9_3() -> None:
    """Last row: vLLM raises RuntimeError; here 7 is registered and simply finds no place."""
    ledger = empty_adapters(2, 4, 3)
    for event, loads, host, device, slots in TRACE_9_3:
        verb, name = event.split()
        assert loads == (verb == "use" and name not in ledger.registered), event
        if verb == "pin":
            ledger = pin(ledger, name)
        else:
            if name not in ledger.registered:
                ledger = add_adapter(ledger, name, info(name), f"/{name}")
            ledger = use(ledger, [name])
        assert "".join(ledger.host_order) == host, event
        assert "".join(ledger.device_order) == device, event
        assert slots_of(ledger) == slots, event
        check_adapters(ledger)
    assert victims_for(ledger, "7", ()) is None


def slots_of(ledger: AdapterLedger) -> str:
    held = {place.slot: version for version, place in ledger.resident.items()}
    return "".join(held.get(slot, "-") for slot in range(ledger.num_slots))


def test_reload_of_9_3_moves_to_the_lowest_free_slot() -> None:
    """`[-,2,-]`, 2 loaded anew: the new version is another adapter and takes slot 0."""
    ledger = evict(use(ledger_with("12", 3, 3, 4), "12"), "1")
    assert slots_of(ledger) == "-2-"
    ledger = use(add_adapter(ledger, "2", info("2'"), "/2"), ["2'"])
    assert {v: p.slot for v, p in ledger.resident.items()} == {"2'": 0}
    assert set(ledger.registered) == {"1", "2'"}


def test_the_steps_own_adapters_are_spared() -> None:
    """9.4: host and device {1, 2}, next step {3, 1}: 2 goes, although 1 is older."""
    ledger = use(ledger_with("123", 2, 4, 3), "12")
    assert victims_for(ledger, "3", ["3", "1"]) == ("2",)
    assert victims_for(ledger, "3", ["1", "2"]) is None
    assert slots_of(use(ledger, ["3", "1"])) == "13"


def test_pins_lower_what_a_step_may_hold() -> None:
    """9.4: two slots, 9 pinned, step {1, 2}: only one of them finds a place, nothing breaks."""
    ledger = pin(ledger_with("912", 2, 4, 3), "9")
    ledger = use(use(ledger, "9"), "12")
    assert slots_of(ledger) == "91"


@given(
    names=st.permutations("abcdefgh"),
    pinned=st.sets(st.sampled_from("abcdefgh"), max_size=2),
    steps=st.lists(st.sets(st.sampled_from("abcdefgh"), min_size=1, max_size=2), max_size=12),
)
def test_every_adapter_of_a_step_that_fits_is_active(
    names: list[str], pinned: set[str], steps: list[set[str]]
) -> None:
    """21: 2 and 3: |X| <= slots - |pinned outside X|; the pinned stay where they are."""
    ledger = ledger_with(names, 4, 4, 8)
    for name in pinned:
        ledger = pin(use(ledger, [name]), name)
    places = {name: ledger.resident[name] for name in pinned}
    for wanted in steps:
        ledger = use(ledger, sorted(wanted))
        assert wanted <= set(ledger.resident)
        assert list(ledger.device_order)[-len(wanted) :] == sorted(wanted)
        assert {name: ledger.resident.get(name) for name in pinned} == places
        check_adapters(ledger)


@given(ranks=st.lists(st.sampled_from((8, 64)), min_size=1, max_size=40))
@example(ranks=[64] * 6 + [8] * 16)
def test_rows_cost_their_true_rank(ranks: list[int]) -> None:
    """MO-05: a mix of ranks 8 and 64 holds at most 1.1 of its real rows, and leaves no gaps."""
    ledger = empty_adapters(64, 64, 64)
    for i, rank in enumerate(ranks):
        ledger = add_adapter(ledger, f"{i}", info(f"{i}", rank), None)
        victims = victims_for(ledger, f"{i}", ())
        ledger = activate(ledger, f"{i}", victims)
    real = sum(info_.rank for v, info_ in ledger.registered.items() if v in ledger.resident)
    held = sum(len(p.row_blocks) for p in ledger.resident.values()) * ROW_BLOCK
    assert real <= held <= 1.1 * real
    free = 64 * ROW_BLOCK - held
    assert len(ledger.resident) == len(ranks) or free < max(ranks) + 64


@given(rank=st.integers(1, 200))
def test_row_blocks_round_up(rank: int) -> None:
    blocks = info("v", rank).num_row_blocks
    assert (blocks - 1) * ROW_BLOCK < rank <= blocks * ROW_BLOCK


def test_row_blocks_need_not_be_neighbours() -> None:
    """Freed rows anywhere serve a larger adapter: nothing fragments."""
    ledger = use(ledger_with("abcde", 5, 5, 6), "abcde")
    ledger = evict(evict(ledger, "b"), "d")
    ledger = use(add_adapter(ledger, "f", info("f", 16), None), "f")
    assert ledger.resident["f"].row_blocks == (1, 3)
    assert ledger.resident["f"].slot == 1


def test_two_names_of_one_version_share_place_and_end_apart() -> None:
    """LS-08: one slot, one set of rows; rebinding 'x' does not break 'y'."""
    ledger = empty_adapters(2, 2, 4)
    for name in "xy":
        ledger = add_adapter(ledger, name, info("same"), "/p")
    ledger = use(ledger, ["same"])
    assert len(ledger.resident) == len(ledger.registered) == 1
    assert resolve(ledger, "x", "r") == resolve(ledger, "y", "r") == ("same", False)
    ledger = add_adapter(ledger, "x", info("other"), "/q")
    assert resolve(ledger, "y", "r") == ("same", False)
    assert "same" in ledger.resident
    ledger = add_adapter(ledger, "y", info("other"), "/q")
    assert set(ledger.registered) == {"other"}
    assert not ledger.resident


def test_rebinding_waits_for_running_requests() -> None:
    """13.3, LS-05: requests end on the weights they began with; then the old version goes."""
    ledger = use(ledger_with("a", 1, 1, 2), "a")
    ledger = count_users(ledger, [("a", 1), ("a", 1)])
    ledger = add_adapter(ledger, "a", info("a2"), None)
    assert resolve(ledger, "a", "r") == ("a2", False)
    ledger = count_users(ledger, [("a", -1)])
    assert "a" in ledger.resident
    ledger = count_users(ledger, [("a", -1)])
    assert set(ledger.registered) == {"a2"}
    assert not ledger.resident


def test_a_pin_follows_its_name() -> None:
    """`pin`: also after a reload under this name; the old version is no longer held."""
    ledger = pin(use(ledger_with("ab", 1, 1, 3), "a"), "a")
    ledger = add_adapter(ledger, "a", info("a2"), "/a")
    assert pinned_versions(ledger) == {"a2"}
    ledger = use(ledger, ["a2"])
    assert victims_for(ledger, "b", ()) is None


@pytest.mark.parametrize("rank", [8, 16])
def test_a_reload_never_breaks_the_promise_of_the_pins(rank: int) -> None:
    """Pinned 'a' and 'b' fill the rows, or share one slot: a reload that no longer fits with the
    other pins is refused, as `pin` itself is."""
    if rank == 16:
        ledger = pin(pin(ledger_with("ab", 2, 2, 4), "a"), "b")
    else:
        ledger = empty_adapters(1, 2, 4)
        for name in "ab":
            ledger = pin(add_adapter(ledger, name, info("same"), None), name)
    before = to_plain(ledger)
    with pytest.raises(AdapterError, match="pin"):
        add_adapter(ledger, "b", info("b2", rank), "/b")
    assert to_plain(ledger) == before


def test_unknown_names_never_mean_base() -> None:
    """LS-04: case, space, the empty string; the error lists what is known."""
    ledger = add_source(ledger_with(["sum"], 1, 1, 2), "later", "/later")
    assert resolve(ledger, None, "r") == (None, False)
    assert resolve(ledger, "later", "r") == (None, True)
    for name in ("summ", "Sum", "sum ", " sum", "", "SUM", "None"):
        with pytest.raises(UnknownAdapterError) as caught:
            resolve(ledger, name, "request 'r'")
        assert f"request 'r': no adapter is called {name!r}" in str(caught.value)
        assert "['later', 'sum']" in str(caught.value)


def test_a_new_source_for_a_loaded_name_is_not_lost() -> None:
    """LS-03: either refused, or the next request for the name gets what the new source holds."""
    state = deliver_loaded(toy_state(toy_config()), loaded("a", "v1", 8, "/old"))
    try:
        state = register_adapter(state, "/new", name="a")
    except AdapterError:
        return
    assert resolve(state.host.adapters, "a", "r") == (None, True)


def test_more_adapters_than_the_host_tier_holds() -> None:
    """LS-01: the tier limits how many are kept, not how many may be wanted; nobody fails."""
    state = toy_state(toy_config(max_registered_adapters=2))
    names = "abcde"
    for name in names:
        state = register_adapter(state, f"/{name}", name=name)
    for name in names:
        request = Request(
            id=name, tokens=[1], adapter=name, sampling=SamplingParams(max_tokens=2, stop_ids=())
        )
        state = submit(state, request)
    ended = {}
    for _ in range(60):
        if state.host.idle:
            break
        state, outputs = toy_step(state)
        ended.update({c.id: c for c in outputs.finished})
        for name, source in outputs.loads:
            state = deliver(state, loaded(name, f"v{name}", 8, source))
        check_adapters(state.host.adapters)
    assert set(ended) == set(names)
    wrong = {c.id: c.error for c in ended.values() if c.finish_reason == FinishReason.ERROR}
    assert not wrong
