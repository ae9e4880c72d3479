"""Pixtral: a tower for pictures of any size, whose rows stand line by line in the prompt.

S patches of all items, L of one (h * w), P values of a patch, D width, N heads, H head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models.decoder import rms_norm
from purestep.models.qwen_patches import attend, runs_of, turned
from purestep.models.tower_rows import ItemAdapters, in_order, spread
from purestep.models.vision import (
    Shapes,
    Tensors,
    VisionFamily,
    Words,
    as_many,
    owned_rows,
    working_numbers,
    woven,
)
from purestep.models.vit import (
    ACTIVATIONS,
    Affine,
    affine,
    affine_of,
    affine_shapes,
    known_activation,
)
from purestep.state.errors import CheckpointError, RequestError
from purestep.state.pytree import tree

EPS = 1e-5  # of every norm
BREAK, END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralVision:
    num_channels: int
    patch_size: int
    num_layers: int
    width: int
    intermediate_size: int
    num_heads: int
    activation: str
    rope_theta: float
    projector_activation: str
    projector_bias: bool
    hidden_size: int  # of the language model
    marker: int


@tree
class PixtralLayer:
    norm1_D: Tensor
    qkv: Affine
    out: Affine
    norm2_D: Tensor
    gate_up: Affine
    down: Affine


@tree
class PixtralParams:
    patch_DP: Tensor
    norm_D: Tensor
    layers: tuple[PixtralLayer, ...]
    first: Affine
    second: Affine


def read_config(hf: PretrainedConfig) -> PixtralVision:
    """Raises CheckpointError for what is not supported."""
    vision = hf.vision_config
    layers, taken = vision.num_hidden_layers, hf.vision_feature_layer
    if taken not in (-1, layers) or hf.vision_feature_select_strategy != "full":
        raise CheckpointError(
            f"vision_feature_layer={taken} and vision_feature_select_strategy="
            f"{hf.vision_feature_select_strategy!r} of a pixtral tower must be -1 and 'full'"
        )
    if not isinstance(vision.patch_size, int) or vision.head_dim % 4:
        raise CheckpointError(
            f"patch_size {vision.patch_size} of the vision tower must be an integer, and its head "
            f"size {vision.head_dim} a multiple of 4"
        )
    return PixtralVision(
        num_channels=vision.num_channels,
        patch_size=vision.patch_size,
        num_layers=layers,
        width=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_attention_heads,
        activation=known_activation(vision.hidden_act),
        rope_theta=float(vision.rope_parameters["rope_theta"]),
        projector_activation=known_activation(hf.projector_hidden_act),
        projector_bias=hf.multimodal_projector_bias,
        hidden_size=hf.text_config.hidden_size,
        marker=hf.image_token_id,
    )


def shapes(config: PixtralVision) -> Shapes:
    D, wide, p, bias = config.width, config.intermediate_size, config.patch_size, False
    found: Shapes = {
        "vision_tower.patch_conv.weight": (D, config.num_channels, p, p),
        "vision_tower.ln_pre.weight": (D,),
    }
    for i in range(config.num_layers):
        root = f"vision_tower.transformer.layers.{i}"
        found |= {f"{root}.{name}_norm.weight": (D,) for name in ("attention", "ffn")}
        for name in "qkvo":
            found |= affine_shapes(f"{root}.attention.{name}_proj", D, D, bias=bias)
        for name in ("gate", "up"):
            found |= affine_shapes(f"{root}.feed_forward.{name}_proj", wide, D, bias=bias)
        found |= affine_shapes(f"{root}.feed_forward.down_proj", D, wide, bias=bias)
    out, bias = config.hidden_size, config.projector_bias
    found |= affine_shapes("multi_modal_projector.linear_1", out, D, bias=bias)
    return found | affine_shapes("multi_modal_projector.linear_2", out, out, bias=bias)


def load_params(config: PixtralVision, tensors: dict[str, Tensor]) -> PixtralParams:
    def layer(i: int) -> PixtralLayer:
        root = f"vision_tower.transformer.layers.{i}"
        return PixtralLayer(
            norm1_D=tensors.pop(f"{root}.attention_norm.weight"),
            qkv=affine_of(tensors, *(f"{root}.attention.{x}_proj" for x in "qkv")),
            out=affine_of(tensors, f"{root}.attention.o_proj"),
            norm2_D=tensors.pop(f"{root}.ffn_norm.weight"),
            gate_up=affine_of(tensors, *(f"{root}.feed_forward.{x}_proj" for x in ("gate", "up"))),
            down=affine_of(tensors, f"{root}.feed_forward.down_proj"),
        )

    return PixtralParams(
        patch_DP=tensors["vision_tower.patch_conv.weight"].flatten(1),
        norm_D=tensors["vision_tower.ln_pre.weight"],
        layers=tuple(layer(i) for i in range(config.num_layers)),
        first=affine_of(tensors, "multi_modal_projector.linear_1"),
        second=affine_of(tensors, "multi_modal_projector.linear_2"),
    )


def item(config: PixtralVision, processed: Tensors) -> Tensors:
    """One image's pixels: float [channels, height, width], whole patches."""
    pixels, p = processed["pixel_values"][0], config.patch_size
    if pixels.shape[0] != config.num_channels or pixels.shape[1] % p or pixels.shape[2] % p:
        raise RequestError(
            f"the image processor made pixels of shape {tuple(pixels.shape)}, but the vision tower "
            f"takes {config.num_channels} channels of whole patches of {p}: its patch_size must be "
            "the model's"
        )
    return {"pixel_values": pixels}


def lines(config: PixtralVision, item: Tensors) -> tuple[int, int]:
    """Rows and columns of patches."""
    _, height, width = item["pixel_values"].shape
    return height // config.patch_size, width // config.patch_size


def placeholder(
    config: PixtralVision, item: Tensors, words: Words
) -> tuple[np.ndarray, np.ndarray]:
    h, w = lines(config, item)
    return woven(config.marker, [w, words(BREAK)] * (h - 1) + [w, words(END)])


def encode(
    params: PixtralParams,
    config: PixtralVision,
    items: Sequence[Tensors],
    adapters: ItemAdapters | None = None,
) -> list[Tensor]:
    """Items go through the tower together, those of as many patches side by side."""
    if not items:
        return []
    grids = [lines(config, item) for item in items]
    order = sorted(range(len(items)), key=lambda i: grids[i][0] * grids[i][1])
    patches_SP = torch.cat([patches_of(config, items[i]["pixel_values"]) for i in order])
    own = in_order(adapters, order)
    rows = features(params, config, patches_SP, [grids[i] for i in order], own)
    owned = owned_rows(rows, [grids[i][0] * grids[i][1] for i in order])
    return [own for _, own in sorted(zip(order, owned, strict=True), key=itemgetter(0))]


def patches_of(config: PixtralVision, pixels: Tensor) -> Tensor:
    """[L, P], line by line."""
    p = config.patch_size
    pixels = pixels.unflatten(2, (-1, p)).unflatten(1, (-1, p))
    return pixels.permute(1, 3, 0, 2, 4).reshape(-1, config.num_channels * p * p)


def features(
    params: PixtralParams,
    config: PixtralVision,
    patches_SP: Tensor,
    grids: Sequence[tuple[int, int]],
    adapters: ItemAdapters | None = None,
) -> Tensor:
    """The projected rows of all items, one behind the other."""
    own = spread(adapters, [h * w for h, w in grids])
    h_SD = rms_norm(F.linear(patches_SP.to(params.patch_DP), params.patch_DP), params.norm_D, EPS)
    turn = rotary(config, grids, h_SD.device)
    runs = runs_of([(1, h, w) for h, w in grids])
    for layer in params.layers:
        qkv = affine(rms_norm(h_SD, layer.norm1_D, EPS), layer.qkv, own)
        q_SNH, k_SNH, v_SNH = qkv.unflatten(-1, (3, config.num_heads, -1)).unbind(1)
        o_SD = attend(turned(q_SNH, turn), turned(k_SNH, turn), v_SNH, runs)
        h_SD = h_SD + affine(o_SD, layer.out, own)
        gate, up = affine(rms_norm(h_SD, layer.norm2_D, EPS), layer.gate_up, own).chunk(2, dim=-1)
        h_SD = h_SD + affine(ACTIVATIONS[config.activation](gate) * up, layer.down, own)
    x = ACTIVATIONS[config.projector_activation](affine(h_SD, params.first, own))
    return affine(x, params.second, own)


def rotary(config: PixtralVision, grids: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """cos and sin, float32 [2, S, 1, H]: pairs turn by the row and by the column in turns."""
    H = config.width // config.num_heads
    power = torch.arange(0, H, 2, dtype=torch.float32, device=device) / H
    frequency = 1.0 / config.rope_theta**power
    angles = []
    for h, w in grids:
        place = torch.arange(h * w, device=device)[:, None]
        angles.append(torch.cat((place // w * frequency[0::2], place % w * frequency[1::2]), -1))
    angle = torch.cat(angles).repeat(1, 2)[:, None]
    return torch.stack((angle.cos(), angle.sin()))


def largest(config: PixtralVision, settings: Mapping[str, Any]) -> Tensors:
    """Zeros of the largest size that the image processor's settings allow."""
    size = settings.get("size") or {}
    edge = size.get("longest_edge") or 1024
    sides = [size.get(name) or edge for name in ("height", "width")]
    h, w = (-(-side // config.patch_size) * config.patch_size for side in sides)
    return {"pixel_values": torch.zeros(config.num_channels, h, w)}


def heaviest(config: PixtralVision, settings: Mapping[str, Any], limit: int) -> list[Tensors]:
    """The largest, `limit` rows or some more."""
    item = largest(config, settings)
    rows = num_patches(config, item)
    return as_many(item, rows, limit + rows - 1)


def working(config: PixtralVision, item: Tensors) -> int:
    """Numbers that encoding an item holds at a time."""
    rows = num_patches(config, item)
    return working_numbers(rows, config.width, config.intermediate_size, rows, config.hidden_size)


def num_patches(config: PixtralVision, item: Tensors) -> int:
    _, h, w = item["pixel_values"].shape
    return h * w // config.patch_size**2


PIXTRAL = VisionFamily(
    read_config=read_config,
    shapes=shapes,
    unread="(?!)",
    load_params=load_params,
    marker=lambda config: config.marker,
    item=item,
    placeholder=placeholder,
    encode=encode,
    largest=largest,
    heaviest=heaviest,
    working=working,
)
