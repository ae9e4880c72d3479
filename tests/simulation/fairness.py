"""Bounded wait, at length: hot adapters that saturate the device, and cold ones now and then.

Spec 11.3; the bound is derived in `engine/admission.py`. Nothing is computed here: tokens are made
up, so that the scheduler alone is tried.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from purestep.engine.adapters import deliver
from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.policy import by_priority, fcfs
from purestep.engine.requests import submit_host
from purestep.engine.schedule import schedule
from purestep.simulation.laws import law_15_bounded_wait
from purestep.simulation.world import loaded, toy_config, toy_state
from purestep.state.checks import check_host
from purestep.state.engine import HostState
from purestep.state.plan import StepResult
from purestep.state.request import Request, frozen
from purestep.state.sampling import SamplingParams

HOT, LIMIT = 8, 40
MOST_TOKENS = 49  # that a request generates
ALIKE = (8,) * (HOT + 3)
MIXED = (8, 16, 24, 8, 16, 24, 8, 16, 24, 8, 16)  # 120 rows of the hot ones
FEW_ROWS = {"max_active_adapters": 12, "lora_rows": 120, "max_lora_rank": 24}  # they are the limit


def busy(
    steps: int, seed: int, ranks: tuple[int, ...] = ALIKE, **options: object
) -> Iterator[tuple[Config, HostState, HostState]]:
    """(config, before, after) of steps in which eight hot adapters always have three requests, and
    now and then one of three cold ones or the base model has one."""
    rng = np.random.default_rng(seed)
    words = {"num_blocks": 800, "max_rows": 40, "max_batched_tokens": 64, "max_context": 60}
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
            length = int(rng.integers(1, MOST_TOKENS + 1))
            request = Request(
                id=f"{number}#{hot}#",
                tokens=[1] * int(rng.integers(1, 9)),
                adapter=name,
                priority=int(rng.integers(0, 2)) if name in names[:4] else 0,
                sampling=SamplingParams(temperature=0, max_tokens=length),
            )
            host = submit_host(config, host, request)
        policy = by_priority if options.get("adapter_preemption") else fcfs
        after, plan = schedule(config, host, policy)
        S = int(plan.sampled_R.sum())
        drawn = StepResult(token_S=frozen([3] * S), logprob_S=frozen([-1.0] * S, np.float32))
        after, _ = commit(config, after, plan, drawn)
        yield config, host, after
        host = after


@dataclass(frozen=True, slots=True)
class Waits:
    """What a run saw of requests whose adapters had no place."""

    promises: int  # kept, each in time
    longest: int  # steps
    most: int  # the bound for all of them: the age limit, and the longest run there can be

    def __str__(self) -> str:
        return f"{self.promises:,} promises kept, longest wait {self.longest} of {self.most} steps"


def longest_wait(steps: int, seed: int, *args: object, **options: object) -> Waits:
    """Checks every promise and every wait. Raises AssertionError."""
    due: dict[str, int] = {}
    kept = longest = 0
    most = LIMIT + MOST_TOKENS + 1  # one token a step, and the prompt
    for config, before, after in busy(steps, seed, *args, **options):
        kept += law_15_bounded_wait(due, before, after)
        for key in after.waiting:
            record = after.requests[key]
            wait = after.step - 1 - record.queued_at
            assert record.version is not None or wait < LIMIT + MOST_TOKENS, f"base {key} waits"
            if record.version is not None and record.version not in after.adapters.resident:
                longest = max(longest, wait)
                assert wait <= most, f"{key} waits for {wait} steps"
        if after.step % 50 == 0:
            check_host(after, config.block_size)
    return Waits(kept, longest, most)
