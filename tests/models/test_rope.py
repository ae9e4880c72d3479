"""Rotary embedding: the numbers of transformers, bit for bit."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from purestep.models.checkpoint import model_config_from_hf
from purestep.models.config import RopeConfig
from purestep.models.rope import apply_rope, inv_freq, rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SETTINGS = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "long": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "llama3": LLAMA3,
    "llama3-mild": LLAMA3 | {"factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 16.0},
}


@pytest.mark.parametrize("head_dim", [2, 12, 64, 128])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_transformers(name: str, head_dim: int) -> None:
    hf = LlamaConfig(head_dim=head_dim, rope_parameters=dict(SETTINGS[name]))
    oracle = LlamaRotaryEmbedding(hf)
    config = model_config_from_hf(hf)
    freq = inv_freq(config.rope, config.head_dim)
    assert torch.equal(freq, oracle.inv_freq)
    source = torch.Generator().manual_seed(0)
    position = torch.randint(0, 100_000, (9,), generator=source)
    q, k = torch.randn(2, 9, 3, head_dim, generator=source)
    cos_TH, sin_TH = rope_table(freq, position, torch.float32)
    want_cos, want_sin = oracle(q, position[None])
    assert torch.equal(cos_TH, want_cos[0])
    assert torch.equal(sin_TH, want_sin[0])
    want = apply_rotary_pos_emb(q, k, cos_TH, sin_TH)
    assert torch.equal(apply_rope(q, cos_TH, sin_TH), want[0])
    assert torch.equal(apply_rope(k, cos_TH, sin_TH), want[1])


def test_half_precision_tables_are_rounded_from_float32() -> None:
    """An angle of 4097 radians does not exist in bfloat16: it would be 4096."""
    freq = inv_freq(RopeConfig(), 8)
    position = torch.tensor([4097])
    exact, _ = rope_table(freq, position, torch.float32)
    half, _ = rope_table(freq, position, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.to(torch.bfloat16))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'yarn'"):
        inv_freq(RopeConfig(kind="yarn"), 8)
