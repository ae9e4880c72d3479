"""A plan in flight changes no token, whatever happens between two steps (design, section 3)."""

import io
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.engine import (
    EngineState,
    Outputs,
    Program,
    Request,
    abort,
    adopt,
    begin_recording,
    branch,
    by_priority,
    commit,
    digest,
    execute,
    flush,
    fork,
    generate,
    init,
    launch,
    record,
    recover,
    replay,
    schedule,
    snapshot,
    step,
    step_ahead,
    submit,
    with_weights,
)
from purestep.engine.pack import gather_
from purestep.engine.pending import Ring
from purestep.state.checks import check_host
from purestep.state.errors import InFlightError, StepError, TornStateError
from purestep.state.plan import StepPlan
from purestep.state.request import Completion, frozen
from tests.engine.tiny import (
    Driver,
    gpu_twin,
    prompt,
    request,
    submit_all,
    tiny_program,
    with_adapters,
)


def history(program: Program, driver: Driver, items: list[Request]) -> dict[str, Completion]:
    """Run requests that arrive one by one, one of which is aborted; what each was told."""
    state, done, told = with_adapters(program), {}, {}
    waiting = list(items)
    for turn in range(400):
        if waiting and turn % 3 == 0:
            state = submit(state, waiting.pop(0))
        if turn == 9:
            state = abort(state, "1")
        if state.host.idle and not waiting:
            break
        state, outputs = driver(program, state)
        check_host(state.host, program.config.block_size)
        for key, token in zip(outputs.ids, outputs.tokens_S.tolist(), strict=True):
            told.setdefault(key, []).append(token)
        done |= {c.key: c for c in outputs.finished}
    assert state.host.idle
    assert not state.device.launched
    for key, completion in done.items():
        assert told.get(key, []) == completion.tokens.tolist()
    return done


def only_even(seen: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
    logits[1 - len(seen) % 2 :: 2] = -torch.inf
    return logits


def wishes(program: Program) -> list[Request]:
    """Of every kind: what looks at drawn tokens, what is collected over steps, what stops early."""
    embeds = torch.randn(6, program.config.model.hidden_size, generator=torch.manual_seed(0))
    names = [None, "a", "b", "c", "d"]
    plain = [
        request(str(n), prompt(n, 3 + 5 * n % 17), names[n % 5], max_tokens=3 + 4 * n % 23)
        for n in range(8)
    ]
    return [
        *plain,
        request("drawn", prompt(20, 5), "a", temperature=0.8, top_k=20, seed=3, max_tokens=12, n=3),
        request("penalty", prompt(21, 6), repetition_penalty=1.4, max_tokens=9),
        request("counted", prompt(22, 6), "b", frequency_penalty=0.9, max_tokens=9),
        request("own", prompt(23, 6), processor="even", max_tokens=7),
        request("scored", prompt(24, 11), prompt_logprobs=2, logprobs=3, max_tokens=6),
        request("only scored", prompt(25, 40), prompt_logprobs=1, max_tokens=0),
        replace(request("hidden", prompt(26, 9), "c", max_tokens=6), hidden_layers=(0, -1)),
        replace(request("soft", [], max_tokens=6), prompt_embeds=embeds),
        request("banned", prompt(27, 6), min_tokens=4, banned_ids=(3, 5), max_tokens=9),
        request("one", prompt(28, 7), max_tokens=1),
        request("long", prompt(29, 60), "d", max_tokens=5),
    ]


def same(one: Completion, two: Completion, atol: float = 1e-5) -> None:
    assert one.tokens.tolist() == two.tokens.tolist(), one.key
    assert (one.finish_reason, one.stop, one.error) == (two.finish_reason, two.stop, two.error)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=atol)
    for name in ("top_ids", "prompt_top_ids"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    if one.prompt_logprobs is not None:
        np.testing.assert_allclose(one.prompt_logprobs, two.prompt_logprobs, atol=atol)
    for layer, states in (one.hidden_states or {}).items():
        np.testing.assert_allclose(states, two.hidden_states[layer], atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 26])
def test_every_request_gets_what_plain_steps_give(
    eager_graphs: list, fused: bool, num_blocks: int
) -> None:
    """With chunked prompts, and in a pool so small that rows are preempted."""
    program = tiny_program(
        num_blocks=num_blocks, processors={"even": only_even}, row_buckets=(1, 2, 4, 8)
    )
    items = wishes(program)
    want = history(program, step, items)
    stops = int(want["3"].tokens[2])
    items[3] = replace(items[3], sampling=replace(items[3].sampling, stop_ids=(stops,)))
    want = history(program, step, items)
    assert len(want["3"].tokens) == 3
    got = history(replace(program, fused=fused, graphs=fused), step_ahead, items)
    assert bool(eager_graphs) == fused
    assert got.keys() == want.keys()
    for key, completion in want.items():
        same(got[key], completion)
    if num_blocks < 64:
        assert sum(c.num_preemptions for c in got.values()) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_blocks", [64, 26])
def test_so_it_is_on_a_gpu(num_blocks: int) -> None:
    """Float32, whose tokens do not hang on the shapes of steps."""
    options = {"num_blocks": num_blocks, "processors": {"even": only_even}}
    program = gpu_twin(tiny_program(), row_buckets=(1, 2, 4, 8), **options)
    items = wishes(program)
    want = history(program, step, items)
    got = history(program, step_ahead, items)
    assert got.keys() == want.keys()
    for key, completion in want.items():
        same(got[key], completion, atol=1e-4)


def test_the_next_step_is_queued_before_the_last_is_waited_for() -> None:
    """Four rows that decode: all but the first and the last step run behind another."""
    program = tiny_program()
    items = [request(str(n), prompt(n, 5), max_tokens=10) for n in range(4)]
    state, calls = submit_all(init(program), items), []
    while not state.host.idle:
        before = state
        state, outputs = step_ahead(program, state)
        flying = [plan.step for plan in state.host.in_flight]
        assert [pending.step for pending in state.device.launched] == flying
        calls.append((len(before.host.in_flight), len(outputs.ids), len(flying)))
    assert calls == [(0, 0, 1), *[(1, 4, 1)] * 9, (1, 4, 0)]


def flying(program: Program, *items: Request, names: str = "") -> EngineState:
    """A state with a plan in flight, some steps in."""
    state = submit_all(with_adapters(program, names), items)
    for _ in range(4):
        state, _ = step_ahead(program, state)
    assert state.host.in_flight
    return state


def finish(program: Program, state: EngineState, driver: Driver = step_ahead) -> dict:
    done = {}
    while not state.host.idle:
        state, outputs = driver(program, state)
        check_host(state.host, program.config.block_size)
        done |= {c.key: c.tokens.tolist() for c in outputs.finished}
    return done


def test_a_plain_step_lands_what_is_in_flight() -> None:
    program = tiny_program()
    items = [request(str(n), prompt(n, 5), max_tokens=10) for n in range(3)]
    want = finish(program, submit_all(init(program), items), step)
    state = flying(program, *items)
    state, outputs = step(program, state)
    assert len(outputs.ids) == 3
    assert not state.host.in_flight
    assert finish(program, state) == want


def test_what_cannot_be_done_in_flight_names_the_step(tmp_path: Path) -> None:
    program = tiny_program()
    state = flying(program, request("x", prompt(1, 5), max_tokens=10))
    other = with_weights(program, program.params, version="other")
    before = digest(state.host)
    for call in (
        lambda: branch(state, "x", ["y"]),
        lambda: flush(state),
        lambda: adopt(other, state),
        lambda: fork(program, state),
        lambda: snapshot(state, tmp_path / "s"),
        lambda: begin_recording(io.StringIO(), state),
    ):
        with pytest.raises(StepError, match="step 3 was scheduled and not committed"):
            call()
    assert digest(state.host) == before
    assert list(tmp_path.iterdir()) == []


def test_who_has_to_wait_for_the_plan_in_flight() -> None:
    """A penalty counts the token in flight; so does a processor, and a row that takes blocks."""
    program = tiny_program(processors={"even": only_even}, num_blocks=8)
    for name, words in (("p", {"presence_penalty": 0.5}), ("q", {"processor": "even"})):
        state = submit(init(program), request(name, prompt(1, 5), max_tokens=9, **words))
        host, _ = schedule(program.config, state.host)
        before = digest(host)
        with pytest.raises(InFlightError, match=f"commit step 0 first, since .*{name!r}"):
            schedule(program.config, host)
        assert digest(host) == before
    items = [request(n, prompt(ord(n), 12), max_tokens=12) for n in "xy"]
    state, refused = submit_all(init(program), items), []
    while not state.host.idle:
        if state.host.in_flight:
            try:
                schedule(program.config, state.host)
            except InFlightError as error:
                refused.append(str(error))
        state, _ = step_ahead(program, state)
    assert refused
    assert all("blocks, of which 0 are free" in error for error in refused)


def failing(*_: object) -> torch.Tensor:
    raise RuntimeError("injected")


def test_a_step_that_fails_behind_one_in_flight_leaves_that_alone() -> None:
    """The state stays valid with its plan in flight, and is tried again."""
    program = tiny_program()
    items = [request(n, prompt(ord(n), 9), max_tokens=9) for n in "xyz"]
    want = finish(program, submit_all(init(program), items), step)
    state = flying(program, *items)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="injected"):
            step_ahead(replace(program, layer=failing, fused=False), state)
    assert recover(state) is state
    assert finish(program, state) == want


def test_recovery_behind_one_in_flight_keeps_its_results() -> None:
    """The failed plan had evicted cached blocks and an adapter."""
    program = tiny_program(num_blocks=12, max_active_adapters=2, lora_rows=24)
    old = request("old", prompt(9, 24), "a", max_tokens=1)
    state = submit(with_adapters(program, "ab"), old)
    while not state.host.idle:
        state, _ = step(program, state)
    items = [request("x", prompt(1, 5), max_tokens=9), request("y", prompt(2, 28), "b")]
    want = finish(program, submit_all(with_adapters(program, "b"), items), step)
    state, _ = step_ahead(program, submit(state, items[0]))
    state = submit(state, items[1])
    cached = state.host.blocks.num_cached
    with pytest.raises(RuntimeError, match="injected"):
        step_ahead(replace(program, layer=failing, fused=False), state)
    with pytest.raises(TornStateError, match="recover"):
        step_ahead(program, state)
    state = recover(state)
    check_host(state.host, 4)
    assert state.host.in_flight
    assert state.host.blocks.num_cached < cached
    assert finish(program, state) == want


@pytest.mark.parametrize("ahead", [False, True])
def test_results_that_cannot_be_had_are_computed_anew(ahead: bool) -> None:
    """The device fails in the step in flight, and takes the one behind it along."""
    program = tiny_program()
    items = [request(n, prompt(ord(n), 9), "ab"[n == "y"], max_tokens=9) for n in "xyz"]
    want = finish(program, submit_all(with_adapters(program, "ab"), items), step)
    for _ in range(3):
        state = flying(program, *items, names="ab")
        state.device.launched[0].read = failing
        with pytest.raises(RuntimeError, match="injected"):
            (step_ahead if ahead else step)(program, state)
        with pytest.raises(TornStateError, match=r"step 3 failed in flight.*recover"):
            step_ahead(program, state)
        state = recover(state)
        check_host(state.host, 4)
        assert not state.host.in_flight
        assert not state.device.launched
        assert finish(program, state) == want


def test_two_plans_whose_results_cannot_be_had_are_computed_anew() -> None:
    """Both were queued by hand before the first was waited for."""
    program = tiny_program()
    items = [request(n, prompt(ord(n), 9), max_tokens=9) for n in "xyz"]
    want = finish(program, submit_all(init(program), items), step)
    state = flying(program, *items)
    host, plan = schedule(program.config, state.host)
    device = launch(program, state.device, plan, state.blobs)
    state = replace(state, host=host, device=device)
    state.device.launched[0].read = failing
    with pytest.raises(RuntimeError, match="injected"):
        step(program, state)
    state = recover(state)
    check_host(state.host, 4)
    assert not state.host.in_flight
    assert finish(program, state) == want


def test_an_interrupted_wait_may_be_repeated() -> None:
    program = tiny_program()
    items = [request(n, prompt(ord(n), 9), max_tokens=9) for n in "xyz"]
    want = finish(program, submit_all(init(program), items), step)
    state = flying(program, *items)
    read, pending = state.device.launched[0].read, state.device.launched[0]

    def interrupted() -> None:
        pending.read = read
        raise KeyboardInterrupt

    pending.read = interrupted
    with pytest.raises(KeyboardInterrupt):
        step_ahead(program, state)
    assert finish(program, state) == want


class OnDevice(torch.Tensor):
    """A CPU's tensor that says it lies on a GPU."""

    is_cuda = True


def test_a_step_that_is_queued_again_leaves_the_draws_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 4 is queued twice before step 3 is read, as after an interrupted wait."""
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    ring = Ring()
    draws = {step: torch.full((2, 5), step, dtype=torch.int32) for step in range(3, 7)}
    read = {n: ring.receive(found.as_subclass(OnDevice), n) for n, found in draws.items() if n < 5}
    read[4] = ring.receive(draws[4].as_subclass(OnDevice), 4)
    assert (read[3]() == 3).all()
    read[5] = ring.receive(draws[5].as_subclass(OnDevice), 5)
    assert (read[4]() == 4).all()
    assert (read[5]() == 5).all()


def test_two_plans_by_hand_take_their_ids_from_the_device() -> None:
    """Both are made before either runs. Another device, or another order, has not those ids."""
    program = tiny_program()
    state = submit_all(init(program), [request(n, prompt(ord(n), 4)) for n in "xyz"])
    want = finish(program, fork(program, state), step)
    twin = fork(program, state)
    host, first = schedule(program.config, state.host)
    host, second = schedule(program.config, host)
    assert second.tokens_T.tolist() == [-1] * 3
    assert second.gathered_T.tolist() == [0, 1, 2]
    with pytest.raises(StepError, match="step 1 takes tokens that step 0 draws"):
        execute(program, twin.device, second, twin.blobs)
    device, one = execute(program, state.device, first, state.blobs)
    device, two = execute(program, device, second, state.blobs)
    host, _ = commit(program.config, host, first, one)
    host, outputs = commit(program.config, host, second, two)
    for key, token in zip(outputs.ids, outputs.tokens_S.tolist(), strict=True):
        assert want[key][1] == token
    assert finish(program, replace(state, host=host, device=device)) == want


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=9))
def test_ids_are_gathered_where_the_plan_says(gathered: list[int]) -> None:
    state = submit(init(tiny_program()), request("x", prompt(1, 5)))
    _, plan = schedule(state.config, state.host)
    plan: StepPlan = replace(plan, gathered_T=frozen([*gathered, -1, 0]))
    token_T = torch.arange(100, 100 + len(gathered) + 3)
    want = [token if g < 0 else 7 * g for g, token in zip(plan.gathered_T, token_T, strict=False)]
    gather_(token_T, plan, 7 * torch.arange(7, dtype=torch.int32))
    assert token_T.tolist() == [*want, 100 + len(gathered) + 2]


def test_a_recorded_run_with_plans_in_flight_is_folded() -> None:
    program, tape = tiny_program(num_blocks=14), io.StringIO()
    state = init(program)
    begin_recording(tape, state)
    lost = 0
    for n in range(6):
        state = record(tape, submit, state, request(str(n), prompt(n, 9), max_tokens=9))
        for driver in (step_ahead, step_ahead, step):
            state, _ = record(tape, driver, program, state, by_priority)
    while not state.host.idle:
        if state.host.in_flight and lost < 2:
            state.device.launched[0].read = failing
            with pytest.raises(RuntimeError):
                record(tape, step_ahead, program, state)
            state, lost = record(tape, recover, state), lost + 1
        state, _ = record(tape, step_ahead, program, state)
        assert digest(replay(program.config, tape.getvalue().splitlines())) == digest(state.host)
    assert lost == 2


def test_generate_tells_the_same_either_way() -> None:
    program = tiny_program(max_rows=4)
    items = [
        request(str(n), prompt(n, 1 + n % 9), max_tokens=1 + n % 5, n=1 + n % 3 // 2)
        for n in range(20)
    ]
    found = []
    for advance in (step, step_ahead):
        steps: list[Outputs] = []
        done = generate(program, items, advance=advance, on_step=steps.append)
        found.append({c.key: c.tokens.tolist() for c in done})
        numbers = [outputs.step for outputs in steps]
        assert numbers == list(range(len(numbers))), "each step is told once"
        assert sum(len(outputs.ids) for outputs in steps) == sum(map(len, found[-1].values()))
    assert found[0] == found[1]
