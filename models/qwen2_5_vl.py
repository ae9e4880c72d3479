"""Qwen2.5-VL: Qwen2-VL's patches, most layers of whose tower see a window of the picture alone.

S patches of all items, U blocks of merge x merge of them, which are kept together, D width (or the
language model's), N heads, H head size, E rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models import qwen_patches
from purestep.models.decoder import rms_norm
from purestep.models.qwen_patches import (
    Grid,
    Patches,
    Runs,
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
)
from purestep.state.errors import CheckpointError
from purestep.state.pytree import tree

EPS = 1e-6  # of every norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25Vision:
    patches: Patches
    num_layers: int
    width: int
    intermediate_size: int
    num_heads: int
    activation: str
    window: int  # side of a window, in blocks
    full_layers: tuple[int, ...]  # layers that see the whole picture
    hidden_size: int  # of the language model
    marker: int

    @property
    def merge_size(self) -> int:
        return self.patches.merge_size


@tree
class Qwen25Layer:
    norm1_D: Tensor
    qkv: Affine
    out: Affine
    norm2_D: Tensor
    gate_up: Affine
    down: Affine


@tree
class Qwen25VisionParams:
    patch_DP: Tensor
    layers: tuple[Qwen25Layer, ...]
    merge_norm_D: Tensor
    merge_up: Affine
    merge_down: Affine


def read_config(hf: PretrainedConfig) -> Qwen25Vision:
    """Raises CheckpointError for what is not supported."""
    vision, patches = hf.vision_config, qwen_patches.read_patches(hf.vision_config)
    window = vision.window_size // patches.merge_size // patches.patch_size
    if window < 1:
        raise CheckpointError(
            f"window_size {vision.window_size} of the vision tower must be at least one block of "
            f"{patches.merge_size * patches.patch_size} pixels"
        )
    return Qwen25Vision(
        patches=patches,
        num_layers=vision.depth,
        width=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        activation=known_activation(vision.hidden_act),
        window=window,
        full_layers=tuple(vision.fullatt_block_indexes),
        hidden_size=vision.out_hidden_size,
        marker=hf.image_token_id,
    )


def shapes(config: Qwen25Vision) -> Shapes:
    D, wide, p = config.width, config.intermediate_size, config.patches
    cube = (p.num_channels, p.temporal_size, p.patch_size, p.patch_size)
    found: Shapes = {"visual.patch_embed.proj.weight": (D, *cube)}
    for i in range(config.num_layers):
        block = f"visual.blocks.{i}"
        found |= {f"{block}.norm1.weight": (D,), f"{block}.norm2.weight": (D,)}
        found |= affine_shapes(f"{block}.attn.qkv", 3 * D, D)
        found |= affine_shapes(f"{block}.attn.proj", D, D)
        found |= affine_shapes(f"{block}.mlp.gate_proj", wide, D)
        found |= affine_shapes(f"{block}.mlp.up_proj", wide, D)
        found |= affine_shapes(f"{block}.mlp.down_proj", D, wide)
    block = D * config.merge_size**2
    found["visual.merger.ln_q.weight"] = (D,)
    found |= affine_shapes("visual.merger.mlp.0", block, block)
    return found | affine_shapes("visual.merger.mlp.2", config.hidden_size, block)


def load_params(config: Qwen25Vision, tensors: dict[str, Tensor]) -> Qwen25VisionParams:
    def layer(i: int) -> Qwen25Layer:
        root = f"visual.blocks.{i}"
        return Qwen25Layer(
            norm1_D=tensors.pop(f"{root}.norm1.weight"),
            qkv=affine_of(tensors, f"{root}.attn.qkv"),
            out=affine_of(tensors, f"{root}.attn.proj"),
            norm2_D=tensors.pop(f"{root}.norm2.weight"),
            gate_up=affine_of(tensors, f"{root}.mlp.gate_proj", f"{root}.mlp.up_proj"),
            down=affine_of(tensors, f"{root}.mlp.down_proj"),
        )

    return Qwen25VisionParams(
        patch_DP=tensors["visual.patch_embed.proj.weight"].flatten(1),
        layers=tuple(layer(i) for i in range(config.num_layers)),
        merge_norm_D=tensors["visual.merger.ln_q.weight"],
        merge_up=affine_of(tensors, "visual.merger.mlp.0"),
        merge_down=affine_of(tensors, "visual.merger.mlp.2"),
    )


def encode(
    params: Qwen25VisionParams,
    config: Qwen25Vision,
    items: Sequence[Tensors],
    adapters: ItemAdapters | None = None,
) -> list[Tensor]:
    own = in_order(adapters, length_order(items))
    return encode_by_length(
        items, config.patches, lambda pixels, grids: features(params, config, pixels, grids, own)
    )


def features(
    params: Qwen25VisionParams,
    config: Qwen25Vision,
    pixels_SP: Tensor,
    grids: Sequence[Grid],
    adapters: ItemAdapters | None = None,
) -> Tensor:
    """The rows of all items, one behind the other: [E, D].

    Between the first layer and the last the blocks stand in the order of their windows; the few
    layers that see whole pictures take them back to theirs."""
    unit, device = config.merge_size**2, params.patch_DP.device
    order_U, windows = window_order(grids, config.merge_size, config.window)
    counts = [math.prod(grid) for grid in grids]
    own = spread(adapters, counts, (order_U[:, None] * unit + np.arange(unit)).flatten())
    merging = spread(adapters, [count // unit for count in counts], order_U)
    order_U = torch.from_numpy(order_U).to(device)
    order_S = (order_U[:, None] * unit + torch.arange(unit, device=device)).flatten()
    back_U, back_S = order_U.argsort(), order_S.argsort()
    place_2S = block_order(config.patches, grids, device)[:, order_S]
    turn = rotary(config.patches, config.width // config.num_heads, place_2S)
    pictures = runs_of(grids)
    h_SD = F.linear(pixels_SP.to(params.patch_DP), params.patch_DP)[order_S]
    for i, layer in enumerate(params.layers):
        qkv = affine(rms_norm(h_SD, layer.norm1_D, EPS), layer.qkv, own)
        q_SNH, k_SNH, v_SNH = qkv.unflatten(-1, (3, config.num_heads, -1)).unbind(1)
        heads = turned(q_SNH, turn), turned(k_SNH, turn), v_SNH
        if i in config.full_layers:
            o_SD = attend(*(x_SNH[back_S] for x_SNH in heads), pictures)[order_S]
        else:
            o_SD = attend(*heads, windows)
        h_SD = h_SD + affine(o_SD, layer.out, own)
        gate, up = affine(rms_norm(h_SD, layer.norm2_D, EPS), layer.gate_up, own).chunk(2, dim=-1)
        h_SD = h_SD + affine(ACTIVATIONS[config.activation](gate) * up, layer.down, own)
    x = rms_norm(h_SD, params.merge_norm_D, EPS).reshape(-1, config.width * unit)
    x = F.gelu(affine(x, params.merge_up, merging))
    return affine(x, params.merge_down, merging)[back_U]


def window_order(grids: Sequence[Grid], merge: int, window: int) -> tuple[np.ndarray, Runs]:
    """(the blocks of all items in the order of their windows [U], the windows' patches).

    A picture's edges cut windows; those of one size stand side by side, so that they are one
    batch, whosever they are."""
    windows = []  # the blocks of each, in reading order
    first = 0
    for t, h, w in grids:
        high, wide = h // merge, w // merge
        block_THW = first + np.arange(t * high * wide).reshape(t, high, wide)
        first += block_THW.size
        windows += [
            block_HW[top : top + window, left : left + window].flatten()
            for block_HW in block_THW
            for top in range(0, high, window)
            for left in range(0, wide, window)
        ]
    windows.sort(key=len)
    sizes = [(len(list(same)), size * merge**2) for size, same in groupby(map(len, windows))]
    return np.concatenate(windows), tuple(sizes)


QWEN2_5_VL = VisionFamily(
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
