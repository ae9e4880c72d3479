"""Bounded wait: an adapter's request is admitted in time, however busy the other adapters are.

Spec 11.3; the bound is derived in `engine/admission.py`. Nothing is computed here: tokens are made
up, so that the scheduler alone is tried.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from purestep.engine import Config, HostState, StepResult, commit, deliver, schedule
from purestep.engine.policy import by_priority, fcfs
from purestep.engine.requests import submit_host
from purestep.simulation.world import loaded, toy_config, toy_state
from purestep.state.engine import check_host
from purestep.state.request import Request, frozen
from purestep.state.sampling import SamplingParams

HOT, LIMIT = 8, 40


def busy(steps: int, seed: int, **options: object) -> Iterator[tuple[Config, HostState, HostState]]:
    """(config, before, after) of steps in which eight hot adapters always have three requests, and
    now and then one of three cold ones or the base model has one."""
    rng = np.random.default_rng(seed)
    words = {"num_blocks": 400, "max_rows": 40, "max_batched_tokens": 64, "max_context": 60}
    slots = {"max_active_adapters": HOT, "max_registered_adapters": 16, "lora_rows": 8 * HOT}
    fixed = {"adapter_age_limit": LIMIT, "stop_ids": ()}
    config = toy_config(**words | slots | fixed | options)
    state = toy_state(config)
    for n in range(HOT + 3):
        state = deliver(state, loaded(f"a{n}", f"v{n}", 8, None))
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


def longest_wait(steps: int, seed: int) -> tuple[int, int]:
    """Checks every promise; returns how many were kept, and the longest wait of a cold request."""
    due: dict[str, int] = {}
    kept = longest = 0
    for config, before, after in busy(steps, seed):
        for promise in after.adapters.reservations:
            if promise not in before.adapters.reservations:
                run = 1 + max(runs(after).get(v, 0) for v in promise.victims)  # and this step's
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
