"""LLaVA-1.5: the patches of one square image, through a tower and a projector of two layers.

B images, S their side, E rows of one, D hidden size of the language model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models.tower_rows import ItemAdapters, spread
from purestep.models.vision import (
    Shapes,
    Tensors,
    VisionFamily,
    Words,
    as_many,
    marker_ids,
    owned_rows,
)
from purestep.models.vit import (
    ACTIVATIONS,
    UNREAD,
    Affine,
    VitConfig,
    VitParams,
    affine,
    affine_of,
    affine_shapes,
    known_activation,
    vit,
    vit_config,
    vit_params,
    vit_shapes,
    vit_spare,
    vit_working,
)
from purestep.state.errors import RequestError
from purestep.state.pytree import tree


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaVision:
    tower: VitConfig
    drop_first: bool  # strategy "default": the first token of an image is left out
    activation: str  # of the projector
    bias: bool
    hidden_size: int  # of the language model
    marker: int

    @property
    def num_rows(self) -> int:
        return self.tower.num_tokens - self.drop_first


@tree
class LlavaParams:
    tower: VitParams
    first: Affine
    second: Affine


def read_config(hf: PretrainedConfig) -> LlavaVision:
    """Raises CheckpointError for a tower or an activation that is not supported."""
    return LlavaVision(
        tower=vit_config(hf.vision_config, hf.vision_feature_layer),
        drop_first=hf.vision_feature_select_strategy == "default",
        activation=known_activation(hf.projector_hidden_act),
        bias=hf.multimodal_projector_bias,
        hidden_size=hf.text_config.hidden_size,
        marker=hf.image_token_id,
    )


def shapes(config: LlavaVision) -> Shapes:
    D, width = config.hidden_size, config.tower.hidden_size * len(config.tower.taken)
    return (
        vit_shapes(config.tower)
        | affine_shapes("multi_modal_projector.linear_1", D, width, bias=config.bias)
        | affine_shapes("multi_modal_projector.linear_2", D, D, bias=config.bias)
    )


def load_params(config: LlavaVision, tensors: dict[str, Tensor]) -> LlavaParams:
    return LlavaParams(
        tower=vit_params(config.tower, tensors),
        first=affine_of(tensors, "multi_modal_projector.linear_1"),
        second=affine_of(tensors, "multi_modal_projector.linear_2"),
    )


def item(config: LlavaVision, processed: Tensors) -> Tensors:
    """One image's pixels: float [channels, S, S]."""
    return {"pixel_values": square_pixels(config.tower, processed["pixel_values"])[0]}


def square_pixels(tower: VitConfig, pixels: Tensor) -> Tensor:
    """The pixels themselves, [..., channels, S, S]; RequestError for another size."""
    wanted = (tower.num_channels, tower.image_size, tower.image_size)
    if pixels.shape[-3:] != wanted:
        raise RequestError(
            f"the image processor made pixels of shape {tuple(pixels.shape[-3:])}, but the vision "
            f"tower takes {wanted}: its options for size and crop must leave that"
        )
    return pixels


def placeholder(config: LlavaVision, item: Tensors, words: Words) -> tuple[np.ndarray, None]:
    return marker_ids(config.marker, config.num_rows), None


def encode(
    params: LlavaParams,
    config: LlavaVision,
    items: Sequence[Tensors],
    adapters: ItemAdapters | None = None,
) -> list[Tensor]:
    if not items:
        return []
    pixels = torch.stack([item["pixel_values"] for item in items])
    rows = features(params, config, pixels, adapters)
    return owned_rows(rows.flatten(0, 1), [config.num_rows] * len(items))


def features(
    params: LlavaParams,
    config: LlavaVision,
    pixels_BCSS: Tensor,
    adapters: ItemAdapters | None = None,
) -> Tensor:
    """The projected rows of square images: [B, E, D]. `adapters` are those of the images."""
    own = spread(adapters, [config.num_rows] * len(pixels_BCSS))
    pixels_BCSS = pixels_BCSS.to(params.first.weight_OD)
    x = vit(params.tower, config.tower, pixels_BCSS, adapters)[:, int(config.drop_first) :]
    x = ACTIVATIONS[config.activation](affine(x, params.first, own))
    return affine(x, params.second, own)


def largest(config: LlavaVision, settings: Mapping[str, Any]) -> Tensors:
    side = config.tower.image_size
    return {"pixel_values": torch.zeros(config.tower.num_channels, side, side)}


def working(config: LlavaVision, num_images: int) -> int:
    """Numbers that encoding square images holds at a time."""
    tower = config.tower
    taken = 2 * num_images * tower.num_tokens * tower.hidden_size * len(tower.taken)
    return taken + vit_working(tower, num_images, config.num_rows, config.hidden_size)


LLAVA = VisionFamily(
    read_config=read_config,
    shapes=shapes,
    unread=UNREAD,
    load_params=load_params,
    marker=lambda config: config.marker,
    item=item,
    placeholder=placeholder,
    encode=encode,
    spare=lambda config: vit_spare(config.tower),
    largest=largest,
    heaviest=lambda config, settings, limit: as_many(
        largest(config, settings), config.num_rows, limit
    ),
    working=lambda config, item: working(config, num_images=1),
)
