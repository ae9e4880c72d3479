"""The families of checkpoints: what a config.json means, by transformers' own classes."""

import copy
import math
import re
from dataclasses import replace
from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    Idefics3Config,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from purestep.models.config import ModelConfig, RopeConfig
from purestep.models.gemma3 import GEMMA3
from purestep.models.idefics3 import IDEFICS3
from purestep.models.llava import LLAVA
from purestep.models.llava_next import LLAVA_NEXT
from purestep.models.pixtral import PIXTRAL
from purestep.models.qwen2_5_vl import QWEN2_5_VL
from purestep.models.qwen2_vl import QWEN2_VL
from purestep.models.qwen3_vl import QWEN3_VL
from purestep.models.rope import ROPE_KINDS
from purestep.models.vision import VisionFamily
from purestep.state.errors import CheckpointError

FAMILIES: dict[str, tuple[str, type[PretrainedConfig]]] = {  # by model_type
    "gemma3_text": ("Gemma3ForCausalLM", Gemma3TextConfig),
    "llama": ("LlamaForCausalLM", LlamaConfig),
    "mistral": ("MistralForCausalLM", MistralConfig),
    "phi3": ("Phi3ForCausalLM", Phi3Config),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Config),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config),
}

MULTIMODAL: dict[str, tuple[str, type[PretrainedConfig], VisionFamily]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", Gemma3Config, GEMMA3),
    "idefics3": ("Idefics3ForConditionalGeneration", Idefics3Config, IDEFICS3),
    "llava": ("LlavaForConditionalGeneration", LlavaConfig, LLAVA),
    "llava_next": ("LlavaNextForConditionalGeneration", LlavaNextConfig, LLAVA_NEXT),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", Qwen2_5_VLConfig, QWEN2_5_VL),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", Qwen2VLConfig, QWEN2_VL),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", Qwen3VLConfig, QWEN3_VL),
    "smolvlm": ("SmolVLMForConditionalGeneration", SmolVLMConfig, IDEFICS3),
}
# Towers that make another family of a LLaVA model.
LLAVA_TOWERS = {"pixtral": PIXTRAL}
# Language models with M-RoPE, which only multimodal models have, and the family they are else.
WITH_MROPE = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def model_config_from_hf(hf_config: dict[str, Any] | PretrainedConfig) -> ModelConfig:
    """The geometry of a model of one of FAMILIES, or of the language model in one of MULTIMODAL,
    from config.json's content or a config object.

    transformers' own class reads the dictionary, so defaults and both spellings of the rotary
    settings (`rope_theta` with `rope_scaling`, `rope_parameters`) mean what they mean there.

    `dynamic` rope is the default one: transformers changes it only for sequences longer than
    max_position_embeddings, which is the limit of a context here, since keys that are cached
    cannot follow a frequency that depends on the length.

    Raises CheckpointError naming what is not supported: the architecture, a quantised checkpoint,
    the kinds of attention and of rope, the activation, or sizes that contradict each other.
    """
    family, hf = _read_config(hf_config)
    tie_embeddings, has_mrope = bool(hf.tie_word_embeddings), False
    if family in MULTIMODAL:
        outer, hf = family, hf.get_text_config()
        has_mrope = hf.model_type in WITH_MROPE
        family = WITH_MROPE.get(hf.model_type, hf.model_type)
        if family not in FAMILIES:
            raise CheckpointError(
                f"language model {family!r} in a {outer} model is not supported, only "
                f"{', '.join(FAMILIES)}"
            )
    architecture, _ = FAMILIES[family]
    gemma = family == "gemma3_text"
    activation = hf.hidden_activation if gemma else hf.hidden_act
    wanted = ("gelu_pytorch_tanh",) if gemma else ("silu", "swish")
    if activation not in wanted:
        raise CheckpointError(f"activation {activation!r} is not supported, only {wanted[0]!r}")
    if gemma:
        _check_gemma(hf)
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size",
             "num_attention_heads", "num_key_value_heads")  # fmt: skip
    if wrong := [f"{name} {getattr(hf, name)}" for name in sizes if getattr(hf, name) < 1]:
        raise CheckpointError(f"config.json: {', '.join(wrong)}: sizes must be positive")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if hf.num_attention_heads % hf.num_key_value_heads or head_dim < 2 or head_dim % 2:
        raise CheckpointError(
            f"{hf.num_attention_heads} query heads must be a multiple of {hf.num_key_value_heads} "
            f"key/value heads, and the head size {head_dim} even"
        )
    attention_bias = family in ("llama", "qwen3", "gemma3_text") and hf.attention_bias
    return ModelConfig(
        architecture=architecture,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=hf.vocab_size,
        max_position=hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        rope=replace(
            _rope_config(hf, family, head_dim, _rope_of(hf, "full_attention")),
            sections=_sections(hf, family, head_dim) if has_mrope else (),
            interleaved=has_mrope and family == "qwen3",
        ),
        tie_embeddings=tie_embeddings,
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family == "llama" and hf.mlp_bias,
        qk_norm=gemma or family == "qwen3",
        windows=_windows(hf, family),
        activation=wanted[0],
        sandwich=gemma,
        embed_scale=hf.hidden_size**0.5 if gemma else 1.0,
        query_scale=float(hf.query_pre_attn_scalar) if gemma else 0.0,
        local_rope=_rope_config(hf, family, head_dim, _rope_of(hf, "sliding_attention"))
        if gemma
        else None,
    )


def vision_config_from_hf(
    hf_config: dict[str, Any] | PretrainedConfig,
) -> tuple[VisionFamily, Any] | None:
    """The functions of a model's tower, and its geometry; None for a model without one.

    Raises CheckpointError naming what is not supported."""
    family, hf = _read_config(hf_config)
    if family not in MULTIMODAL:
        return None
    functions = MULTIMODAL[family][2]
    if family == "llava":
        functions = LLAVA_TOWERS.get(hf.vision_config.model_type, functions)
    return functions, functions.read_config(hf)


def _read_config(hf_config: dict[str, Any] | PretrainedConfig) -> tuple[str, PretrainedConfig]:
    """The family's name, and its settings as transformers reads them."""
    given = hf_config if isinstance(hf_config, dict) else hf_config.to_dict()
    family = _family(given)
    if given.get("quantization_config"):
        raise CheckpointError(
            "quantised checkpoints are not supported (quantization_config is set)"
        )
    config_class = (MULTIMODAL | FAMILIES)[family][1]
    try:
        return family, config_class(**copy.deepcopy(given))
    except Exception as error:  # the validators of transformers raise many kinds
        raise CheckpointError(f"config.json of a {family} model is not valid: {error}") from error


def _family(given: dict[str, Any]) -> str:
    known = {family: facts[0] for family, facts in (FAMILIES | MULTIMODAL).items()}
    by_class = {
        name: family
        for family, causal in known.items()
        for name in (causal, re.sub("For(CausalLM|ConditionalGeneration)", "Model", causal))
    }
    architectures = given.get("architectures") or []
    family = by_class.get(architectures[0]) if architectures else given.get("model_type")
    if family not in known:
        found = architectures[0] if architectures else f"model_type {given.get('model_type')!r}"
        supported = ", ".join(known.values())
        raise CheckpointError(f"architecture {found} is not supported, only {supported}")
    return family


def _windows(hf: PretrainedConfig, family: str) -> tuple[int, ...]:
    """Each layer's window. One that no position reaches beyond is as good as none."""
    window = getattr(hf, "sliding_window", None) if family != "llama" else None
    default = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(hf, "layer_types", None) or [default] * hf.num_hidden_layers
    if foreign := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise CheckpointError(f"layer_types {foreign} are not supported")
    if not family.startswith(("qwen", "gemma")) and set(kinds) != {default}:
        raise CheckpointError(
            f"layer_types of a {family} model must all be {default!r} "
            f"(sliding_window is {window}), not {sorted(set(kinds))}"
        )
    if "sliding_attention" not in kinds:
        return (0,) * hf.num_hidden_layers
    if window is None or window < 1:
        raise CheckpointError(
            f"layer_types has sliding_attention, but sliding_window is {window} "
            f"(use_sliding_window: {getattr(hf, 'use_sliding_window', 'not set')})"
        )
    # Gemma's layers with a window have a rope of their own, so they are known by it.
    reach = window if window < hf.max_position_embeddings or family == "gemma3_text" else 0
    return tuple(reach if kind == "sliding_attention" else 0 for kind in kinds)


def _check_gemma(hf: PretrainedConfig) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (value := getattr(hf, name)) is not None:
            raise CheckpointError(f"{name} {value} is not supported, only null")
    if hf.use_bidirectional_attention:
        raise CheckpointError("use_bidirectional_attention is not supported: text is causal here")


def _rope_of(hf: PretrainedConfig, kind: str) -> dict[str, Any]:
    """The rope settings of layers of a kind, which are Gemma's alone to differ."""
    rope = hf.rope_parameters or {}
    return rope[kind] if hf.model_type == "gemma3_text" else rope


def _rope_config(
    hf: PretrainedConfig, family: str, head_dim: int, rope: dict[str, Any]
) -> RopeConfig:
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"rope settings by layer type ({', '.join(nested)}) are not supported"
        )
    kind = rope.get("rope_type") or "default"
    kinds = (*ROPE_KINDS, "dynamic")
    if kind not in kinds:
        raise CheckpointError(f"rope kind {kind!r} is not supported, only {', '.join(kinds)}")
    share = _number(rope, "partial_rotary_factor", 1.0)
    channels = int(head_dim * share)
    if share != 1.0 and (family != "phi3" or not 0 < channels <= head_dim or channels % 2):
        raise CheckpointError(
            f"partial_rotary_factor {share} is not supported, only 1.0, and for phi3 what leaves "
            f"an even number of the {head_dim} channels of a head"
        )
    plain = {"theta": _number(rope, "rope_theta", 10_000.0), "share": share}
    if kind == "linear":
        return RopeConfig(kind=kind, factor=_number(rope, "factor"), **plain)
    if kind in ("default", "dynamic"):
        return RopeConfig(**plain)
    original = int(_number(rope, "original_max_position_embeddings"))
    plain |= {"kind": kind, "original_max_position": original}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return RopeConfig(**plain, **{name: _number(rope, name) for name in names})
    factor = _number(rope, "factor", hf.max_position_embeddings / original)
    if kind == "yarn":
        return RopeConfig(
            **plain,
            factor=factor,
            beta_fast=_number(rope, "beta_fast", 32.0),
            beta_slow=_number(rope, "beta_slow", 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_number(rope, "attention_factor", _yarn_attention(rope, factor)),
        )
    grown = factor > 1 and original > 1
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if grown else 1.0
    return RopeConfig(
        **plain,
        short_factors=_factors(rope, "short_factor", channels // 2),
        long_factors=_factors(rope, "long_factor", channels // 2),
        attention_factor=_number(rope, "attention_factor", attention),
    )


def _sections(hf: PretrainedConfig, family: str, head_dim: int) -> tuple[int, ...]:
    """How M-RoPE divides the pairs of channels; transformers' own default where it is not said."""
    default = [24, 20, 20] if family == "qwen3" else [16, 24, 24]
    sections = (hf.rope_parameters or {}).get("mrope_section", default)
    whole = isinstance(sections, list | tuple) and all(isinstance(s, int) for s in sections)
    if not whole or len(sections) != 3 or min(sections) < 0 or sum(sections) != head_dim // 2:
        raise CheckpointError(
            f"mrope_section {sections} must be three numbers of pairs of channels, together "
            f"{head_dim // 2}, half of the head size"
        )
    return tuple(sections)


def _yarn_attention(rope: dict[str, Any], factor: float) -> float:
    """What cos and sin are multiplied by where the file does not say it (Peng et al. 2023)."""
    growth = math.log(max(factor, 1.0))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        most, all_dim = _number(rope, "mscale"), _number(rope, "mscale_all_dim")
        return (0.1 * most * growth + 1) / (0.1 * all_dim * growth + 1)
    return 0.1 * growth + 1


def _number(rope: dict[str, Any], name: str, default: float | None = None) -> float:
    """A setting that is positive; without a default it must be there."""
    value = rope.get(name)
    if value is None and default is not None:
        return float(default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        what = "lacks it" if value is None else f"has {value!r}"
        raise CheckpointError(
            f"{name} of rope kind {rope.get('rope_type')!r} must be a positive number, "
            f"config.json {what}"
        )
    return float(value)


def _factors(rope: dict[str, Any], name: str, length: int) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list | tuple) or len(values) != length:
        raise CheckpointError(f"{name} of rope kind 'longrope' must be {length} numbers")
    return tuple(_number({**rope, name: value}, name) for value in values)
