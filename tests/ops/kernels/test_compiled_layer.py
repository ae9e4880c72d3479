"""The compiled layer as it runs on a GPU: triton's interpreter, 16 bits, tensors that say they are
on one. Products have addends for few tokens, for many they begin what also holds those with adapter
rows, and they leave deltas to their readers.

The law on a real one is in tests/engine/test_graphs.py.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from purestep.engine import EngineState, Program, schedule
from purestep.engine.graphs import graphs_of
from purestep.engine.pack import pack_fused
from purestep.engine.pool import upload_adapter_
from purestep.models.compiled import compile_fused_layer
from purestep.models.fused import FusedLayerFn, fused_forward, fused_layer
from purestep.models.room import make_room, moved_in
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
