"""Nothing in a step waits for the device but the reading of its results."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from purestep.engine import Program, Request, init, make_program, schedule, step, step_ahead
from purestep.engine import sampling as sampling_of
from purestep.engine.pending import Ring
from purestep.engine.sampling import sampled
from purestep.engine.upload import Arrays
from tests.engine.test_graphs import RANKS, gpu_program, needs_gpu, with_ranks
from tests.engine.tiny import prompt, request, run, submit_all, tiny_program

gpu = pytest.mark.gpu

WARM = {"temperature": 0.8, "seed": 3}
KINDS = {
    "greedy": {},
    "warm": WARM,
    "top_k": WARM | {"top_k": 5},
    "top_p": WARM | {"top_p": 0.9},
    "min_p": WARM | {"min_p": 0.1},
    "all": WARM | {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "biased": {"logit_bias": {5: 2.0, 7: -float("inf")}},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.1},
    "limited": WARM | {"banned_ids": (3, 4), "allowed_ids": (5, 6, 7), "logprobs": 2},
    "told": {"logprobs": 3},
    "told more": {"logprobs": 0},
}


def mixed(count: int = 60) -> list[Request]:
    return [
        request(name, prompt(n, 3 + n), max_tokens=count, **words)
        for n, (name, words) in enumerate(KINDS.items())
    ]


def test_sampling_looks_at_no_value_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that have none: a shape or a branch that hangs on one raises."""
    program = tiny_program(max_rows=16, max_batched_tokens=256)
    state, _ = step(program, submit_all(init(program), mixed()))
    _, plan = schedule(state.config, state.host)
    rows, mode = plan.sampling, FakeTensorMode()
    assert len(rows.temperature_S) == len(KINDS)
    assert len(rows.edits) == 3

    def sent(arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
        return {name: mode.from_tensor(torch.from_numpy(np.array(a))) for name, a in arrays.items()}

    monkeypatch.setattr(sampling_of, "sent", sent)
    with mode:
        raw_SV = torch.empty(len(KINDS), 128)
        token_S, _ = sampled(raw_SV, rows, {}, Ring(), plan.step)
        assert token_S.shape == (len(KINDS),)
        with pytest.raises(DataDependentOutputException):
            raw_SV.amax().item()


def test_rows_of_every_kind_say_the_same_with_work_queued_ahead(eager_graphs: list) -> None:
    """What is queued behind a step is planned from a guess of all that its rows ask for."""
    sizes = {"max_rows": 16, "max_batched_tokens": 256, "num_blocks": 100}
    plain = tiny_program(**sizes, row_buckets=(4, 16))
    _, want = run(plain, init(plain), mixed(6))
    ahead = replace(plain, fused=True, graphs=True)
    _, got = run(ahead, init(ahead), mixed(6))
    assert len(eager_graphs) == 5
    for name, done in want.items():
        assert got[name].tokens.tolist() == done.tokens.tolist(), name
        np.testing.assert_array_equal(got[name].top_ids, done.top_ids)


def run_without_waits(program: Program, state, count: int, turns: int, driver) -> None:
    for _ in range(turns):
        state, _ = driver(program, state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(turns):
            state, outputs = driver(program, state)
            assert len(outputs.ids) == count
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@needs_gpu
@pytest.mark.parametrize("driver", [step, step_ahead])
def test_rows_of_every_kind_decode_without_a_wait(driver) -> None:
    program, items = gpu_program(), mixed()
    if driver is step_ahead:  # what looks at drawn tokens waits for them
        items = [item for item in items if item.id != "penalised"]
    state = submit_all(with_ranks(program, RANKS), items)
    run_without_waits(program, state, len(items), 5, driver)


@gpu
@needs_gpu
def test_prompts_scores_hidden_states_and_uploads_wait_for_nothing() -> None:
    """The second time: the first compiles kernels."""
    program = gpu_program(max_active_adapters=2, lora_rows=48)
    state = with_ranks(program, RANKS)
    for turn in range(2):
        names = [str(4 * turn), str(4 * turn + 1), None]  # which are not on the device yet
        items = [
            replace(request(f"{turn}{n}", prompt(n, 20 + n), name, **words), hidden_layers=(0, -1))
            for n, (name, words) in enumerate(
                zip(names, ({}, KINDS["all"], {"prompt_logprobs": 2}), strict=True)
            )
        ]
        state = submit_all(state, items)
        if turn:
            torch.cuda.set_sync_debug_mode("error")
        try:
            while not state.host.idle:
                state, _ = step(program, state)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@gpu
@needs_gpu
def test_sampled_tokens_are_those_of_a_cpu() -> None:
    """The same noise, the same cuts, the same edits, in float32."""
    found = []
    for device in ("cpu", "cuda"):
        cpu = tiny_program(max_rows=16, max_batched_tokens=256)
        params = torch.utils._pytree.tree_map(
            lambda t, device=device: None if t is None else t.to(device), cpu.params
        )
        program = make_program(
            cpu.config.model, params, weights="w", dtype="float32", device=device, block_size=4,
            num_blocks=200, max_rows=16, max_batched_tokens=256,
        )  # fmt: skip
        state, done = submit_all(init(program), mixed(12)), {}
        while not state.host.idle:
            state, outputs = step(program, state)
            done |= {c.id: c for c in outputs.finished}
        found.append(done)
    for name, want in found[0].items():
        assert found[1][name].tokens.tolist() == want.tokens.tolist(), name
        np.testing.assert_allclose(found[1][name].logprobs, want.logprobs, atol=1e-4)
        np.testing.assert_array_equal(found[1][name].top_ids, want.top_ids)


@gpu
@needs_gpu
def test_a_row_without_a_token_left_ends_alone_on_a_gpu() -> None:
    program = gpu_program()
    bias = {token: -float("inf") for token in range(128)}
    items = [request("x", prompt(1, 5), logit_bias=bias), request("y", prompt(1, 5))]
    state, done = submit_all(init(program), items), {}
    while not state.host.idle:
        state, outputs = step(program, state)
        done |= {c.id: c for c in outputs.finished}
    assert "no token is left" in done["x"].error
    assert len(done["y"].tokens) == 8
