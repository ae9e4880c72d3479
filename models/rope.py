"""Rotary position embedding, rotate-half layout (Llama, Qwen2).

T tokens, N heads, H head size.
"""

import math

import torch
from torch import Tensor

from purestep.models.config import RopeConfig

ROPE_KINDS = ("default", "llama3")


def inv_freq(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of channels: float32 [head_dim / 2].

    default: theta^(-2i/H) (RoFormer, Su et al. 2021). llama3: wavelengths beyond
    original/low_freq_factor are stretched by `factor`, those below original/high_freq_factor are
    kept, a linear blend between (Llama 3.1; transformers `modeling_rope_utils`, whose order of
    float32 operations is kept, so that the values are equal bit for bit).
    Raises ValueError for another kind.
    """
    if rope.kind not in ROPE_KINDS:
        raise ValueError(f"rope kind {rope.kind!r} is not one of {ROPE_KINDS}")
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    return plain if rope.kind == "default" else _llama3(rope, plain)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blend = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > original / low, plain / rope.factor, blend)
    return torch.where(wavelength < original / high, plain, stretched)


def rope_table(inv_freq: Tensor, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos_TH and sin_TH of every token, computed in float32, once for all layers."""
    angle = position_T[:, None].float() * inv_freq
    angle_TH = torch.cat((angle, angle), dim=-1)
    return angle_TH.cos().to(dtype), angle_TH.sin().to(dtype)


def apply_rope(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + H/2) of every head by the token's angles."""
    torch._check(cos_TH.shape[0] == x_TNH.shape[0])  # the compiler learns it here
    torch._check(sin_TH.shape[0] == x_TNH.shape[0])
    first, second = x_TNH.chunk(2, dim=-1)
    turned_TNH = torch.cat((-second, first), dim=-1)
    return x_TNH * cos_TH[:, None] + turned_TNH * sin_TH[:, None]
