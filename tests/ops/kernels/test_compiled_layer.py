"""The compiled layer, head and sampler as they run on a GPU: triton's interpreter, 16 bits, tensors
that say they are on one. Products have addends for few tokens, for many they begin what also holds
those with adapter rows, and they leave deltas to their readers.

The law on a real one is in tests/engine/test_graphs.py.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from purestep.engine import EngineState, Program, schedule
from purestep.engine.graphs import graphs_of
from purestep.engine.pack import pack_fused
from purestep.engine.pool import upload_adapter_
from purestep.models.compiled import compile_ends, compile_fused_layer
from purestep.models.ends import EAGER, Ends
from purestep.models.fused import FusedLayerFn, fused_forward, fused_layer
from purestep.models.room import make_room, moved_in
from purestep.ops.sample import Draws, draws_of
from tests.engine.tiny import prompt, request, submit_all, tiny_program, with_adapters
from tests.ops.kernels.interpreter import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there is a real one")


def in_its_room(program: Program) -> Program:
    """With its weights where adapter rows lie beneath, as on a GPU."""
    config = program.config
    room = make_room(config.model, config.lora_rows, dtype=torch.float16, device="cpu")
    return replace(program, params=moved_in(program.params, room), room=room)


def first_step(
    program: Program, state: EngineState, layer_fn: FusedLayerFn, patch: pytest.MonkeyPatch
) -> list[Tensor]:
    """The bits of its hidden states, and of all pages after it."""
    _, plan = schedule(state.config, state.host)
    pool, config = state.device.pool, program.config
    for kv in pool.kv:
        kv.zero_()
    for place in plan.uploads:
        upload_adapter_(pool, place, state.blobs[place.version])
    with torch.inference_mode(), patch.context() as on_gpu:
        batch = pack_fused(config, plan, graphs_of(pool).staging)
        on_gpu.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        hidden_TD = fused_forward(
            program.params, pool.layers, pool.kv, batch, config.model, layer_fn
        )
    return [tensor.view(torch.int16).clone() for tensor in (hidden_TD, *pool.kv)]


def test_one_graph_for_few_tokens_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters, layer_fn = torch._dynamo.utils.counters, compile_fused_layer()
    counters.clear()
    for length in (2, 33):
        program = in_its_room(tiny_program(dtype="float16", max_batched_tokens=80))
        requests = [request(w, prompt(1, length), w) for w in "ab"]
        state = submit_all(with_adapters(program, "ab"), requests)
        want = first_step(program, state, fused_layer, monkeypatch)
        got = first_step(program, state, layer_fn, monkeypatch)
        assert all(a.equal(b) for a, b in zip(got, want, strict=True))
        assert all(a.any() for a in want)
    assert counters["stats"]["unique_graphs"] == 1


def sampled_bits(
    ends: Ends, x_SD: Tensor, w_VD: Tensor, on_gpu: pytest.MonkeyPatch
) -> list[Tensor]:
    """Of a head's logits, which are drawn from with and without a bias, and scored."""
    S = len(x_SD)
    numbers = np.linspace(0, 2, S, dtype=np.float32), np.arange(S) % 3, np.full(S, 0.9)
    columns = draws_of(
        *numbers, np.zeros(S, np.float32), np.arange(S, dtype=np.uint64), np.arange(S)
    )
    bias = {"bias/0": torch.tensor([0]), "bias/1": torch.tensor([3]), "bias/2": torch.ones(1)}
    with torch.inference_mode(), on_gpu.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        draws = Draws(*map(torch.from_numpy, columns))
        raw_SV = ends.head_linear(x_SD, w_VD, torch.empty(S, len(w_VD)))
        edited_SV, largest_S = ends.edited(raw_SV, bias)
        drawn = [ends.draw(y, raw_SV, draws, 2) for y in (raw_SV, edited_SV)]
        score_S = ends.score(raw_SV, drawn[0][0].long())
        found = [raw_SV, edited_SV, largest_S, *drawn, score_S, *ends.likeliest(raw_SV, S)]
        return [x.clone() for x in (*found, ends.greedy(raw_SV))]


def test_head_and_sampler_launch_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters, ends = torch._dynamo.utils.counters, compile_ends()
    counters.clear()
    w_VD = torch.randn(4200, 64, generator=torch.Generator().manual_seed(0)).half()
    for S in (1, 3):
        x_SD = torch.randn(S, 64, generator=torch.Generator().manual_seed(S)).half()
        want = sampled_bits(EAGER, x_SD, w_VD, monkeypatch)
        got = sampled_bits(ends, x_SD, w_VD, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counters["stats"]["unique_graphs"] == 7
