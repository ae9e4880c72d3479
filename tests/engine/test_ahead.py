"""Work queued ahead changes no token, whatever happens between two steps. Graphs are played by
their eager functions here, so that this needs no GPU."""

from dataclasses import replace

import numpy as np

from purestep.engine import (
    EngineState,
    HostState,
    Order,
    Program,
    abort,
    fcfs,
    fork,
    init,
    progress,
    schedule,
    step,
    step_ahead,
    submit,
)
from purestep.engine.graphs import graphs_of
from purestep.state.checks import check_host
from purestep.state.plan import StepPlan
from purestep.state.request import all_tokens
from tests.engine.tiny import prompt, request, run, tiny_program, with_adapters

BUCKETS = (1, 2, 4, 8)


def pair(**options) -> tuple[Program, Program]:
    plain = tiny_program(row_buckets=BUCKETS, **options)
    return plain, replace(plain, fused=True, graphs=True)


def wishes(count: int) -> list:
    names = [None, "a", "b", "c", "d"]
    return [
        request(str(n), prompt(n, 3 + 5 * n % 17), names[n % 5], max_tokens=3 + 4 * n % 23)
        for n in range(count)
    ]


def test_same_tokens_with_arrivals_and_ends(eager_graphs: list) -> None:
    """More requests than rows, all lengths different."""
    plain, ahead = pair(max_rows=4)
    _, want = run(plain, with_adapters(plain), wishes(11))
    _, got = run(ahead, with_adapters(ahead), wishes(11))
    assert eager_graphs, "nothing was replayed"
    for name, done in want.items():
        assert got[name].tokens.tolist() == done.tokens.tolist()
        np.testing.assert_allclose(got[name].logprobs, done.logprobs, atol=1e-5)


def test_rows_that_ask_for_the_likeliest_tokens_are_guessed_too(eager_graphs: list) -> None:
    requests = [request(str(n), prompt(n, 6), logprobs=n - 1, max_tokens=6) for n in range(1, 4)]
    plain, ahead = pair()
    _, want = run(plain, init(plain), [request("0", prompt(0, 6)), *requests])
    _, got = run(ahead, init(ahead), [request("0", prompt(0, 6)), *requests])
    assert eager_graphs, "nothing was replayed"
    for name, done in want.items():
        assert got[name].tokens.tolist() == done.tokens.tolist()
        np.testing.assert_array_equal(got[name].top_ids, done.top_ids)


def test_same_tokens_with_preemption(eager_graphs: list) -> None:
    options = {"num_blocks": 14, "max_rows": 6}
    requests = [request(str(n), prompt(n, 6 + n), max_tokens=16) for n in range(6)]
    plain, ahead = pair(**options)
    _, want = run(plain, with_adapters(plain, ""), requests)
    _, got = run(ahead, with_adapters(ahead, ""), requests)
    assert sum(done.num_preemptions for done in got.values()) > 0
    for name, done in want.items():
        assert got[name].tokens.tolist() == done.tokens.tolist()


def test_same_tokens_with_stops_aborts_and_a_fork(eager_graphs: list) -> None:
    plain, ahead = pair()
    found = []
    for program in (plain, ahead):
        first = run(plain, with_adapters(plain, ""), [request("p", prompt(3, 9))])[1]["p"]
        state = with_adapters(program)
        for item in wishes(5):
            state = submit(state, item)
        state = submit(
            state, request("s", prompt(3, 9), stop_ids=(int(first.tokens[4]),), ignore_eos=False)
        )
        done: dict = {}
        for turn in range(60):
            if turn == 4:
                state = abort(state, "2")
            if turn == 6:
                twin = finish(program, fork(program, state))
            if turn == 7:
                state = submit(state, request("late", prompt(9, 11), "b"))
            if state.host.idle:
                break
            state, outputs = step(program, state)
            check_host(state.host, program.config.block_size)
            done |= {c.id: c.tokens.tolist() for c in outputs.finished}
        found.append((done, twin))
    assert found[0] == found[1]
    assert len(found[0][0]["s"]) <= 5


def finish(program: Program, state: EngineState) -> dict:
    return {name: done.tokens.tolist() for name, done in run(program, state)[1].items()}


def test_a_step_takes_over_what_was_queued(eager_graphs: list) -> None:
    """One row alone: every decode step but the first was queued by the one before."""
    _, ahead = pair()
    state = submit(with_adapters(ahead, ""), request("x", prompt(1, 5), max_tokens=10))
    state, _ = step(ahead, state)
    assert len(eager_graphs) == 1, "the first decode was queued behind the prompt"
    for n in range(2, 10):
        state, _ = step(ahead, state)
        assert len(eager_graphs) == min(n, 9)
    state, _ = step(ahead, state)
    assert state.host.idle
    assert len(eager_graphs) == 9, "nothing is queued behind a step that surely is the last"


def test_another_request_of_the_same_name_does_not_get_what_was_queued(
    eager_graphs: list,
) -> None:
    """It ends in another token, and finds the blocks before that one cached: the same rows, places
    and blocks as the step that was queued, whose keys it must not see either."""
    plain, ahead = pair(num_blocks=8)
    for program, driver in ((ahead, step), (ahead, step_ahead)):
        state = submit(with_adapters(program, ""), request("x", prompt(1, 6), max_tokens=20))
        while not state.host.rows.ids or state.host.rows.num_tokens_R[0] < 9:
            state, _ = step(program, state)
        tokens = [*all_tokens(progress(state.host, "x"))]
        state = abort(state, "x")
        queued = graphs_of(state.device.pool).ahead[1]
        other = request("x", [*tokens[:8], (tokens[8] + 1) % 128], max_tokens=6)
        state = submit(state, other)
        _, plan = schedule(program.config, state.host)
        assert same_places_and_rows(queued, plan)
        want = run(plain, with_adapters(plain, ""), [other])[1]["x"]
        done = {}
        while not state.host.idle:
            state, outputs = driver(program, state)
            done |= {c.id: c for c in outputs.finished}
        assert done["x"].tokens.tolist() == want.tokens.tolist()
        np.testing.assert_allclose(done["x"].logprobs, want.logprobs, atol=1e-5)


def same_places_and_rows(one: StepPlan, two: StepPlan) -> bool:
    (first,), (second,) = one.tables, two.tables
    return (
        (one.row_ids, one.descriptor) == (two.row_ids, two.descriptor)
        and one.start_R.tolist() == two.start_R.tolist()
        and first.tolist() == second.tolist()
    )


def test_a_policy_that_fails_on_a_guess_hurts_no_step(eager_graphs: list) -> None:
    """A guessed state may never come about; what its policy raises there is not the step's."""
    plain, ahead = pair()
    item = request("x", prompt(1, 5), max_tokens=10)
    guessed = []

    def policy(host: HostState) -> Order:
        if host.rows.ids and (newest(host) == 0).all():  # what a guess draws, and the model never
            guessed.append(host.step)
            raise RuntimeError("not on a guess")
        return fcfs(host)

    state, done = submit(with_adapters(ahead, ""), item), {}
    while not state.host.idle:
        state, outputs = step(ahead, state, policy)
        done |= {c.id: c.tokens.tolist() for c in outputs.finished}
    assert len(guessed) > 3
    assert done["x"] == run(plain, with_adapters(plain, ""), [item])[1]["x"].tokens.tolist()


def newest(host: HostState) -> np.ndarray:
    rows = host.rows
    return rows.tail_RB[np.arange(len(rows.ids)), (rows.num_tokens_R - 1) % rows.tail_RB.shape[1]]
