"""Qwen2.5-VL: Qwen2-VL's patches, most layers of whose tower see a window of the picture alone.

B items and their steps in time, L patches of one step, D width, N heads, H head size, E rows,
U blocks of merge x merge patches of one step, which are kept together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models import qwen_patches
from purestep.models.decoder import rms_norm
from purestep.models.qwen_patches import Patches, attend, block_order, grid_of, rotary, turned
from purestep.models.vision import Shapes, Tensors, VisionFamily, in_stacks
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
    params: Qwen25VisionParams, config: Qwen25Vision, items: Sequence[Tensors]
) -> list[Tensor]:
    def stack(items: Sequence[Tensors]) -> Tensor:
        pixels = torch.stack([item["pixel_values"] for item in items])
        return features(params, config, pixels, grid_of(items[0]))

    return in_stacks(items, stack)


def features(
    params: Qwen25VisionParams, config: Qwen25Vision, pixels: Tensor, grid: tuple[int, int, int]
) -> Tensor:
    """Rows of items of one grid, [items, E, D], from their patches [items, T * L, P].

    Each step in time is a sequence of its own. Between the first layer and the last the blocks
    stand in the order of their windows."""
    (t, h, w), m = grid, config.merge_size
    order_U, sizes = window_order(h // m, w // m, config.window)
    order_U = order_U.to(params.patch_DP.device)
    order_L = (order_U[:, None] * m**2 + torch.arange(m**2, device=order_U.device)).flatten()
    row_L, column_L = block_order(config.patches, h, w, order_L.device)
    head_dim = config.width // config.num_heads
    turn = rotary(config.patches, head_dim, row_L[order_L], column_L[order_L])
    patches = pixels.to(params.patch_DP).unflatten(1, (t, h * w)).flatten(0, 1)
    h_BLD = F.linear(patches[:, order_L], params.patch_DP)
    for i, layer in enumerate(params.layers):
        qkv = affine(rms_norm(h_BLD, layer.norm1_D, EPS), layer.qkv)
        q_BLNH, k_BLNH, v_BLNH = qkv.unflatten(-1, (3, config.num_heads, -1)).unbind(2)
        q_BLNH, k_BLNH = turned(q_BLNH, turn), turned(k_BLNH, turn)
        if i in config.full_layers:
            o_BLD = attend(q_BLNH, k_BLNH, v_BLNH)
        else:
            o_BLD = attend_in_windows(q_BLNH, k_BLNH, v_BLNH, sizes, m**2)
        h_BLD = h_BLD + affine(o_BLD, layer.out)
        gate, up = affine(rms_norm(h_BLD, layer.norm2_D, EPS), layer.gate_up).chunk(2, dim=-1)
        h_BLD = h_BLD + affine(ACTIVATIONS[config.activation](gate) * up, layer.down)
    x = rms_norm(h_BLD, params.merge_norm_D, EPS).unflatten(1, (-1, m**2)).flatten(2)
    x = affine(F.gelu(affine(x, params.merge_up)), params.merge_down)
    return x[:, order_U.argsort()].unflatten(0, (-1, t)).flatten(1, 2)


def window_order(high: int, wide: int, window: int) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """(blocks of a picture in the order of their windows [U], (windows, blocks of one) by size).

    Windows that the picture's edges cut are smaller. Those of one size stand together, so that
    they are one batch: four at most."""
    row_U = torch.arange(high)[:, None].expand(high, wide).flatten()
    column_U = torch.arange(wide).expand(high, wide).flatten()
    cut_below = row_U // window == high // window
    cut_right = column_U // window == wide // window
    columns = -(-wide // window)
    window_U = row_U // window * columns + column_U // window
    kind_U = 2 * cut_below + cut_right
    order_U = (kind_U * (high * wide) + window_U).argsort(stable=True)
    sizes = []
    for kind in range(4):
        found = window_U[kind_U == kind]
        if count := len(found.unique()):
            sizes.append((count, len(found) // count))
    return order_U, tuple(sizes)


def attend_in_windows(
    q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, sizes: Sequence[tuple[int, int]], unit: int
) -> Tensor:
    """`attend` among the patches of each window: [B, L, D]. A block has `unit` patches."""
    outputs, start = [], 0
    for count, blocks in sizes:
        end = start + count * blocks * unit
        parts = [
            x[:, start:end].unflatten(1, (count, blocks * unit)).flatten(0, 1)
            for x in (q_BLNH, k_BLNH, v_BLNH)
        ]
        outputs.append(attend(*parts).unflatten(0, (-1, count)).flatten(1, 2))
        start = end
    return torch.cat(outputs, dim=1)


QWEN2_5_VL = VisionFamily(
    read_config=read_config,
    shapes=shapes,
    unread="(?!)",
    load_params=load_params,
    marker=lambda config: config.marker,
    item=lambda config, processed: qwen_patches.item(config.patches, processed),
    placeholder=lambda config, item: qwen_patches.placeholder(config.marker, config.patches, item),
    encode=encode,
    grid=lambda config, item: grid_of(item),
    merge=lambda config: config.merge_size,
    largest=lambda config, settings: qwen_patches.largest(config.patches, settings),
    heaviest=lambda config, settings, limit: qwen_patches.heaviest(config.patches, settings, limit),
    working=lambda config, item: qwen_patches.working(
        config.patches, item, config.width, config.intermediate_size, config.hidden_size
    ),
)
