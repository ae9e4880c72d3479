"""A long run of random events over many configs, and the shortening of one that failed."""

import json
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from purestep.engine.policy import by_priority, fcfs
from purestep.simulation.coverage import Coverage
from purestep.simulation.events import first_events, pick, random_config, random_event
from purestep.simulation.machine import Event, Machine
from purestep.simulation.told import Astray
from purestep.simulation.world import toy_config

POLICIES = {"fcfs": fcfs, "by_priority": by_priority}
STEPS_OF_ONE_STATE = 2000
KEPT_STATES = 500  # one in so many events
MOST_LINES = 50  # that tell how far a run has come
FEWEST_CONFIGS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a run of events starts from."""

    config: dict[str, Any]
    policy: str

    def machine(self, **options: Any) -> Machine:
        return Machine(toy_config(**self.config), POLICIES[self.policy], **options)


class Failure(Exception):
    """A run that broke a law, and which."""

    def __init__(self, world: World, events: Sequence[Event], law: str, why: str) -> None:
        super().__init__(world, events, law, why)  # whole, as it comes back from another process
        self.world, self.events, self.law, self.why = world, list(events), law, why

    def __str__(self) -> str:
        return f"after {len(self.events)} events: {self.law}: {self.why}"


def caught_by(cause: BaseException) -> str:
    """Which law an exception comes from: the output law, another one by its name, or none of them
    but the engine itself, by the exception's class."""
    if isinstance(cause, Astray):
        return "output law"
    frames = [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    laws = [name for name in frames if name.startswith(("law_", "check_"))]
    return laws[-1] if laws and isinstance(cause, AssertionError) else type(cause).__name__


def random_world(seed: int, number: int) -> World:
    rng = np.random.default_rng((seed, number))
    config = random_config(rng)
    return World(config=config, policy=pick(rng, ("fcfs", "by_priority")))


def run_random(world: World, rng: np.random.Generator, num_steps: int, **options: Any) -> None:
    """Let random events happen to a new state until `num_steps` of them were steps, then let
    everything end. Raises Failure."""
    machine, events, steps = world.machine(**options), [], 0
    queue = first_events(rng)
    try:
        while steps < num_steps:
            event = queue.pop(0) if queue else random_event(rng, machine)
            events.append(event)
            machine.do(event)
            steps += machine.plan is not None
        machine.drain()
    except Exception as error:
        raise Failure(world, events, caught_by(error), str(error)) from error


def run_events(world: World, events: Sequence[Event], **options: Any) -> BaseException | None:
    """What goes wrong in a list of events, if anything does."""
    machine = world.machine(**options)
    try:
        for event in events:
            machine.do(event)
        machine.drain()
    except Exception as error:
        return error
    return None


def shortened(
    events: Sequence[Event], fails: Callable[[Sequence[Event]], bool], seconds: float = 60
) -> list[Event]:
    """The list without whatever it fails without: halves first, single events last."""
    left, size, end = list(events), max(1, len(events) // 2), time.monotonic() + seconds
    while time.monotonic() < end:
        at, before = 0, len(left)
        while at < len(left) and time.monotonic() < end:
            fewer = [*left[:at], *left[at + size :]]
            if fails(fewer):
                left = fewer
            else:
                at += size
        if size == 1 and len(left) == before:
            break
        size = max(1, size // 2)
    return left


def report(failure: Failure, seed: int) -> str:
    """What to put into a bug report: the seed, and as few events as still fail."""
    world = failure.world
    few = shortened(failure.events, lambda some: run_events(world, some) is not None)
    lines = [json.dumps(event, ensure_ascii=False) for event in few]
    head = f"{failure}\nseed {seed}, {world}\n{len(few)} events are enough:"
    return "\n".join([head, *lines, f"which fail with: {run_events(world, few)!r}"])


def configs_for(num_steps: int) -> int:
    """Over how many configs a run of so many steps is spread: each gets as many as one state."""
    return max(FEWEST_CONFIGS, num_steps // STEPS_OF_ONE_STATE)


def long_run(
    num_steps: int,
    seed: int,
    num_configs: int,
    *,
    num_jobs: int = 1,
    tells: Callable[[str], object] = print,
) -> Coverage:
    """`num_steps` steps over `num_configs` configs, every law checked after each. Raises Failure.
    An interrupt (Ctrl-C) ends it early with what was seen until then.

    What happens depends on the other arguments alone, not on `num_jobs`, the processes to use.
    """
    start, total = time.perf_counter(), Coverage()
    each = -(-num_steps // num_configs)
    starts = range(0, each, STEPS_OF_ONE_STATE)
    counts = [min(STEPS_OF_ONE_STATE, each - done) for done in starts]
    parts = [(n, part, count) for n in range(num_configs) for part, count in enumerate(counts)]
    task = partial(run_part, seed)
    quiet = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ProcessPoolExecutor(num_jobs, **quiet) if num_jobs > 1 else nullcontext() as pool:
        runs = pool.map(task, parts) if pool else map(task, parts)
        try:
            for (_, part, _), coverage in zip(parts, runs, strict=True):
                total.counts += coverage.counts
                total.events += coverage.events
                if part < len(counts) - 1:
                    continue
                total.configs += 1
                if total.configs % max(1, num_configs // MOST_LINES):
                    continue
                elapsed, steps = time.perf_counter() - start, total.events["step"]
                events = total.events.total()
                tells(
                    f"{total.configs:>4,} configs: {steps:>9,} steps, {events:>9,} events, "
                    f"{steps / elapsed:,.0f} steps/s, {events / elapsed:,.0f} events/s"
                )
        except KeyboardInterrupt:
            tells("interrupted; what follows is of the parts that were whole")
            if pool:
                pool.shutdown(wait=False, cancel_futures=True)
    return total


def run_part(seed: int, part: tuple[int, int, int]) -> Coverage:
    """Some of a config's steps, (config, part, steps), on a state of their own: so a failure is
    near the beginning of its list of events, and processes share the work evenly. Raises
    Failure."""
    number, index, num_steps = part
    coverage, rng = Coverage(), np.random.default_rng((seed, number, index))
    run_random(random_world(seed, number), rng, num_steps, keep=KEPT_STATES, sees=coverage.see)
    return coverage
