"""Gemma 3: SigLIP's tower, its patches averaged; rows of an image see each other in the decoder.

I views of an item, the whole image first, S their side, B views of all items, E rows of one,
D width, H hidden size of the language model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models.decoder import rms_norm
from purestep.models.llava import square_pixels
from purestep.models.tower_rows import ItemAdapters, of_parts
from purestep.models.vision import Shapes, Tensors, VisionFamily, Words, as_many, owned_rows, woven
from purestep.models.vit import (
    Affine,
    VitConfig,
    VitParams,
    affine_of,
    affine_shapes,
    layer_norm,
    vit,
    vit_config,
    vit_params,
    vit_shapes,
    vit_working,
)
from purestep.state.errors import CheckpointError
from purestep.state.pytree import tree

BREAK = "\n\n"  # on both sides of a view
BEFORE_WHOLE = "Here is the original image "  # what the texts are where there are crops
BEFORE_CROPS = " and here are some crops to help you see better "


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Vision:
    tower: VitConfig
    num_rows: int  # of one view
    hidden_size: int  # of the language model
    row_id: int  # stands for one row
    marker: int  # begins an image, and stands for it in a template
    end_id: int


@tree
class Gemma3VisionParams:
    tower: VitParams
    norm: Affine
    row_norm_D: Tensor
    projection_DH: Tensor


def read_config(hf: PretrainedConfig) -> Gemma3Vision:
    """Raises CheckpointError for what is not supported."""
    tower, rows = vit_config(hf.vision_config, -1), hf.mm_tokens_per_image
    side, patches = math.isqrt(rows), tower.image_size // tower.patch_size
    if tower.class_token or side < 1 or side * side != rows or patches % side:
        raise CheckpointError(
            f"mm_tokens_per_image {rows} must be the square of a number that divides the {patches} "
            f"patches a side of a {hf.vision_config.model_type}"
        )
    return Gemma3Vision(
        tower=tower,
        num_rows=rows,
        hidden_size=hf.text_config.hidden_size,
        row_id=hf.image_token_index,
        marker=hf.boi_token_index,
        end_id=hf.eoi_token_index,
    )


def shapes(config: Gemma3Vision) -> Shapes:
    D = config.tower.hidden_size
    return (
        vit_shapes(config.tower)
        | affine_shapes("vision_tower.post_layernorm", D)
        | {
            "multi_modal_projector.mm_soft_emb_norm.weight": (D,),
            "multi_modal_projector.mm_input_projection_weight": (D, config.hidden_size),
        }
    )


def load_params(config: Gemma3Vision, tensors: dict[str, Tensor]) -> Gemma3VisionParams:
    return Gemma3VisionParams(
        norm=affine_of(tensors, "vision_tower.post_layernorm"),
        row_norm_D=tensors.pop("multi_modal_projector.mm_soft_emb_norm.weight") + 1,
        projection_DH=tensors.pop("multi_modal_projector.mm_input_projection_weight"),
        tower=vit_params(config.tower, tensors),
    )


def item(config: Gemma3Vision, processed: Tensors) -> Tensors:
    """One image's views, the whole of it and its crops: float [I, channels, S, S]."""
    return {"pixel_values": square_pixels(config.tower, processed["pixel_values"])}


def placeholder(config: Gemma3Vision, item: Tensors, words: Words) -> tuple[np.ndarray, np.ndarray]:
    """The views from the first one's marker to the last one's end, with what is between them."""
    view = [[config.marker], config.num_rows, [config.end_id]]
    parts: list[int | Sequence[int]] = list(view)
    for n in range(1, len(item["pixel_values"])):
        parts += [words(f"{BREAK}{BEFORE_CROPS if n == 1 else ' '}{BREAK}"), *view]
    return woven(config.row_id, parts)


def around(config: Gemma3Vision, item: Tensors) -> tuple[str, str]:
    crops = len(item["pixel_values"]) - 1
    return (BEFORE_WHOLE if crops else "") + BREAK, BREAK


def encode(
    params: Gemma3VisionParams,
    config: Gemma3Vision,
    items: Sequence[Tensors],
    adapters: ItemAdapters | None = None,
) -> list[Tensor]:
    """Views are of one shape, so all of them run together."""
    if not items:
        return []
    counts = [len(item["pixel_values"]) for item in items]
    pixels = torch.cat([item["pixel_values"] for item in items])
    rows_BEH = features(params, config, pixels, of_parts(adapters, counts))
    return owned_rows(rows_BEH.flatten(0, 1), [count * config.num_rows for count in counts])


def features(
    params: Gemma3VisionParams,
    config: Gemma3Vision,
    pixels_BCSS: Tensor,
    adapters: ItemAdapters | None = None,
) -> Tensor:
    """The projected rows of views: [B, E, H]. `adapters` are those of the views; the projection is
    no linear layer and has none."""
    eps, side = config.tower.norm_eps, config.tower.image_size // config.tower.patch_size
    x = vit(params.tower, config.tower, pixels_BCSS.to(params.projection_DH), adapters)
    x = layer_norm(x, params.norm, eps)
    x = F.avg_pool2d(
        x.transpose(1, 2).unflatten(2, (side, side)), side // math.isqrt(config.num_rows)
    )
    return rms_norm(x.flatten(2).transpose(1, 2), params.row_norm_D, eps) @ params.projection_DH


def largest(config: Gemma3Vision, settings: Mapping[str, Any]) -> Tensors:
    """Zeros of as many views as the image processor's settings allow."""
    tower, crops = config.tower, 0
    if settings.get("do_pan_and_scan"):
        crops = settings.get("pan_and_scan_max_num_crops") or 0
    tile = (tower.num_channels, tower.image_size, tower.image_size)
    return {"pixel_values": torch.zeros(1 + crops, *tile)}


def heaviest(config: Gemma3Vision, settings: Mapping[str, Any], limit: int) -> list[Tensors]:
    """Views cost the same whichever picture they belong to."""
    view = {"pixel_values": largest(config, settings)["pixel_values"][:1]}
    return as_many(view, config.num_rows, limit)


def working(config: Gemma3Vision, item: Tensors) -> int:
    """Numbers that encoding an item holds at a time."""
    views = len(item["pixel_values"])
    return vit_working(config.tower, views, config.num_rows, config.hidden_size)


GEMMA3 = VisionFamily(
    read_config=read_config,
    shapes=shapes,
    unread=r"vision_tower\.(?:head\..+|embeddings\.position_ids)",
    load_params=load_params,
    marker=lambda config: config.marker,
    item=item,
    placeholder=placeholder,
    around=around,
    encode=encode,
    bidirectional=True,
    largest=largest,
    heaviest=heaviest,
    working=working,
)
