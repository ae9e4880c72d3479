"""Qwen3-VL: Qwen2-VL's patches with learned positions, rows for the first decoder layers too.

A row has (1 + k) D numbers: what replaces its token's embedding, then what is added behind each of
the first k decoder layers (deepstack, Meng et al. 2024), from layers within the tower. S patches of
all items, D width (or the language model's), N heads, H head size, E rows, G positions a side of
the learned grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
from purestep.models.tower_rows import ItemAdapters, RowAdapters, in_order, spread
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
from purestep.state.errors import CheckpointError
from purestep.state.pytree import tree

EPS = 1e-6  # of every norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Vision:
    patches: Patches
    num_layers: int
    width: int
    intermediate_size: int
    num_heads: int
    activation: str
    grid_side: int
    deep_layers: tuple[int, ...]  # behind which rows for decoder layers are taken
    hidden_size: int  # of the language model
    marker: int

    @property
    def merge_size(self) -> int:
        return self.patches.merge_size

    @property
    def row_size(self) -> int:
        return self.hidden_size * (1 + len(self.deep_layers))


@tree
class Qwen3Layer:
    norm1: Affine
    qkv: Affine
    out: Affine
    norm2: Affine
    up: Affine
    down: Affine


@tree
class Qwen3Merger:
    norm: Affine  # of patches, or, for rows of decoder layers, of blocks of them
    up: Affine
    down: Affine


@tree
class Qwen3VisionParams:
    patch: Affine
    position_GGD: Tensor
    layers: tuple[Qwen3Layer, ...]
    merger: Qwen3Merger
    deep_mergers: tuple[Qwen3Merger, ...]


def read_config(hf: PretrainedConfig) -> Qwen3Vision:
    """Raises CheckpointError for what is not supported."""
    vision, text = hf.vision_config, hf.text_config
    side, deep = int(vision.num_position_embeddings**0.5), tuple(vision.deepstack_visual_indexes)
    if side * side != vision.num_position_embeddings:
        raise CheckpointError(
            f"num_position_embeddings {vision.num_position_embeddings} of the vision tower must be "
            "a square"
        )
    inside = len(set(deep)) == len(deep) and set(deep) <= set(range(vision.depth))
    if not inside or len(deep) >= text.num_hidden_layers:
        raise CheckpointError(
            f"deepstack_visual_indexes {list(deep)} must be different ones of the tower's "
            f"{vision.depth} layers, fewer than the decoder's {text.num_hidden_layers}"
        )
    if vision.out_hidden_size != text.hidden_size:
        raise CheckpointError(
            f"out_hidden_size {vision.out_hidden_size} of the vision tower must be the language "
            f"model's hidden_size {text.hidden_size}"
        )
    return Qwen3Vision(
        patches=qwen_patches.read_patches(vision),
        num_layers=vision.depth,
        width=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        activation=known_activation(vision.hidden_act),
        grid_side=side,
        deep_layers=deep,
        hidden_size=vision.out_hidden_size,
        marker=hf.image_token_id,
    )


def shapes(config: Qwen3Vision) -> Shapes:
    D, wide, p = config.width, config.intermediate_size, config.patches
    cube = (p.num_channels, p.temporal_size, p.patch_size, p.patch_size)
    found: Shapes = {
        "visual.patch_embed.proj.weight": (D, *cube),
        "visual.patch_embed.proj.bias": (D,),
        "visual.pos_embed.weight": (config.grid_side**2, D),
    }
    for i in range(config.num_layers):
        block = f"visual.blocks.{i}"
        found |= affine_shapes(f"{block}.norm1", D) | affine_shapes(f"{block}.norm2", D)
        found |= affine_shapes(f"{block}.attn.qkv", 3 * D, D)
        found |= affine_shapes(f"{block}.attn.proj", D, D)
        found |= affine_shapes(f"{block}.mlp.linear_fc1", wide, D)
        found |= affine_shapes(f"{block}.mlp.linear_fc2", D, wide)
    block = D * config.merge_size**2
    deep = [f"visual.deepstack_merger_list.{n}" for n in range(len(config.deep_layers))]
    for name, normed in [("visual.merger", D), *((name, block) for name in deep)]:
        found |= affine_shapes(f"{name}.norm", normed)
        found |= affine_shapes(f"{name}.linear_fc1", block, block)
        found |= affine_shapes(f"{name}.linear_fc2", config.hidden_size, block)
    return found


def load_params(config: Qwen3Vision, tensors: dict[str, Tensor]) -> Qwen3VisionParams:
    def parts(root: str, **names: str) -> dict[str, Affine]:
        return {field: affine_of(tensors, f"{root}.{name}") for field, name in names.items()}

    def layer(i: int) -> Qwen3Layer:
        names = {"norm1": "norm1", "qkv": "attn.qkv", "out": "attn.proj", "norm2": "norm2"}
        names |= {"up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
        return Qwen3Layer(**parts(f"visual.blocks.{i}", **names))

    def merger(root: str) -> Qwen3Merger:
        return Qwen3Merger(**parts(root, norm="norm", up="linear_fc1", down="linear_fc2"))

    patch = affine_of(tensors, "visual.patch_embed.proj")
    side = (config.grid_side, config.grid_side)
    return Qwen3VisionParams(
        patch=Affine(weight_OD=patch.weight_OD.flatten(1), bias_O=patch.bias_O),
        position_GGD=tensors.pop("visual.pos_embed.weight").unflatten(0, side),
        layers=tuple(layer(i) for i in range(config.num_layers)),
        merger=merger("visual.merger"),
        deep_mergers=tuple(
            merger(f"visual.deepstack_merger_list.{n}") for n in range(len(config.deep_layers))
        ),
    )


def encode(
    params: Qwen3VisionParams,
    config: Qwen3Vision,
    items: Sequence[Tensors],
    adapters: ItemAdapters | None = None,
) -> list[Tensor]:
    own = in_order(adapters, length_order(items))
    return encode_by_length(
        items, config.patches, lambda pixels, grids: features(params, config, pixels, grids, own)
    )


def features(
    params: Qwen3VisionParams,
    config: Qwen3Vision,
    pixels_SP: Tensor,
    grids: Sequence[Grid],
    adapters: ItemAdapters | None = None,
) -> Tensor:
    """The rows of all items, one behind the other: [E, (1 + k) D]."""
    unit, counts = config.merge_size**2, [math.prod(grid) for grid in grids]
    own = spread(adapters, counts)
    merging = spread(adapters, [count // unit for count in counts])
    h_SD = affine(pixels_SP.to(params.patch.weight_OD), params.patch)
    place_2S = block_order(config.patches, grids, h_SD.device)
    h_SD = h_SD + learned_positions(params.position_GGD, grids, place_2S).to(h_SD.dtype)
    turn = rotary(config.patches, config.width // config.num_heads, place_2S)
    runs, deep = runs_of(grids), []
    for i, layer in enumerate(params.layers):
        qkv = affine(layer_norm(h_SD, layer.norm1, EPS), layer.qkv, own)
        q_SNH, k_SNH, v_SNH = qkv.unflatten(-1, (3, config.num_heads, -1)).unbind(1)
        o_SD = attend(turned(q_SNH, turn), turned(k_SNH, turn), v_SNH, runs)
        h_SD = h_SD + affine(o_SD, layer.out, own)
        x = affine(layer_norm(h_SD, layer.norm2, EPS), layer.up, own)
        h_SD = h_SD + affine(ACTIVATIONS[config.activation](x), layer.down, own)
        if i in config.deep_layers:  # in the tower's order, each with its own merger
            merger = params.deep_mergers[config.deep_layers.index(i)]
            blocks = h_SD.reshape(-1, config.width * unit)
            deep.append(merged(merger, layer_norm(blocks, merger.norm, EPS), merging))
    x = layer_norm(h_SD, params.merger.norm, EPS).reshape(-1, config.width * unit)
    return torch.cat((merged(params.merger, x, merging), *deep), dim=-1)


def merged(merger: Qwen3Merger, x: Tensor, adapters: RowAdapters | None) -> Tensor:
    return affine(F.gelu(affine(x, merger.up, adapters)), merger.down, adapters)


def learned_positions(position_GGD: Tensor, grids: Sequence[Grid], place_2S: Tensor) -> Tensor:
    """The learned grid, stretched over each picture so that corners lie on corners: between the
    four positions around a patch it is linear, in float32. [S, D]."""
    counts = torch.tensor([t * h * w for t, h, w in grids])
    size_2S = torch.tensor([grid[1:] for grid in grids]).repeat_interleave(counts, 0).T
    last = len(position_GGD) - 1
    at_2S = place_2S.float() * last / (size_2S.to(place_2S.device) - 1).clamp(min=1)
    low_2S = at_2S.floor().long()
    high_2S, share_2S = (low_2S + 1).clamp(max=last), at_2S - low_2S
    rows = (low_2S[0], 1 - share_2S[0]), (high_2S[0], share_2S[0])
    columns = (low_2S[1], 1 - share_2S[1]), (high_2S[1], share_2S[1])
    parts = [
        position_GGD[row, column] * (by_row * by_column)[:, None]
        for row, by_row in rows
        for column, by_column in columns
    ]
    return sum(parts[1:], parts[0])


QWEN3_VL = VisionFamily(
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
    deepstack=lambda config: len(config.deep_layers),
    largest=lambda config, settings: qwen_patches.largest(config.patches, settings),
    heaviest=lambda config, settings, limit: qwen_patches.heaviest(config.patches, settings, limit),
    working=lambda config, item: qwen_patches.working(
        config.patches, item, config.width, config.intermediate_size, config.row_size
    ),
)
