"""Checkpoint folders: config.json and safetensors in, geometry and a parameter tree out.

O output width of a fused linear, D its input width.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purestep.models.config import FusedLinear, ModelConfig, fused_linears, has_bias
from purestep.models.decoder import Layer, Params
from purestep.models.families import model_config_from_hf, vision_config_from_hf
from purestep.models.room import Room
from purestep.models.tensor_files import TOWER, read_json, read_tensors
from purestep.models.vision import Vision
from purestep.state.errors import CheckpointError

NORMS = {  # of a layer, in their order: without and with norms behind attention and MLP
    False: ("input_layernorm", "post_attention_layernorm"),
    True: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
EMBED, NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"


def load_checkpoint(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    room: Room | None = None,
) -> tuple[ModelConfig, Params, str]:
    """Read a checkpoint folder's language model: geometry, weights in `dtype`, weight digest.
    Weights that have a place in the `room` come to lie there.

    One model.safetensors, or shards listed by model.safetensors.index.json; names with or without
    the leading `model.`, or as multimodal models have them, whose other tensors are left alone;
    with tied embeddings the head is the embedding tensor itself.

    The digest is blake3 over the stored tensors the model uses, sorted by name: a domain tag, then
    each tensor's name, dtype, shape and bytes, framed by lengths. Sharding, the `dtype` asked for
    and config.json do not enter (ModelConfig is compared for that).

    Raises CheckpointError naming the file, or the tensor with the shape wanted and found.
    """
    path = Path(path)
    given = read_json(path / "config.json")
    config = model_config_from_hf(given)
    wanted = tensor_shapes(config)
    optional = {HEAD: wanted[EMBED]} if config.tie_embeddings else {}
    has_tower = vision_config_from_hf(given) is not None
    tensors, digest = read_tensors(
        path,
        wanted,
        optional,
        lambda name: has_tower and TOWER.fullmatch(name) is not None,
        dtype=dtype,
        device=device,
        places=_places(config, room),
    )
    if config.tie_embeddings and HEAD in tensors and not tensors[HEAD].equal(tensors[EMBED]):
        raise CheckpointError(
            f"{path}: tie_word_embeddings is set, but {HEAD} differs from {EMBED}; "
            "set it to false in config.json to use both"
        )
    return config, _params(tensors, config, room), digest


def load_vision(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Vision, str] | None:
    """Read a checkpoint folder's tower and projector, and their digest, made as that of
    `load_checkpoint`; None where the model has none. Raises CheckpointError as that does."""
    path = Path(path)
    found = vision_config_from_hf(read_json(path / "config.json"))
    if found is None:
        return None
    family, config = found
    unread = re.compile(family.unread)
    tensors, digest = read_tensors(
        path,
        family.shapes(config),
        {},
        lambda name: TOWER.fullmatch(name) is None or unread.fullmatch(name) is not None,
        dtype=dtype,
        device=device,
    )
    return Vision(family=family, config=config, params=family.load_params(config, tensors)), digest


def stop_ids(path: str | Path) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json, else of its text_config; empty
    where none has one."""
    files = [Path(path) / name for name in ("generation_config.json", "config.json")]
    given = [read_json(file) for file in files if file.exists()]
    given += [settings.get("text_config") or {} for settings in given]
    for settings in given:
        if (found := settings.get("eos_token_id")) is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def generation_defaults(path: str | Path) -> dict[str, Any]:
    """How generation_config.json wants tokens to be drawn, in the names of SamplingParams.

    As transformers reads it: greedy ({"temperature": 0.0}) unless do_sample is true; then what is
    absent or null is temperature 1.0, top_k 50, top_p 1.0. The keys are temperature, and of top_k,
    top_p, min_p and repetition_penalty those that change something. A temperature of 0 is greedy,
    too. Without the file, {}.

    Raises CheckpointError naming file, field and value.
    """
    file = Path(path) / "generation_config.json"
    if not file.exists():
        return {}
    given = read_json(file)
    sampled = given.get("do_sample") or False
    if not isinstance(sampled, bool):
        raise CheckpointError(f"{file}: do_sample={sampled!r} must be true or false")

    def read(name: str, default: float, holds: Callable[[Any], bool], rule: str) -> Any:
        value = given.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
            raise CheckpointError(f"{file}: {name}={value!r} must be {rule}")
        return value

    warmth = read("temperature", 1.0, lambda v: 0 <= v < math.inf, "finite and at least 0")
    top_k = read("top_k", 50, lambda v: isinstance(v, int) and v >= 0, "an integer, at least 0")
    top_p = read("top_p", 1.0, lambda v: 0 < v <= 1, "above 0 and at most 1")
    min_p = read("min_p", 0.0, lambda v: 0 <= v <= 1, "between 0 and 1")
    penalty = read("repetition_penalty", 1.0, lambda v: 0 < v < math.inf, "finite and above 0")
    settings: dict[str, Any] = {"temperature": float(warmth) if sampled else 0.0}
    if settings["temperature"] > 0:
        settings |= {"top_k": top_k} if top_k else {}
        settings |= {"top_p": float(top_p)} if top_p < 1 else {}
        settings |= {"min_p": float(min_p)} if min_p > 0 else {}
    return settings | ({"repetition_penalty": float(penalty)} if penalty != 1 else {})


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the checkpoint must hold, by its name without `model.`, with its shape."""
    V, D = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBED: (V, D), NORM: (D,)}
    if not config.tie_embeddings:
        shapes[HEAD] = (V, D)
    for i in range(config.num_layers):
        for name in NORMS[config.sandwich]:
            shapes[f"layers.{i}.{name}.weight"] = (D,)
        if config.qk_norm:
            shapes[f"layers.{i}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"layers.{i}.self_attn.k_norm.weight"] = (config.head_dim,)
        for linear in fused_linears(config):
            for child, size in _stored_linears(config, linear).items():
                name = f"layers.{i}.{linear.parent}.{child}"
                shapes[f"{name}.weight"] = (size, linear.in_features)
                if has_bias(config, linear.name):
                    shapes[f"{name}.bias"] = (size,)
    return shapes


def _stored_linears(config: ModelConfig, linear: FusedLinear) -> dict[str, int]:
    """The names and output sizes under which a checkpoint holds a linear: Phi-3 fuses them too."""
    if config.architecture == "Phi3ForCausalLM" and len(linear.children) > 1:
        return {f"{linear.name}_proj": linear.out_features}
    return dict(zip(linear.children, linear.out_sizes, strict=True))


def _places(config: ModelConfig, room: Room | None) -> dict[str, Tensor]:
    """Where the weights that have a place in the room are read to, by their stored names: memory
    need not hold them twice."""
    places: dict[str, Tensor] = {}
    for linear in fused_linears(config) if room is not None else ():
        stored = _stored_linears(config, linear)
        for i in range(config.num_layers):
            if (home := room.home(linear.name, i)) is not None:
                names = [f"layers.{i}.{linear.parent}.{child}.weight" for child in stored]
                places |= zip(names, home.split(list(stored.values())), strict=True)
    return places


def _params(tensors: dict[str, Tensor], config: ModelConfig, room: Room | None) -> Params:
    """Consumes `tensors`, so that no child of a fused linear is held longer than needed."""
    if config.sandwich:  # Gemma stores what its norms' weights have beyond one
        for name in [name for name in tensors if name.endswith("norm.weight")]:
            tensors[name] = tensors[name] + 1
    layers = tuple(_layer(tensors, config, room, i) for i in range(config.num_layers))
    embed_VD = tensors[EMBED]
    head_VD = embed_VD if config.tie_embeddings else tensors[HEAD]
    return Params(embed_VD=embed_VD, layers=layers, norm_D=tensors[NORM], head_VD=head_VD)


def _layer(tensors: dict[str, Tensor], config: ModelConfig, room: Room | None, i: int) -> Layer:
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor | None] = {}
    for linear in fused_linears(config):
        stored = _stored_linears(config, linear)
        names = [f"layers.{i}.{linear.parent}.{child}" for child in stored]
        children = [tensors.pop(f"{name}.weight") for name in names]
        home = None if room is None else room.home(linear.name, i)  # they were read there
        weights[linear.name] = _stack(children) if home is None else home
        biases[linear.name] = (
            _stack([tensors.pop(f"{name}.bias") for name in names])
            if has_bias(config, linear.name)
            else None
        )
    norms = [tensors[f"layers.{i}.{name}.weight"] for name in NORMS[config.sandwich]]
    attn, attn_out, mlp, mlp_out = norms if config.sandwich else (norms[0], None, norms[1], None)
    norm = None
    if config.qk_norm:
        q, k = (tensors[f"layers.{i}.self_attn.{role}_norm.weight"] for role in "qk")
        norm = torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))
    return Layer(
        attn_norm_D=attn,
        qkv_OD=weights["qkv"],
        qkv_bias_O=biases["qkv"],
        qk_norm_NH=norm,
        out_DO=weights["out"],
        out_bias_D=biases["out"],
        attn_out_norm_D=attn_out,
        mlp_norm_D=mlp,
        gate_up_OD=weights["gate_up"],
        gate_up_bias_O=biases["gate_up"],
        down_DF=weights["down"],
        down_bias_D=biases["down"],
        mlp_out_norm_D=mlp_out,
    )


def _stack(children: list[Tensor]) -> Tensor:
    return torch.cat(children) if len(children) > 1 else children[0]
