"""Checkpoint folders: what is read, what is refused and how it is named."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from purestep.models.checkpoint import generation_defaults, load_checkpoint, stop_ids
from purestep.models.config import RopeConfig
from purestep.models.decoder import Params
from purestep.models.families import model_config_from_hf
from purestep.state.errors import CheckpointError
from tests.models.tiny import FAMILIES, LLAMA3_ROPE, LONG_ROPE, SIZES, save_checkpoint

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **SIZES}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **SIZES}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **SIZES}
Edit = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, "llama")
    return tmp_path


def edit_tensors(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Params, str]:
    _, params, digest = load_checkpoint(folder, dtype=dtype)
    return params, digest


# Geometry


@pytest.mark.parametrize("family", FAMILIES)
def test_config_object_and_file_agree(tmp_path: Path, family: str) -> None:
    model = save_checkpoint(tmp_path, family)
    config, _, _ = load_checkpoint(tmp_path, dtype=torch.float32)
    assert config == model_config_from_hf(model.config)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 32, 128)
    assert config.head_dim == {"llama-head12": 12, "qwen3": 16}.get(family, 8)
    assert config.tie_embeddings == (family == "llama-tied")
    biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
    with_bias = {"llama-bias": (True, True, True), "qwen3-window": (True, True, False)}
    qkv_alone = (family.startswith("qwen2"), False, False)
    assert biases == with_bias.get(family, qkv_alone)
    assert config.qk_norm == family.startswith("qwen3")
    windowed = {"mistral": (6, 6), "phi3": (6, 6), "qwen2-window": (0, 6), "qwen3-window": (6, 0)}
    assert config.windows == windowed.get(family, (0, 0))
    assert hash(config) == hash(copy.deepcopy(config))


def test_defaults_are_those_of_transformers() -> None:
    config = model_config_from_hf({"model_type": "llama"})
    assert config == model_config_from_hf(LlamaConfig())
    assert (config.num_kv_heads, config.norm_eps, config.rope.theta) == (32, 1e-6, 10_000.0)
    for given in (MistralConfig(), Phi3Config(), Qwen2Config(), Qwen3Config()):
        assert model_config_from_hf({"model_type": given.model_type}) == model_config_from_hf(given)
    fewer = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert model_config_from_hf(fewer).num_kv_heads == 4


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 10_000.0, "rope_scaling": LLAMA3_ROPE},
        {
            "rope_theta": 10_000.0,
            "rope_scaling": {
                k.replace("rope_type", "type"): v
                for k, v in LLAMA3_ROPE.items()
                if k != "rope_theta"
            },
        },
    ],
    ids=["rope_parameters", "rope_scaling", "type"],
)
def test_both_spellings_of_rope(spelling: dict[str, Any]) -> None:
    given = LLAMA | spelling
    before = copy.deepcopy(given)
    assert model_config_from_hf(given).rope == RopeConfig(
        theta=10_000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=16,
    )
    assert given == before


def test_rope_theta_of_old_files() -> None:
    assert model_config_from_hf(LLAMA | {"rope_theta": 5e5}).rope == RopeConfig(theta=5e5)
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": None}
    assert model_config_from_hf(old).rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (LLAMA | {"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({}, "model_type None"),
        ({"model_type": "gpt2"}, "LlamaForCausalLM, MistralForCausalLM, .* Qwen3ForCausalLM"),
        (QWEN2 | {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "window is None"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "num_hidden_layers"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
        (
            MISTRAL | {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
            "mistral model must all be 'sliding_attention'",
        ),
        (LLAMA | {"hidden_act": "gelu"}, "activation 'gelu'"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope kind 'proportional' is not supported, only default, linear",
        ),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": "big"}},
            "factor of rope kind 'linear'.*'big'",
        ),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": -1.0}}, r"has -1\.0"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": True}},
            "beta_fast of rope kind 'yarn'.*True",
        ),
        (LLAMA | {"rope_scaling": LONG_ROPE | {"long_factor": [2.0]}}, "long_factor.*4 numbers"),
        (LLAMA | {"rope_scaling": LONG_ROPE | {"short_factor": [1, 1, 0, 1]}}, "short_factor.*0"),
        (
            QWEN2
            | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "by layer type",
        ),
        (PHI3 | {"rope_parameters": {"partial_rotary_factor": 0.4}}, "even number of the 8"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        (LLAMA | {"num_key_value_heads": 3}, "4 query heads .* 3 key/value"),
        (LLAMA | {"head_dim": 3}, "head size 3"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads 0: sizes must be positive"),
        (LLAMA | {"hidden_size": "large"}, "not valid"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_models_are_named(given: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        model_config_from_hf(given)


def test_an_unused_sliding_window_is_no_obstacle() -> None:
    """Qwen2 files carry the setting and do not use it; one of the whole context hides nothing."""
    for given in (
        QWEN2 | {"use_sliding_window": False, "sliding_window": 4},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
        MISTRAL | {"sliding_window": SIZES["max_position_embeddings"]},
        MISTRAL | {"sliding_window": None},
    ):
        assert model_config_from_hf(given).windows == (0, 0)
    below = MISTRAL | {"sliding_window": SIZES["max_position_embeddings"] - 1}
    assert model_config_from_hf(below).windows == (255, 255)


# Weights


def test_projections_are_stacked_in_order(folder: Path) -> None:
    params, _ = load(folder)
    stored = load_file(folder / "model.safetensors")
    layer = params.layers[1]
    parts = [stored[f"model.layers.1.self_attn.{c}_proj.weight"] for c in "qkv"]
    assert torch.equal(layer.qkv_OD, torch.cat(parts))
    parts = [stored[f"model.layers.1.mlp.{c}_proj.weight"] for c in ("gate", "up")]
    assert torch.equal(layer.gate_up_OD, torch.cat(parts))
    assert torch.equal(layer.down_DF, stored["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(params.head_VD, stored["lm_head.weight"])
    assert layer.qkv_bias_O is None


def test_fused_projections_are_taken_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "phi3")
    params, _ = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = params.layers[1]
    assert torch.equal(layer.qkv_OD, stored["model.layers.1.self_attn.qkv_proj.weight"])
    assert torch.equal(layer.gate_up_OD, stored["model.layers.1.mlp.gate_up_proj.weight"])
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.1.self_attn.qkv_proj.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.qkv_proj\.weight \(64, 32\)"):
        load(tmp_path)


def test_head_norms_are_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3")
    params, _ = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for head, norm in enumerate(params.layers[1].qk_norm_NH):
        role = "q" if head < 4 else "k"
        assert torch.equal(norm, stored[f"model.layers.1.self_attn.{role}_norm.weight"])
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.0.self_attn.k_norm.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_norm\.weight \(16,\)"):
        load(tmp_path)


def tensors_of(params: Params) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(params) if t is not None]


def assert_same(got: tuple[Params, str], want: tuple[Params, str]) -> None:
    for one, other in zip(tensors_of(got[0]), tensors_of(want[0]), strict=True):
        assert torch.equal(one, other)
    assert got[1] == want[1]


def test_shards_equal_one_file(folder: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    save_checkpoint(sharded, "llama", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_same(load(sharded), load(folder))


def test_names_without_the_prefix(folder: Path) -> None:
    want = load(folder)
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix("model."): t for name, t in tensors.items()}
    save_file(short, folder / "model.safetensors")
    assert_same(load(folder), want)


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    want = load(folder)
    edit_tensors(
        folder,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    assert_same(load(folder), want)


def test_nothing_stays_mapped_to_the_file(folder: Path) -> None:
    """safetensors maps files lazily: overwriting one would change a running model, or kill it."""
    params, _ = load(folder)
    before = [t.clone() for t in tensors_of(params)]
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\0" * file.stat().st_size)
    for now, then in zip(tensors_of(params), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtype_and_digest(folder: Path, dtype: torch.dtype) -> None:
    params, digest = load(folder, dtype)
    want, want_digest = load(folder)
    for now, then in zip(tensors_of(params), tensors_of(want), strict=True):
        assert torch.equal(now, then.to(dtype))
    assert digest == want_digest


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_the_digest_sees_the_last_bit(folder: Path, name: str) -> None:
    _, before = load(folder)
    edit_tensors(folder, lambda t: t[name].view(torch.int32).view(-1)[-1:].bitwise_xor_(1))
    assert load(folder)[1] != before


def test_the_digest_sees_which_tensor_holds_what(folder: Path) -> None:
    _, before = load(folder)

    def swap(t: dict[str, Tensor]) -> None:
        q, o = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"
        t[q], t[o] = t[o], t[q]

    edit_tensors(folder, swap)
    assert load(folder)[1] != before


def test_tied_embeddings(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-tied")
    params, _ = load(tmp_path)
    assert params.head_VD is params.embed_VD
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    embed = params.embed_VD.clone()
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embed}))
    params, _ = load(tmp_path)
    assert params.head_VD is params.embed_VD
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embed + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from embed_tokens"):
        load(tmp_path)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            lambda t: t.pop(Q),
            r"1 tensors are missing: layers\.1\.self_attn\.q_proj\.weight \(32, 32\)",
        ),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight \(128, 32\)"),
        (lambda t: t.update({Q: torch.zeros(32, 31)}), r"q_proj.*\(32, 31\), wanted \(32, 32\)"),
        (lambda t: t.update({Q: torch.zeros(32)}), r"q_proj.*\(32,\), wanted \(32, 32\)"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), r"q_proj.*dtype I8"),
        (lambda t: t.update({"score.weight": torch.zeros(1)}), r"1 tensors are unexpected: score"),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}),
            r"unexpected: layers\.1\.self_attn\.q_proj\.bias",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(64, 32)}),
            r"unexpected: layers\.2\.mlp",
        ),
        (lambda t: t.update({Q[6:]: t[Q].clone()}), "stored twice"),
    ],
    ids=["missing", "head", "shape", "rank", "dtype", "foreign", "bias", "layer", "twice"],
)
def test_wrong_tensors_are_named(folder: Path, edit: Edit, match: str) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=match):
        load(folder)


def test_wrong_files_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds pytorch_model\.bin but no safetensors"):
        load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {Q: "model-00001-of-00001.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors cannot be read"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {Q: "../elsewhere.safetensors"}}))
    save_file({Q: torch.zeros(1)}, folder.parent / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere\.safetensors' is no file name"):
        load(folder)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "bert"}'])
def test_wrong_configs_are_named(folder: Path, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json|architecture"):
        load(folder)


# Generation settings


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": 7}, 2, (7,)),
        ({"eos_token_id": [7, 9]}, 2, (7, 9)),
        ({}, 2, (2,)),
        (None, [2, 3], (2, 3)),
        (None, None, ()),
    ],
    ids=str,
)
def test_stop_ids(tmp_path: Path, generation: Any, config: Any, want: tuple[int, ...]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert stop_ids(tmp_path) == want


def write_generation(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        (
            {"do_sample": None, "repetition_penalty": 1.1, "eos_token_id": 7},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "top_k": None, "top_p": None}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "top_k": 0, "min_p": 0.0}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05,
             "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05,
             "repetition_penalty": 1.05},
        ),
        (
            {"do_sample": True, "temperature": 2, "top_p": 1, "repetition_penalty": 1},
            {"temperature": 2.0, "top_k": 50},
        ),
        ({"do_sample": True, "temperature": 0.0, "top_p": 0.8}, {"temperature": 0.0}),
    ],
    ids=str,
)  # fmt: skip
def test_generation_defaults(tmp_path: Path, given: Any, want: dict[str, Any]) -> None:
    assert generation_defaults(write_generation(tmp_path, **given)) == want


def test_generation_defaults_of_transformers(tmp_path: Path) -> None:
    """What transformers itself fills in, and what it writes into a file."""
    assert generation_defaults(tmp_path) == {}
    ours = generation_defaults(write_generation(tmp_path, do_sample=True))
    theirs = GenerationConfig._get_default_generation_params()
    assert ours == {name: theirs[name] for name in ("temperature", "top_k")}
    assert (theirs["top_p"], theirs["repetition_penalty"], theirs.get("min_p")) == (1.0, 1.0, None)
    assert theirs["do_sample"] is False
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9).save_pretrained(tmp_path)
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 50, "top_p": 0.9}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_sample", "yes"),
        ("temperature", -0.5),
        ("temperature", "hot"),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 3.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", [0.1]),
        ("repetition_penalty", 0.0),
    ],
)
def test_broken_generation_settings_are_named(tmp_path: Path, field: str, value: Any) -> None:
    folder = write_generation(tmp_path, **{"do_sample": True, field: value})
    match = rf"generation_config\.json: {field}={re.escape(repr(value))} must be"
    with pytest.raises(CheckpointError, match=match):
        generation_defaults(folder)
