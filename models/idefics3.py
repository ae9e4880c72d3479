"""Idefics3 and SmolVLM: an image in square tiles and an overview of it, each in a place of its own.

I tiles of an item, the overview last, S their side, B tiles of all items, g patches a side of one,
s patches a side of what becomes one row, E rows of a tile, D hidden size of the language model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models.llava import square_pixels
from purestep.models.tower_rows import ItemAdapters, of_parts, spread
from purestep.models.vision import (
    Shapes,
    Tensors,
    VisionFamily,
    Words,
    as_many,
    owned_rows,
    woven,
)
from purestep.models.vit import (
    Affine,
    VitConfig,
    VitParams,
    affine,
    affine_of,
    affine_shapes,
    layer_norm,
    vit,
    vit_config,
    vit_params,
    vit_shapes,
    vit_working,
)
from purestep.state.errors import CheckpointError, RequestError
from purestep.state.pytree import tree

FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"
LONGEST = 4096  # pixels of an image's side, whatever the image processor is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Vision:
    tower: VitConfig
    scale: int  # s
    hidden_size: int  # of the language model
    marker: int

    @property
    def side(self) -> int:
        """Patches a side of a tile."""
        return self.tower.image_size // self.tower.patch_size

    @property
    def num_rows(self) -> int:
        """Of one tile."""
        return (self.side // self.scale) ** 2


@tree
class Idefics3Params:
    tower: VitParams
    norm: Affine
    projection: Affine


def read_config(hf: PretrainedConfig) -> Idefics3Vision:
    """Raises CheckpointError for what is not supported."""
    config = Idefics3Vision(
        tower=vit_config(hf.vision_config, -1),
        scale=hf.scale_factor,
        hidden_size=hf.text_config.hidden_size,
        marker=hf.image_token_id,
    )
    if config.scale < 1 or config.side % config.scale:
        raise CheckpointError(
            f"scale_factor {config.scale} must divide the {config.side} patches a side of a tile"
        )
    return config


def shapes(config: Idefics3Vision) -> Shapes:
    D, width = config.hidden_size, config.tower.hidden_size
    return (
        vit_shapes(config.tower)
        | affine_shapes("vision_tower.post_layernorm", width)
        | {"connector.modality_projection.proj.weight": (D, width * config.scale**2)}
    )


def load_params(config: Idefics3Vision, tensors: dict[str, Tensor]) -> Idefics3Params:
    norm = affine_of(tensors, "vision_tower.post_layernorm")
    projection = affine_of(tensors, "connector.modality_projection.proj")
    tower = vit_params(config.tower, tensors)
    table = tower.position_LD
    positions = whole_positions(config.side).to(table.device)
    tower = replace(tower, position_LD=table[positions])
    return Idefics3Params(tower=tower, norm=norm, projection=projection)


def whole_positions(side: int) -> Tensor:
    """The entry of the table that each patch of a full tile has: int64 [side * side].

    The tower puts a patch's place, a fraction of the tile, into one of `side` buckets. That is the
    place itself but for rounding, which the weights were trained with."""
    edges = torch.arange(1 / side, 1.0, 1 / side)
    place = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(
        max=1.0 - 1e-6
    )
    bucket = torch.bucketize(place, edges, right=True)
    return (bucket[:, None] * side + bucket).flatten()


def item(config: Idefics3Vision, processed: Tensors) -> Tensors:
    """One image's tiles, float [I, channels, S, S], and their grid, int64 [2]: rows, columns,
    zeros where the overview is alone."""
    pixels = square_pixels(config.tower, processed["pixel_values"][0])
    grid = torch.as_tensor([processed["rows"], processed["cols"]]).flatten()  # lists of lists
    if grid.shape != (2,) or len(pixels) != 1 + int(grid.prod()):
        raise RequestError(
            f"the image processor made {len(pixels)} tiles on a grid of {grid.tolist()}: one more "
            "than there are places are wanted"
        )
    return {"pixel_values": pixels, "grid": grid}


def placeholder(
    config: Idefics3Vision, item: Tensors, words: Words
) -> tuple[np.ndarray, np.ndarray]:
    """Every tile has its name before it, every line of them a line break behind it."""
    rows, cols = item["grid"].tolist()
    parts: list[int | Sequence[int]] = []
    for row in range(1, rows + 1):
        for col in range(1, cols + 1):
            parts += [words(FAKE), words(f"<row_{row}_col_{col}>"), config.num_rows]
        parts.append(words("\n" if row < rows else "\n\n"))
    parts += [words(FAKE), words(WHOLE), config.num_rows, words(FAKE)]
    return woven(config.marker, parts)


def encode(
    params: Idefics3Params,
    config: Idefics3Vision,
    items: Sequence[Tensors],
    adapters: ItemAdapters | None = None,
) -> list[Tensor]:
    """Tiles are of one shape, so all of them run together."""
    if not items:
        return []
    counts = [len(item["pixel_values"]) for item in items]
    pixels = torch.cat([item["pixel_values"] for item in items])
    rows_BED = features(params, config, pixels, of_parts(adapters, counts))
    return owned_rows(rows_BED.flatten(0, 1), [count * config.num_rows for count in counts])


def features(
    params: Idefics3Params,
    config: Idefics3Vision,
    pixels_BCSS: Tensor,
    adapters: ItemAdapters | None = None,
) -> Tensor:
    """The rows of tiles, s x s patches side by side in each: [B, E, D]. `adapters` are those of
    the tiles."""
    own = spread(adapters, [config.num_rows] * len(pixels_BCSS))
    x = vit(params.tower, config.tower, pixels_BCSS.to(params.projection.weight_OD), adapters)
    x = layer_norm(x, params.norm, config.tower.norm_eps)
    block = (config.side // config.scale, config.scale)
    x = x.unflatten(1, block + block).transpose(2, 3)
    return affine(x.flatten(3).flatten(1, 2), params.projection, own)


def largest(config: Idefics3Vision, settings: Mapping[str, Any]) -> Tensors:
    """Zeros of as many tiles as the image processor's settings allow."""
    tower, n = config.tower, 0
    if settings.get("do_image_splitting", True):
        size = settings.get("size") or {"longest_edge": 4 * tower.image_size}
        edge = max(size.get(name) or 0 for name in ("longest_edge", "height", "width"))
        # The shorter side is made even, which may make it the longer one.
        n = -(-(min(edge, LONGEST) + 1) // tower.image_size)
        n = n if n > 1 else 0
    tile = (tower.num_channels, tower.image_size, tower.image_size)
    return {"pixel_values": torch.zeros(1 + n * n, *tile), "grid": torch.tensor([n, n])}


def heaviest(config: Idefics3Vision, settings: Mapping[str, Any], limit: int) -> list[Tensors]:
    """Tiles cost the same whichever picture they belong to."""
    item = largest(config, settings)
    tile = {"pixel_values": item["pixel_values"][:1], "grid": torch.tensor([0, 0])}
    return as_many(tile, config.num_rows, limit)


def working(config: Idefics3Vision, item: Tensors) -> int:
    """Numbers that encoding an item holds at a time."""
    tiles = len(item["pixel_values"])
    return vit_working(config.tower, tiles, config.num_rows, config.hidden_size)


IDEFICS3 = VisionFamily(
    read_config=read_config,
    shapes=shapes,
    unread=r"vision_tower\.embeddings\.position_ids",
    load_params=load_params,
    marker=lambda config: config.marker,
    item=item,
    placeholder=placeholder,
    encode=encode,
    largest=largest,
    heaviest=heaviest,
    working=working,
)
