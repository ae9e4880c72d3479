"""Bounded wait: an adapter's request is admitted in time, however busy the other adapters are.

Spec 11.3; the bound is derived in `engine/admission.py`. Nothing is computed here: tokens are made
up, so that the scheduler alone is tried.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from purestep.engine import Config, HostState, StepResult, commit, deliver, schedule
from purestep.engine.policy import by_priority, fcfs
from purestep.engine.requests import submit_host
from purestep.simulation.world import loaded, toy_config, toy_state
from purestep.state.adapters import Reservation
from purestep.state.blocks import BlockDraft
from purestep.state.engine import check_host
from purestep.state.request import Request, frozen
from purestep.state.sampling import SamplingParams

HOT, LIMIT = 8, 40
ALIKE = (8,) * (HOT + 3)
MIXED = (8, 16, 24, 8, 16, 24, 8, 16, 24, 8, 16)  # 120 rows of the hot ones
FEW_ROWS = {"max_active_adapters": 12, "lora_rows": 120, "max_lora_rank": 24}  # they are the limit


def busy(
    steps: int, seed: int, ranks: tuple[int, ...] = ALIKE, **options: object
) -> Iterator[tuple[Config, HostState, HostState]]:
    """(config, before, after) of steps in which eight hot adapters always have three requests, and
    now and then one of three cold ones or the base model has one."""
    rng = np.random.default_rng(seed)
    words = {"num_blocks": 400, "max_rows": 40, "max_batched_tokens": 64, "max_context": 60}
    slots = {"max_active_adapters": HOT, "max_registered_adapters": 16, "lora_rows": 8 * HOT}
    fixed = {"adapter_age_limit": LIMIT, "stop_ids": ()}
    config = toy_config(**words | slots | fixed | options)
    state = toy_state(config)
    for n, rank in enumerate(ranks):
        state = deliver(state, loaded(f"a{n}", f"v{n}", rank, None))
    host, number = state.host, 0
    for _ in range(steps):
        live = Counter(key.split("#")[1] for key in host.requests)
        names = [f"a{n}" for n in range(HOT) if live[str(n)] < 3]  # rows never run out
        if rng.random() < 0.02:
            names.append(f"a{HOT + rng.integers(3)}")
        if rng.random() < 0.02:
            names.append(None)
        for name in names:
            number += 1
            hot = name[1:] if name else "base"
            request = Request(
                id=f"{number}#{hot}#",
                tokens=[1] * int(rng.integers(1, 9)),
                adapter=name,
                priority=int(rng.integers(0, 2)) if name in names[:4] else 0,
                sampling=SamplingParams(temperature=0, max_tokens=int(rng.integers(1, 50))),
            )
            host = submit_host(config, host, request)
        policy = by_priority if options.get("adapter_preemption") else fcfs
        after, plan = schedule(config, host, policy)
        S = int(plan.sampled_R.sum())
        drawn = StepResult(token_S=frozen([3] * S), logprob_S=frozen([-1.0] * S, np.float32))
        after, _ = commit(config, after, plan, drawn)
        yield config, host, after
        host = after


def runs(host: HostState) -> dict[str, int]:
    """The longest remaining run of each version's rows, in steps; prompts here need one."""
    longest: dict[str, int] = {}
    for row, version in enumerate(host.rows.versions):
        left = int(host.rows.limit_R[row] - host.rows.num_tokens_R[row])
        longest[version] = max(left, longest.get(version, 0))
    return longest


def longest_wait(steps: int, seed: int, *args: object, **options: object) -> tuple[int, int]:
    """Checks every promise; returns how many were kept, and the longest wait of a cold request."""
    due: dict[str, int] = {}
    kept = longest = 0
    for config, before, after in busy(steps, seed, *args, **options):
        waited_for: set[str] = set()  # by a promise and those before it
        for promise in after.adapters.reservations:
            waited_for.update(promise.victims)
            if promise not in before.adapters.reservations:
                left = [runs(after).get(v, 0) for v in waited_for]
                run = 1 + max(left, default=0)  # and this step's
                due.setdefault(promise.version, before.step + run)
        for version in [v for v in due if v in after.adapters.resident]:
            assert before.step <= due.pop(version), "a promise was kept too late"
            kept += 1
        late = [r for r in after.requests.values() if r.key not in after.rows.ids]
        for record in late:
            if record.version not in after.adapters.resident and record.version is not None:
                wait = after.step - 1 - record.queued_at
                longest = max(longest, wait)
                assert wait <= LIMIT + 50, f"{record.key} waits for {wait} steps"
            assert record.version is not None or after.step - record.queued_at < LIMIT + 50
        if after.step % 50 == 0:
            check_host(after, config.block_size)
    return kept, longest


@pytest.mark.parametrize("seed", range(2))
def test_a_cold_adapter_comes_in_within_the_bound(seed: int) -> None:
    kept, longest = longest_wait(800, seed)
    assert kept > 5, "no promise was needed, so nothing was tested"
    assert longest >= LIMIT


@pytest.mark.parametrize("seed", [1, 4])
def test_so_it_does_where_ranks_differ_and_rows_are_the_limit(seed: int) -> None:
    """A place is then made of several adapters' rows and of free ones, and nobody else may take
    one of them meanwhile: neither a younger promise, nor new rows of an adapter without any."""
    kept, longest = longest_wait(800, seed, MIXED, **FEW_ROWS)
    assert kept > 5
    assert longest >= LIMIT


@pytest.mark.slow
def test_a_cold_adapter_comes_in_within_the_bound_for_long() -> None:
    kept, _ = longest_wait(10_000, 7)
    assert kept > 100


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
