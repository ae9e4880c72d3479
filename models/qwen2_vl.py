"""Qwen2-VL: a tower for pictures of any size, whose patches turn by row and column.

S patches of all items, D width (or the language model's), N heads, H head size, E rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models import qwen_patches
from purestep.models.qwen_patches import (
    Grid,
    Patches,
    attend,
    block_order,
    encode_by_length,
    grid_of,
    length_order,
    rotary,
    runs_of,
    turned,
)
from purestep.models.tower_rows import ItemAdapters, in_order, spread
from purestep.models.vision import Shapes, Tensors, VisionFamily
from purestep.models.vit import (
    ACTIVATIONS,
    Affine,
    affine,
    affine_of,
    affine_shapes,
    known_activation,
    layer_norm,
)
from purestep.state.pytree import tree

EPS = 1e-6  # of every norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Vision:
    patches: Patches
    num_layers: int
    width: int
    intermediate_size: int
    num_heads: int
    activation: str
    hidden_size: int  # of the language model
    marker: int

    @property
    def merge_size(self) -> int:
        return self.patches.merge_size


@tree
class Qwen2Layer:
    norm1: Affine
    qkv: Affine
    out: Affine
    norm2: Affine
    up: Affine
    down: Affine


@tree
class Qwen2VisionParams:
    patch_DP: Tensor
    layers: tuple[Qwen2Layer, ...]
    merge_norm: Affine
    merge_up: Affine
    merge_down: Affine


def read_config(hf: PretrainedConfig) -> Qwen2Vision:
    """Raises CheckpointError for what is not supported."""
    vision = hf.vision_config
    return Qwen2Vision(
        patches=qwen_patches.read_patches(vision),
        num_layers=vision.depth,
        width=vision.embed_dim,
        intermediate_size=int(vision.embed_dim * vision.mlp_ratio),
        num_heads=vision.num_heads,
        activation=known_activation(vision.hidden_act),
        hidden_size=vision.hidden_size,
        marker=hf.image_token_id,
    )


def shapes(config: Qwen2Vision) -> Shapes:
    D, wide, p = config.width, config.intermediate_size, config.patches
    cube = (p.num_channels, p.temporal_size, p.patch_size, p.patch_size)
    found: Shapes = {"visual.patch_embed.proj.weight": (D, *cube)}
    for i in range(config.num_layers):
        block = f"visual.blocks.{i}"
        found |= affine_shapes(f"{block}.norm1", D) | affine_shapes(f"{block}.norm2", D)
        found |= affine_shapes(f"{block}.attn.qkv", 3 * D, D)
        found |= affine_shapes(f"{block}.attn.proj", D, D)
        found |= affine_shapes(f"{block}.mlp.fc1", wide, D)
        found |= affine_shapes(f"{block}.mlp.fc2", D, wide)
    block = D * config.merge_size**2
    found |= affine_shapes("visual.merger.ln_q", D)
    found |= affine_shapes("visual.merger.mlp.0", block, block)
    return found | affine_shapes("visual.merger.mlp.2", config.hidden_size, block)


def load_params(config: Qwen2Vision, tensors: dict[str, Tensor]) -> Qwen2VisionParams:
    def layer(i: int) -> Qwen2Layer:
        names = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        fields = ("norm1", "qkv", "out", "norm2", "up", "down")
        parts = [affine_of(tensors, f"visual.blocks.{i}.{name}") for name in names]
        return Qwen2Layer(**dict(zip(fields, parts, strict=True)))

    return Qwen2VisionParams(
        patch_DP=tensors["visual.patch_embed.proj.weight"].flatten(1),
        layers=tuple(layer(i) for i in range(config.num_layers)),
        merge_norm=affine_of(tensors, "visual.merger.ln_q"),
        merge_up=affine_of(tensors, "visual.merger.mlp.0"),
        merge_down=affine_of(tensors, "visual.merger.mlp.2"),
    )


def encode(
    params: Qwen2VisionParams,
    config: Qwen2Vision,
    items: Sequence[Tensors],
    adapters: ItemAdapters | None = None,
) -> list[Tensor]:
    own = in_order(adapters, length_order(items))
    return encode_by_length(
        items, config.patches, lambda pixels, grids: features(params, config, pixels, grids, own)
    )


def features(
    params: Qwen2VisionParams,
    config: Qwen2Vision,
    pixels_SP: Tensor,
    grids: Sequence[Grid],
    adapters: ItemAdapters | None = None,
) -> Tensor:
    """The rows of all items, one behind the other: [E, D]."""
    unit, counts = config.merge_size**2, [math.prod(grid) for grid in grids]
    own = spread(adapters, counts)
    merging = spread(adapters, [count // unit for count in counts])
    h_SD = F.linear(pixels_SP.to(params.patch_DP), params.patch_DP)
    place_2S = block_order(config.patches, grids, h_SD.device)
    turn = rotary(config.patches, config.width // config.num_heads, place_2S)
    runs = runs_of(grids)
    for layer in params.layers:
        qkv = affine(layer_norm(h_SD, layer.norm1, EPS), layer.qkv, own)
        q_SNH, k_SNH, v_SNH = qkv.unflatten(-1, (3, config.num_heads, -1)).unbind(1)
        o_SD = attend(turned(q_SNH, turn), turned(k_SNH, turn), v_SNH, runs)
        h_SD = h_SD + affine(o_SD, layer.out, own)
        x = affine(layer_norm(h_SD, layer.norm2, EPS), layer.up, own)
        h_SD = h_SD + affine(ACTIVATIONS[config.activation](x), layer.down, own)
    x = layer_norm(h_SD, params.merge_norm, EPS).reshape(-1, config.width * unit)
    return affine(F.gelu(affine(x, params.merge_up, merging)), params.merge_down, merging)


QWEN2_VL = VisionFamily(
    read_config=read_config,
    shapes=shapes,
    unread="(?!)",
    load_params=load_params,
    marker=lambda config: config.marker,
    item=lambda config, processed: qwen_patches.item(config.patches, processed),
    placeholder=lambda config, item, words: qwen_patches.placeholder(
        config.marker, config.patches, item
    ),
    encode=encode,
    grid=lambda config, item: grid_of(item),
    merge=lambda config: config.merge_size,
    largest=lambda config, settings: qwen_patches.largest(config.patches, settings),
    heaviest=lambda config, settings, limit: qwen_patches.heaviest(config.patches, settings, limit),
    working=lambda config, item: qwen_patches.working(
        config.patches, item, config.width, config.intermediate_size, config.hidden_size
    ),
)
