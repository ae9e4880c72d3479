"""Bounded wait: an adapter's request is admitted in time, however busy the other adapters are.

Spec 11.3; the bound is derived in `engine/admission.py`.
"""

from dataclasses import replace

import pytest

from purestep.engine import Config, HostState, deliver, schedule, submit
from purestep.engine.requests import submit_host
from purestep.simulation.device import toy_step
from purestep.simulation.fairness import FEW_ROWS, LIMIT, MIXED, busy, longest_wait
from purestep.simulation.world import loaded, toy_config, toy_state
from purestep.state.adapters import Reservation
from purestep.state.blocks import BlockDraft
from purestep.state.request import Request


@pytest.mark.parametrize("seed", range(2))
def test_a_cold_adapter_comes_in_within_the_bound(seed: int) -> None:
    waits = longest_wait(800, seed)
    assert waits.promises > 5, "no promise was needed, so nothing was tested"
    assert waits.longest >= LIMIT


@pytest.mark.parametrize("seed", [1, 4])
def test_so_it_does_where_ranks_differ_and_rows_are_the_limit(seed: int) -> None:
    """A place is then made of several adapters' rows and of free ones, and nobody else may take
    one of them meanwhile: neither a younger promise, nor new rows of an adapter without any."""
    waits = longest_wait(800, seed, MIXED, **FEW_ROWS)
    assert waits.promises > 5
    assert waits.longest >= LIMIT


@pytest.mark.slow
def test_a_cold_adapter_comes_in_within_the_bound_for_long() -> None:
    """`python -m tests.simulation --wait --steps 100000` is the same for longer."""
    assert longest_wait(10_000, 7).promises > 100


def test_with_preemption_the_bound_is_one_step() -> None:
    """By priority too: among equals. The preempted rows come back and end with all their tokens."""
    kept = 0
    for _, before, after in busy(1_000, 3, adapter_preemption=True):
        for promise in before.adapters.reservations:
            drew_R = before.rows.num_tokens_R > before.rows.num_known_R
            mine_R = [version in promise.victims for version in before.rows.versions]
            urgent = min(before.requests[i].request.priority for i in before.waiting)
            mine = [r for r in before.requests.values() if r.version == promise.version]
            if drew_R[mine_R].all() and min(r.request.priority for r in mine) == urgent:
                assert promise.version in after.adapters.resident
                kept += 1
    assert kept > 3


def test_without_an_age_limit_in_reach_hot_adapters_keep_their_places() -> None:
    """The bound is what lets cold ones in: it costs nothing while nobody waits too long."""
    for _, _, after in busy(60, 1):
        assert not after.adapters.reservations or after.step > LIMIT


def waiting_behind_a_promise(**options: object) -> tuple[Config, HostState]:
    """Requests of `a`, `b` and `a` wait, and the next place is promised to `b`."""
    config = toy_config(**{"max_rows": 2, "prefix_caching": False} | options)
    state = toy_state(config)
    for name in "ab":
        state = deliver(state, loaded(name, f"v{name}", 8, None))
    host = state.host
    for n, name in enumerate("aba"):
        request = Request(id=f"{name}{n}", tokens=[1], adapter=name)
        host = submit_host(config, host, request)
    promise = Reservation(version="vb", victims=())
    return config, replace(host, adapters=replace(host.adapters, reservations=(promise,)))


def test_nobody_overtakes_a_request_of_his_own_adapter_in_one_pass() -> None:
    """A promise that is kept in mid-pass opens the place of an adapter skipped before: its first
    request comes next, not the first that stands behind."""
    config, host = waiting_behind_a_promise()
    _, plan = schedule(config, host)
    assert plan.row_ids == ("b1", "a0")


def test_a_place_may_open_for_nobody() -> None:
    config, host = waiting_behind_a_promise(max_active_adapters=1)
    _, plan = schedule(config, host)
    assert plan.row_ids == ("b1",)


def test_who_left_by_another_way_is_nobodys_victim() -> None:
    """As all do where a failed step overwrote their rows. Named by the promise still, `a` would be
    taken for one that leaves, though it comes in here with a promise of its own."""
    config, host = waiting_behind_a_promise(max_rows=1)
    stale = (Reservation(version="vb", victims=("va",)), Reservation(version="va", victims=()))
    host = replace(host, adapters=replace(host.adapters, reservations=stale))
    after, plan = schedule(config, host)
    assert plan.row_ids == ("a0",)
    assert [(r.version, r.victims) for r in after.adapters.reservations] == [("vb", ())]


def test_whoever_stands_behind_rows_that_make_way_comes_in_with_them() -> None:
    """Rows that make way stand in no queue while their step is planned. Counted as if they did,
    they ended the pass before its last request, here one that waits for no adapter at all."""
    options = {"max_rows": 4, "max_active_adapters": 1, "max_batched_tokens": 12, "num_blocks": 20}
    config = toy_config(adapter_preemption=True, adapter_age_limit=0, **options)
    state = toy_state(config)
    for name in "ab":
        state = deliver(state, loaded(name, f"v{name}", 8, None))
    for several in (("a0", "a1"), ("b",)):
        for key in several:
            state = submit(state, Request(id=key, tokens=[1], adapter=key[0]))
        state, _ = toy_step(state)
    assert [r.victims for r in state.host.adapters.reservations] == [("va",)]
    for key, name in (("a2", "a"), ("base", None)):
        state = submit(state, Request(id=key, tokens=[1], adapter=name))
    _, plan = schedule(config, state.host)
    assert plan.num_preempted == 2
    assert plan.row_ids == ("b", "base")


@pytest.mark.parametrize(("age_limit", "promised"), [(1, "vb"), (0, "va")])
def test_a_promise_yields_to_what_the_policy_puts_in_front(age_limit: int, promised: str) -> None:
    """Once that has waited as long: else a promise to one that finds no blocks would hold up all
    others for ever."""
    changes = {"adapter_age_limit": age_limit, "max_active_adapters": 1}
    config, host = waiting_behind_a_promise(**changes)
    taken = BlockDraft(host.blocks)
    taken.allocate(config.num_blocks)
    after, plan = schedule(config, replace(host, blocks=taken.finish()))
    assert plan.row_ids == ()
    assert [r.version for r in after.adapters.reservations] == [promised]
