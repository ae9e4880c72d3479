"""What the towers of Qwen2-VL and Qwen2.5-VL share: patches of pictures of any size, in blocks of
merge x merge that become one row each.

B items, T steps in time, L patches of one step (h * w of them), E rows, D width of the tower,
N heads, H head size, P values of a patch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models.vision import Tensors, marker_ids
from purestep.state.errors import CheckpointError, RequestError

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


def grid_of(item: Tensors) -> tuple[int, int, int]:
    t, h, w = item["image_grid_thw"].tolist()
    return t, h, w


def placeholder(marker: int, patches: Patches, item: Tensors) -> tuple[np.ndarray, None]:
    return marker_ids(marker, math.prod(grid_of(item)) // patches.merge_size**2), None


def largest(patches: Patches, settings: Mapping[str, Any]) -> Tensors:
    """Zeros of at least as many patches as any image gets with these limits on pixels, by default
    the image processor's own."""
    size = LIMITS | dict(settings.get("size") or {})
    least = settings.get("min_pixels") or size["shortest_edge"]
    most = settings.get("max_pixels") or size["longest_edge"]
    rows = most_rows(least, most, patches.patch_size * patches.merge_size)
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


def block_order(patches: Patches, h: int, w: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every patch of a step, in the order in which they come: [L] each."""
    m = patches.merge_size
    place = torch.arange(h * w, device=device).view(h // m, m, w // m, m)
    place = place.transpose(1, 2).flatten()
    return place // w, place % w


def rotary(patches: Patches, head_dim: int, row_L: Tensor, column_L: Tensor) -> Tensor:
    """cos and sin, float32 [2, L, 1, H]: half of the pairs turn by the row, half by the column."""
    power = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=row_L.device)
    frequency = 1.0 / patches.rope_theta ** (power / (head_dim // 2))
    angle = torch.cat([x[:, None].float() * frequency for x in (row_L, column_L)], dim=-1)
    angle = torch.cat((angle, angle), dim=-1)[:, None]
    return torch.stack((angle.cos(), angle.sin()))


def turned(x_BLNH: Tensor, rotary: Tensor) -> Tensor:
    """Turn pairs of channels (i, i + H/2) in float32, whatever the format."""
    cos, sin = rotary
    x = x_BLNH.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_BLNH.dtype)


def attend(q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor) -> Tensor:
    """Every token of a sequence sees all of it: [B, L, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
