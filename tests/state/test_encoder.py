"""The encoder ledger: the worked trace of spec/multimodal.md, section 11, and the ledger against
the simplest thing that could be right, with I1 to I6 after every change."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from purestep.state.encoder import (
    cancelled,
    check_encoder,
    computed,
    dropped,
    empty_encoder,
    hold,
    i1_free_and_used_are_all,
    i3_evictable_has_no_holder,
    i4_bounds,
    i5_holders_are_live_items,
    i6_what_left_is_not_held,
    i7_device_has_what_is_computed,
    let_go,
    planned,
    shrunk,
    told,
)
from purestep.state.pytree import evolve


def test_the_worked_trace() -> None:
    """Capacity 20: A(8) and B(8) released, A first; C(10) takes A's place alone."""
    ledger = empty_encoder(20, row_bytes=4)
    for name in "AB":
        ledger = hold(planned(ledger, name, 8), name, (name, 0))
    ledger = computed(let_go(ledger, [("A", ("A", 0)), ("B", ("B", 0))]), "AB")
    assert (ledger.free, ledger.freeable, ledger.evictable) == (4, 20, ("A", "B"))
    ledger = hold(planned(ledger, "C", 10), "C", ("C", 0))
    assert ledger.leaving == (), "nothing goes before the step is certain"
    ledger, drops = told(shrunk(ledger))
    assert drops == ("A",)
    assert (ledger.free, ledger.freeable, ledger.evictable) == (2, 10, ("B",))
    assert told(ledger)[1] == (), "it is told once"


def test_an_image_that_is_there_twice_is_held_until_the_second_is_passed() -> None:
    """W7: vLLM lets go with the first."""
    ledger = planned(empty_encoder(20), "A", 8)
    ledger = hold(hold(ledger, "A", ("r", 0)), "A", ("r", 1))
    ledger = let_go(ledger, [("A", ("r", 0))])
    assert ledger.evictable == ()
    assert let_go(ledger, [("A", ("r", 1))]).evictable == ("A",)


def test_a_reset_drops_everything_and_says_so() -> None:
    ledger = hold(planned(empty_encoder(20), "A", 8), "A", ("r", 0))
    ledger, drops = told(dropped(ledger, ledger.outputs))
    assert (ledger.free, drops) == (20, ("A",))
    assert not ledger.holders


def test_each_invariant_can_fail() -> None:
    ledger = hold(planned(empty_encoder(20), "A", 8), "A", ("r", 0))
    check_encoder(ledger, [("r", 0)])
    with pytest.raises(AssertionError):
        i5_holders_are_live_items(ledger, [])
    with pytest.raises(AssertionError):
        i6_what_left_is_not_held(cancelled(ledger, "A"))
    with pytest.raises(AssertionError):
        i4_bounds(planned(ledger, "B", 13))
    with pytest.raises(AssertionError, match="planned"):
        i7_device_has_what_is_computed(ledger, [])
    done = computed(ledger, ["A"])
    with pytest.raises(AssertionError, match="missing"):
        i7_device_has_what_is_computed(done, [])
    with pytest.raises(AssertionError, match="left behind"):
        i7_device_has_what_is_computed(done, ["A", "B"])
    i7_device_has_what_is_computed(dropped(done, ["A"]), ["A"])
    i1_free_and_used_are_all(ledger)
    same = evolve(ledger, outputs=ledger.outputs.set("B", ledger.outputs["A"]))
    with pytest.raises(AssertionError):
        i3_evictable_has_no_holder(same)


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a list in order of release and a set of references."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = empty_encoder(12)
        self.sizes: dict[str, int] = {}
        self.order: list[str] = []  # of release, the oldest first
        self.held: set[tuple[str, tuple[str, int]]] = set()
        self.device: set[str] = set()

    def busy(self, name: str) -> bool:
        return any(name == other for other, _ in self.held)

    @rule(name=st.sampled_from("ABCDE"), holder=st.tuples(st.sampled_from("rs"), st.integers(0, 1)))
    def need(self, name: str, holder: tuple[str, int]) -> None:
        """As a step does it: look, then take, then make room, then execute."""
        size = 1 + "ABCDE".index(name) * 2
        room = self.ledger.freeable
        assert room == 12 - sum(self.sizes[n] for n in self.sizes if self.busy(n))
        if name not in self.sizes and size > room:
            return
        if name not in self.sizes:
            self.ledger = planned(self.ledger, name, size)
            self.sizes[name] = size
        elif name in self.order:
            self.order.remove(name)
        self.ledger = hold(self.ledger, name, holder)
        self.held.add((name, holder))
        gone = []
        while sum(self.sizes.values()) > 12:
            gone.append(self.order.pop(0))
            del self.sizes[gone[-1]]
        self.ledger, drops = told(shrunk(self.ledger))
        assert list(drops) == gone
        self.device -= set(drops)
        self.device.add(name)
        self.ledger = computed(self.ledger, [name])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pass_by(self, data: Any) -> None:
        name, holder = data.draw(st.sampled_from(sorted(self.held)))
        self.held.discard((name, holder))
        self.ledger = let_go(self.ledger, [(name, holder), (name, holder)])
        if not self.busy(name):
            self.order.append(name)

    @rule(name=st.sampled_from("ABCDE"))
    def lose(self, name: str) -> None:
        self.ledger, drops = told(dropped(self.ledger, [name]))
        assert drops == ((name,) if name in self.sizes else ())
        self.device.discard(name)
        self.sizes.pop(name, None)
        self.held = {pair for pair in self.held if pair[0] != name}
        self.order = [other for other in self.order if other != name]

    @invariant()
    def the_laws_hold(self) -> None:
        check_encoder(self.ledger, {holder for _, holder in self.held})
        i7_device_has_what_is_computed(self.ledger, self.device)
        assert {n: o.num_embeds for n, o in self.ledger.outputs.items()} == self.sizes
        assert list(self.ledger.evictable) == self.order
        pairs = {(n, h) for n, holders in self.ledger.holders.items() for h in holders}
        assert pairs == self.held


def test_the_ledger_is_a_list_and_a_set() -> None:
    run_state_machine_as_test(LedgerMachine, settings=settings(max_examples=60))
