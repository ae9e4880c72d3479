"""LLaVA-NeXT: an overview of the image, and tiles of it on the grid that fits its shape best.

I tiles of an item, the overview first, S their side, g rows and columns of a tile, D hidden size
of the language model, E rows of an item.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.image_processing_utils import select_best_resolution

from purestep.models import llava
from purestep.models.llava import LlavaParams, LlavaVision
from purestep.models.tower_rows import ItemAdapters, of_parts
from purestep.models.vision import Shapes, Tensors, VisionFamily, Words, as_many, marker_ids
from purestep.models.vit import UNREAD, vit_spare
from purestep.state.errors import CheckpointError, RequestError
from purestep.state.pytree import tree


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextVision:
    tile: LlavaVision
    resolutions: tuple[tuple[int, int], ...]  # heights and widths, multiples of a tile's

    @property
    def tile_side(self) -> int:
        """Rows and columns of a tile."""
        return self.tile.tower.image_size // self.tile.tower.patch_size


@tree
class LlavaNextParams:
    tile: LlavaParams
    newline_D: Tensor


def read_config(hf: PretrainedConfig) -> LlavaNextVision:
    """Raises CheckpointError for what is not supported."""
    tile, side = llava.read_config(hf), hf.vision_config.image_size
    config = LlavaNextVision(tile=tile, resolutions=tuple(map(tuple, hf.image_grid_pinpoints)))
    if tile.num_rows != config.tile_side**2:
        raise CheckpointError(
            f"vision_feature_select_strategy {hf.vision_feature_select_strategy!r} leaves "
            f"{tile.num_rows} rows of a tile, which must be a square of {config.tile_side}"
        )
    if not config.resolutions or any(len(r) != 2 or r[0] % side or r[1] % side
                                     for r in config.resolutions):  # fmt: skip
        raise CheckpointError(
            f"image_grid_pinpoints {hf.image_grid_pinpoints} must be pairs of multiples of {side}"
        )
    return config


def shapes(config: LlavaNextVision) -> Shapes:
    return llava.shapes(config.tile) | {"image_newline": (config.tile.hidden_size,)}


def load_params(config: LlavaNextVision, tensors: dict[str, Tensor]) -> LlavaNextParams:
    newline_D = tensors.pop("image_newline")
    return LlavaNextParams(tile=llava.load_params(config.tile, tensors), newline_D=newline_D)


def item(config: LlavaNextVision, processed: Tensors) -> Tensors:
    """One image's tiles, float [I, channels, S, S], and its size, int64 [2]: height, width."""
    pixels, size = processed["pixel_values"][0], processed["image_sizes"][0]
    llava.square_pixels(config.tile.tower, pixels)
    high, wide = tiles_of(config, size)
    if len(pixels) != 1 + high * wide:
        raise RequestError(
            f"the image processor made {len(pixels)} tiles of an image of {tuple(size.tolist())}, "
            f"but the model takes 1 + {high} x {wide}: its option image_grid_pinpoints must be "
            "the model's"
        )
    return {"pixel_values": pixels, "image_sizes": size}


def tiles_of(config: LlavaNextVision, size_2: Tensor) -> tuple[int, int]:
    """Rows and columns of tiles for an image of this height and width."""
    height, width = select_best_resolution(size_2.tolist(), list(config.resolutions))
    side = config.tile.tower.image_size
    return height // side, width // side


def kept(config: LlavaNextVision, size_2: Tensor) -> tuple[int, int, int, int]:
    """Which rows and columns of the joined tiles show the image, without what pads it:
    first and last + 1 row, first and last + 1 column."""
    tiles = tiles_of(config, size_2)
    high, wide = (n * config.tile_side for n in tiles)
    h, w = size_2.tolist()
    if w / h > wide / high:
        border = (high - int(round(h * (wide / w), 7))) // 2
        return border, high - border, 0, wide
    border = (wide - int(round(w * (high / h), 7))) // 2
    return 0, high, border, wide - border


def placeholder(config: LlavaNextVision, item: Tensors, words: Words) -> tuple[np.ndarray, None]:
    top, bottom, left, right = kept(config, item["image_sizes"])
    unpadded = (bottom - top) * (right - left + 1)  # each row ends with a newline
    return marker_ids(config.tile.marker, config.tile.num_rows + unpadded), None


def encode(
    params: LlavaNextParams,
    config: LlavaNextVision,
    items: Sequence[Tensors],
    adapters: ItemAdapters | None = None,
) -> list[Tensor]:
    """Tiles are of one shape, so all of them run together."""
    if not items:
        return []
    counts = [len(item["pixel_values"]) for item in items]
    pixels = torch.cat([item["pixel_values"] for item in items])
    own = of_parts(adapters, counts)
    tiles = llava.features(params.tile, config.tile, pixels, own).split(counts)
    return [
        joined(params, config, rows, item["image_sizes"])
        for rows, item in zip(tiles, items, strict=True)
    ]


def joined(
    params: LlavaNextParams, config: LlavaNextVision, tile_IED: Tensor, size_2: Tensor
) -> Tensor:
    """The rows of one item: the overview's, then the image's line by line."""
    g = config.tile_side
    whole = tile_IED[1:].unflatten(1, (g, g)).unflatten(0, tiles_of(config, size_2))
    whole = whole.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    top, bottom, left, right = kept(config, size_2)
    lines = whole[top:bottom, left:right]
    lines = torch.cat((lines, params.newline_D.expand(len(lines), 1, -1)), dim=1)
    return torch.cat((tile_IED[0], lines.flatten(0, 1)))


def largest(config: LlavaNextVision, settings: Mapping[str, Any]) -> Tensors:
    tower = config.tile.tower
    high, wide = max(config.resolutions, key=lambda r: (r[0] * r[1], r[0]))
    count = 1 + (high // tower.image_size) * (wide // tower.image_size)
    return {
        "pixel_values": torch.zeros(count, tower.num_channels, tower.image_size, tower.image_size),
        "image_sizes": torch.tensor([high, wide]),
    }


LLAVA_NEXT = VisionFamily(
    read_config=read_config,
    shapes=shapes,
    unread=UNREAD,
    load_params=load_params,
    marker=lambda config: config.tile.marker,
    item=item,
    placeholder=placeholder,
    encode=encode,
    spare=lambda config: vit_spare(config.tile.tower),
    largest=largest,
    # thin images have all tiles and hardly more rows than the overview's
    heaviest=lambda config, settings, limit: as_many(
        largest(config, settings), config.tile.num_rows, limit
    ),
    working=lambda config, item: llava.working(config.tile, len(item["pixel_values"])),
)
