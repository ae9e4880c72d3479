"""What the towers of Qwen2-VL and Qwen2.5-VL share: patches of pictures of any size, in blocks of
merge x merge that become one row each.

S patches of several items, one behind the other, T steps in time of an item, L patches of one step
(h * w of them), E rows, D width of the tower, N heads, H head size, P values of a patch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models.vision import Tensors, marker_ids, owned_rows, working_numbers
from purestep.state.errors import CheckpointError, RequestError

Grid = tuple[int, int, int]  # T, h, w
Runs = tuple[tuple[int, int], ...]  # sequences one behind the other: how many, of what length

MAX_RATIO = 200  # of an image's sides: the image processor refuses beyond

# Pixels of an image where preprocessor_config.json does not limit them.
LIMITS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    num_channels: int
    temporal_size: int  # frames of one step
    patch_size: int
    merge_size: int
    rope_theta: float

    @property
    def num_values(self) -> int:
        return self.num_channels * self.temporal_size * self.patch_size**2


def read_patches(hf: PretrainedConfig) -> Patches:
    """From a vision_config. Raises CheckpointError for sizes that are no integers."""
    sizes = (hf.patch_size, hf.temporal_patch_size, hf.spatial_merge_size)
    if not all(isinstance(size, int) for size in sizes):
        raise CheckpointError(
            f"patch_size {sizes[0]}, temporal_patch_size {sizes[1]} and spatial_merge_size "
            f"{sizes[2]} of the vision tower must be integers"
        )
    return Patches(
        num_channels=hf.in_channels,
        temporal_size=hf.temporal_patch_size,
        patch_size=hf.patch_size,
        merge_size=hf.spatial_merge_size,
        rope_theta=float(hf.rope_parameters["rope_theta"]),
    )


def item(patches: Patches, processed: Tensors) -> Tensors:
    """One image's patches, float [T * L, P], and its grid, int64 [3]: T, h, w."""
    pixels, grid = processed["pixel_values"], processed["image_grid_thw"][0]
    t, h, w = grid.tolist()
    wanted = (t * h * w, patches.num_values)
    if pixels.shape != wanted or h % patches.merge_size or w % patches.merge_size:
        raise RequestError(
            f"the image processor made patches of shape {tuple(pixels.shape)} on a grid of "
            f"{(t, h, w)}, but the vision tower takes {wanted}, in blocks of {patches.merge_size}: "
            "its options for patch_size, temporal_patch_size and merge_size must be the model's"
        )
    return {"pixel_values": pixels, "image_grid_thw": grid}


def grid_of(item: Tensors) -> Grid:
    t, h, w = item["image_grid_thw"].tolist()
    return t, h, w


def placeholder(marker: int, patches: Patches, item: Tensors) -> tuple[np.ndarray, None]:
    return marker_ids(marker, math.prod(grid_of(item)) // patches.merge_size**2), None


def largest(patches: Patches, settings: Mapping[str, Any]) -> Tensors:
    """Zeros of at least as many patches as any image gets with these limits on pixels, by default
    the image processor's own."""
    return _blank(patches, _most_rows(patches, settings))


def heaviest(patches: Patches, settings: Mapping[str, Any], limit: int) -> list[Tensors]:
    """`limit` rows or some more, in as few items as can be, all of one shape."""
    count = max(-(-limit // _most_rows(patches, settings)), 1)
    return [_blank(patches, max(-(-limit // count), 1))] * count


def working(patches: Patches, item: Tensors, width: int, inner: int, hidden_size: int) -> int:
    """Numbers that encoding an item holds at a time."""
    tokens = len(item["pixel_values"])
    rows = tokens // patches.merge_size**2
    return working_numbers(tokens, width, inner, rows, hidden_size)


def _most_rows(patches: Patches, settings: Mapping[str, Any]) -> int:
    size = LIMITS | dict(settings.get("size") or {})
    least = settings.get("min_pixels") or size["shortest_edge"]
    most = settings.get("max_pixels") or size["longest_edge"]
    return most_rows(least, most, patches.patch_size * patches.merge_size)


def _blank(patches: Patches, rows: int) -> Tensors:
    high = next(n for n in range(math.isqrt(rows), 0, -1) if rows % n == 0)
    grid = torch.tensor([1, high * patches.merge_size, rows // high * patches.merge_size])
    pixels = torch.zeros(int(grid.prod()), patches.num_values)
    return {"pixel_values": pixels, "image_grid_thw": grid}


def most_rows(min_pixels: int, max_pixels: int, side: int) -> int:
    """A bound on the rows of an image, `side` the pixels of one row's side.

    The limits hold for usual shapes alone: the short side of a thin image is rounded up to one
    row, and what is below the minimum is enlarged, then rounded up on both sides."""
    rows = max(max_pixels // side**2, int(math.sqrt(MAX_RATIO * max_pixels) / side), 1)
    longest = math.sqrt(MAX_RATIO * min_pixels)
    for high in range(1, math.ceil(math.sqrt(min_pixels) / side) + 1):
        wide = longest if high == 1 else min(longest, min_pixels / ((high - 1) * side))
        rows = max(rows, high * math.ceil(wide / side))
    return rows


def encode_by_length(
    items: Sequence[Tensors],
    patches: Patches,
    features: Callable[[Tensor, Sequence[Grid]], Tensor],
) -> list[Tensor]:
    """Each item's own rows: all items go through `features` together, in an order in which
    sequences of equal length stand side by side."""
    if not items:
        return []
    grids, order = [grid_of(item) for item in items], length_order(items)
    pixels_SP = torch.cat([items[i]["pixel_values"] for i in order])
    counts = [math.prod(grids[i]) // patches.merge_size**2 for i in order]
    rows = owned_rows(features(pixels_SP, [grids[i] for i in order]), counts)
    return [own for _, own in sorted(zip(order, rows, strict=True), key=itemgetter(0))]


def length_order(items: Sequence[Tensors]) -> list[int]:
    """The items in the order in which `encode_by_length` lays them out."""
    grids = [grid_of(item) for item in items]
    return sorted(range(len(items)), key=lambda i: grids[i][1] * grids[i][2])


def runs_of(grids: Sequence[Grid]) -> Runs:
    """The sequences of items: each step in time is one."""
    groups = groupby(grids, key=lambda grid: grid[1] * grid[2])
    return tuple((sum(t for t, _, _ in group), length) for length, group in groups)


def block_order(patches: Patches, grids: Sequence[Grid], device: torch.device) -> Tensor:
    """Row and column of every patch in its picture, in the order in which they come: [2, S]."""
    m, places = patches.merge_size, []
    for t, h, w in grids:
        place = torch.arange(h * w, device=device).view(h // m, m, w // m, m)
        place = place.transpose(1, 2).flatten()
        places.append(torch.stack((place // w, place % w)).repeat(1, t))
    return torch.cat(places, dim=1)


def rotary(patches: Patches, head_dim: int, place_2S: Tensor) -> Tensor:
    """cos and sin, float32 [2, S, 1, H]: half of the pairs turn by the row, half by the column."""
    power = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=place_2S.device)
    frequency = 1.0 / patches.rope_theta ** (power / (head_dim // 2))
    angle = torch.cat([place[:, None].float() * frequency for place in place_2S], dim=-1)
    angle = torch.cat((angle, angle), dim=-1)[:, None]
    return torch.stack((angle.cos(), angle.sin()))


def turned(x_SNH: Tensor, rotary: Tensor) -> Tensor:
    """Turn pairs of channels (i, i + H/2) in float32, whatever the format."""
    cos, sin = rotary
    x = x_SNH.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_SNH.dtype)


def attend(q_SNH: Tensor, k_SNH: Tensor, v_SNH: Tensor, runs: Runs) -> Tensor:
    """Every patch sees the whole of its own sequence: [S, D]. Those of a run are one batch."""
    outputs, start = [], 0
    for count, length in runs:
        end = start + count * length
        q, k, v = (
            x[start:end].unflatten(0, (count, length)).transpose(1, 2)
            for x in (q_SNH, k_SNH, v_SNH)
        )
        o = F.scaled_dot_product_attention(q, k, v)
        outputs.append(o.transpose(1, 2).reshape(end - start, -1))
        start = end
    return torch.cat(outputs)
