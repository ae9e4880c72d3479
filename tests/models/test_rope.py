"""Rotary embedding: the numbers of transformers, bit for bit."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, Qwen2VLConfig, Qwen3VLConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from purestep.models.config import RopeConfig
from purestep.models.families import model_config_from_hf
from purestep.models.rope import apply_rope, inv_freq, rope_for_context, rope_table
from purestep.state.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "far": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    "llama3": LLAMA3,
    "llama3-mild": LLAMA3 | {"factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 16.0},
    "yarn": YARN,
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn-one-pair": YARN | {"original_max_position_embeddings": 2, "beta_fast": 1},
    "yarn-given": YARN | {"attention_factor": 0.75},
    "yarn-mscale": YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3},
}


def assert_equal_tables(
    rope: RopeConfig, head_dim: int, oracle: Any, position_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our tables, which must have the bits of transformers'."""
    cos_TC, sin_TC = rope_table(rope, head_dim, position_T, torch.float32)
    want_cos, want_sin = oracle(torch.zeros(1), position_T[None])
    assert torch.equal(inv_freq(rope, head_dim), oracle.inv_freq)
    assert torch.equal(cos_TC, want_cos[0])
    assert torch.equal(sin_TC, want_sin[0])
    return cos_TC, sin_TC


@pytest.mark.parametrize("head_dim", [2, 12, 64, 128])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_transformers(name: str, head_dim: int) -> None:
    hf = LlamaConfig(head_dim=head_dim, rope_parameters=dict(SETTINGS[name]))
    rope = model_config_from_hf(hf).rope
    source = torch.Generator().manual_seed(0)
    position = torch.randint(0, 100_000, (9,), generator=source)
    cos_TC, sin_TC = assert_equal_tables(rope, head_dim, LlamaRotaryEmbedding(hf), position)
    q, k = torch.randn(2, 9, 3, head_dim, generator=source)
    want = apply_rotary_pos_emb(q, k, cos_TC, sin_TC)
    assert torch.equal(apply_rope(q, cos_TC, sin_TC), want[0])
    assert torch.equal(apply_rope(k, cos_TC, sin_TC), want[1])


def test_dynamic_is_the_default_up_to_the_models_context() -> None:
    settings = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    hf = LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=settings)
    rope = model_config_from_hf(hf).rope
    assert rope == RopeConfig()
    oracle = LlamaRotaryEmbedding(hf)
    assert_equal_tables(rope, 64, oracle, torch.tensor([0, 17, 4095]))
    oracle(torch.zeros(1), torch.tensor([[4096]]))
    assert not torch.equal(inv_freq(rope, 64), oracle.inv_freq)


def longrope(head_dim: int, **fields: Any) -> dict[str, Any]:
    source = torch.Generator().manual_seed(1)
    short, long = (1 + torch.rand(2, head_dim // 2, generator=source) * 20).tolist()
    return {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short,
            "long_factor": long, **fields}  # fmt: skip


@pytest.mark.parametrize(
    "fields", [{}, {"factor": 32.0}, {"attention_factor": 1.19}, {"factor": 1.0}], ids=str
)
def test_longrope_chooses_by_context(fields: dict[str, Any]) -> None:
    """Phi-3's geometry; transformers chooses by the call's largest position."""
    sizes = {"hidden_size": 96 * 2, "num_attention_heads": 2, "pad_token_id": 0}
    hf = Phi3Config(
        **sizes,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters=longrope(96, **fields),
    )
    rope = model_config_from_hf(copy.deepcopy(hf)).rope
    oracle = modeling_phi3.Phi3RotaryEmbedding(hf)
    short, long = rope_for_context(rope, 4096), rope_for_context(rope, 4097)
    assert short != long
    assert rope_for_context(long, 4096) == short
    assert_equal_tables(short, 96, oracle, torch.tensor([0, 5, 4095]))
    assert_equal_tables(long, 96, oracle, torch.tensor([0, 5, 4096]))


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_other_kinds_do_not_depend_on_the_context(name: str) -> None:
    rope = model_config_from_hf(LlamaConfig(rope_parameters=dict(SETTINGS[name]))).rope
    assert rope_for_context(rope, 1_000_000) == rope


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_part_of_the_channels_turns(share: float) -> None:
    """Phi-4-mini: the channels that do not turn pass as they are."""
    settings = {"rope_type": "default", "partial_rotary_factor": share}
    hf = Phi3Config(hidden_size=64, num_attention_heads=2, pad_token_id=0, rope_parameters=settings)
    rope = model_config_from_hf(hf).rope
    oracle = modeling_phi3.Phi3RotaryEmbedding(hf)
    tables = assert_equal_tables(rope, 32, oracle, torch.tensor([0, 3, 77]))
    q, k = torch.randn(2, 3, 2, 32, generator=torch.Generator().manual_seed(0))
    want = modeling_phi3.apply_rotary_pos_emb(q, k, *tables)
    assert torch.equal(apply_rope(q, *tables), want[0])
    assert torch.equal(apply_rope(k, *tables), want[1])
    assert torch.equal(apply_rope(q, *tables)[..., int(32 * share) :], q[..., int(32 * share) :])


def test_frequencies_are_computed_once_and_can_be_differentiated_through() -> None:
    rope = RopeConfig(theta=123.0)
    with torch.inference_mode():
        first = inv_freq(rope, 8)
    assert inv_freq(replace(rope), 8) is first
    assert not first.is_inference()


def test_half_precision_tables_are_rounded_from_float32() -> None:
    """An angle of 4097 radians does not exist in bfloat16: it would be 4096."""
    position = torch.tensor([4097])
    exact, _ = rope_table(RopeConfig(), 8, position, torch.float32)
    half, _ = rope_table(RopeConfig(), 8, position, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.to(torch.bfloat16))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'spiral'"):
        inv_freq(RopeConfig(kind="spiral"), 8)


MROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [3, 9, 4]}


@pytest.mark.parametrize("settings", [MROPE, YARN | {"mrope_section": [16, 0, 0]}], ids=str)
@pytest.mark.parametrize(
    ("config_class", "oracle_class"),
    [
        (Qwen2VLConfig, Qwen2VLRotaryEmbedding),
        (Qwen3VLConfig, Qwen3VLTextRotaryEmbedding),
    ],
)
def test_mrope_equals_transformers(
    config_class: type, oracle_class: type, settings: dict[str, Any]
) -> None:
    """Positions in time, height and width; where they are equal, the bits of one position."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32} if config_class is Qwen3VLConfig else {}
    hf = config_class(text_config={**sizes, "rope_parameters": dict(settings)})
    rope = model_config_from_hf(hf).rope
    source = torch.Generator().manual_seed(0)
    position_3T = torch.randint(0, 30_000, (3, 9), generator=source)
    position_T, unused = position_3T[0], torch.zeros(9, dtype=torch.int64)
    oracle = oracle_class(hf.text_config)
    want_cos, want_sin = oracle(torch.zeros(1), position_3T[:, None])
    cos_TC, sin_TC = rope_table(rope, 32, unused, torch.float32, position_3T)
    assert torch.equal(cos_TC, want_cos[0])
    assert torch.equal(sin_TC, want_sin[0])
    plain = rope_table(rope, 32, position_T, torch.float32)
    equal_3T = position_T.expand(3, -1)
    assert all(map(torch.equal, rope_table(rope, 32, unused, torch.float32, equal_3T), plain))
    if settings is MROPE:
        assert not torch.equal(cos_TC, plain[0])


@pytest.mark.parametrize("sections", [[1, 2], [8, 4, 5], [17, 0, -1], [0.5, 15.5, 0], "all"])
def test_impossible_sections_are_named(sections: Any) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    hf = Qwen2VLConfig(text_config=sizes).to_dict()
    hf["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(CheckpointError, match=r"mrope_section .* together 16"):
        model_config_from_hf(hf)
