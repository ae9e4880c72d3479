"""The fused decoder's layer and the embedding, compiled, on models with images: the same bits, and
few graphs."""

from functools import partial
from typing import Any

import pytest
import torch

from purestep.engine.native import use_native
from purestep.models.compiled import compile_ends, compile_fused_layer
from purestep.models.fused import fused_forward
from tests.models.tiny_vision import computed, load, picture

PROMPTS: list[list[Any]] = [
    [[3, 4, 5], (60, 45), [6, 7]],
    [[3]],
    [(200, 5)],
    [[8], (60, 45), [9], (90, 70), [9, 10, 11]],
]


@pytest.mark.parametrize(
    ("kind", "num_graphs"),
    # With windows, ropes, norms and a scale of the embedding; with deepstack.
    [("gemma3", 2 + 1), ("qwen3_vl", 1 + 1)],
)
def test_few_graphs_and_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_graphs: int
) -> None:
    use_native()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = load(kind)
    compiled = {"layer_fn": compile_fused_layer(), "embed_fn": compile_ends().embed}
    for parts in PROMPTS:
        drawn = [picture(*part) if isinstance(part, tuple) else part for part in parts]
        _, want, _ = computed(model, drawn, fused_forward)
        _, got, _ = computed(model, drawn, partial(fused_forward, **compiled))
        assert torch.equal(got, want)
    assert counters["stats"]["unique_graphs"] == num_graphs
