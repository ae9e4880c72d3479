"""The long run finds nothing in the engine, and tells shortly what it finds in a broken one."""

import json

import numpy as np
import pytest

from purestep.simulation.coverage import TRANSITIONS
from purestep.simulation.longrun import (
    Failure,
    caught_by,
    configs_for,
    long_run,
    random_world,
    report,
    run_events,
    run_random,
    shortened,
)
from purestep.simulation.mutants import MUTANTS, applied


def test_a_short_long_run_breaks_no_law_and_counts_what_happened() -> None:
    lines: list[str] = []
    coverage = long_run(600, 5, 3, tells=lines.append)
    assert coverage.events["step"] >= 600
    assert len(lines) == coverage.configs == 3
    assert coverage.counts["preemption"] > 0
    assert set(coverage.counts) <= set(TRANSITIONS)
    assert len(coverage.table().splitlines()) == len(TRANSITIONS)


def test_a_million_steps_are_of_far_more_than_fifty_configs() -> None:
    assert configs_for(1_000_000) == 500
    assert configs_for(1000) == 50


def test_a_run_depends_on_its_seed_alone() -> None:
    runs = []
    for _ in range(2):
        seen: list[object] = []
        rng = np.random.default_rng(3)
        run_random(
            random_world(3, 0), rng, 60, sees=lambda event, *_, seen=seen: seen.append(event)
        )
        runs.append(json.dumps(seen))
    assert runs[0] == runs[1]


def test_a_broken_engine_fails_in_few_events() -> None:
    (bug,) = (bug for bug in MUTANTS if bug.name == "a block stays findable once reallocated")
    with applied(bug), pytest.raises(Failure) as caught:
        long_run(2000, 7, 4, tells=lambda line: None)
    failure = caught.value
    with applied(bug):
        text = report(failure, 7)
    assert text.splitlines()[1].startswith("seed 7, World(config={")
    few = [json.loads(line) for line in text.splitlines()[3:-1]]
    assert 0 < len(few) < len(failure.events)
    assert run_events(failure.world, few) is None, "the events are fine once the bug is gone"
    with applied(bug):
        assert caught_by(run_events(failure.world, few)) != "NoneType"


def test_shortening_leaves_what_is_needed() -> None:
    events = [("step", {"number": i}) for i in range(40)]
    needed = [events[3], events[17], events[18]]
    assert shortened(events, lambda some: all(event in some for event in needed)) == needed
