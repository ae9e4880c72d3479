"""Rotary position embedding, rotate-half layout.

T tokens, N heads, H head size, C channels of a head that turn (all of them, but for Phi-3 models
with a partial rotary factor), i one of the C / 2 pairs.
"""

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from purestep.models.config import RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


def rope_for_context(rope: RopeConfig, max_context: int) -> RopeConfig:
    """The embedding of an engine whose requests have up to `max_context` tokens.

    Only longrope depends on it: the long factors beyond `original_max_position`, else the short
    ones, once for all requests. transformers chooses anew in every call, by its length; cached keys
    cannot follow that, so the two agree for lengths on the side of `original_max_position` that
    `max_context` is on.
    """
    long = rope.kind == "longrope" and max_context > rope.original_max_position
    return replace(rope, long=long)


@cache
def inv_freq(rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each pair of channels: float32 [C / 2]. Shared, never written to.

    The kinds are those of transformers' `modeling_rope_utils`, whose order of float32 operations
    is kept, so that the values are equal bit for bit:

    default: theta^(-2i/C) (RoFormer, Su et al. 2021). linear: the same, divided by `factor`.
    llama3: wavelengths beyond original/low_freq_factor are stretched by `factor`, those below
    original/high_freq_factor are kept, a linear blend between. yarn (Peng et al. 2023): pairs that
    turn more than `beta_fast` times within the original context are kept, those that turn less
    than `beta_slow` times are stretched, a linear blend between. longrope (Ding et al. 2024): each
    pair is stretched by a factor of its own.

    Raises ValueError for another kind.
    """
    if rope.kind not in ROPE_KINDS:
        raise ValueError(f"rope kind {rope.kind!r} is not one of {ROPE_KINDS}")
    with torch.inference_mode(False):  # it outlives the call, and others may differentiate
        C = int(head_dim * rope.share)
        power = rope.theta ** (torch.arange(0, C, 2, dtype=torch.float32, device="cpu") / C)
        if rope.kind == "longrope":
            factors = rope.long_factors if rope.long else rope.short_factors
            power = torch.tensor(factors, dtype=torch.float32, device="cpu") * power
        freq = 1.0 / power
        if rope.kind == "linear":
            freq = freq / rope.factor
        if rope.kind == "llama3":
            freq = _llama3(rope, freq)
        if rope.kind == "yarn":
            freq = _yarn(rope, power)
        return freq.to(device)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blend = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > original / low, plain / rope.factor, blend)
    return torch.where(wavelength < original / high, plain, stretched)


def _yarn(rope: RopeConfig, power: Tensor) -> Tensor:
    num_pairs = len(power)
    first, last = (
        _pair_of(rope, turns, 2 * num_pairs) for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    last += 0.001 if first == last else 0.0
    pair = torch.arange(num_pairs, dtype=torch.float32, device="cpu")
    kept = 1 - ((pair - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * power) * (1 - kept) + 1.0 / power * kept


def _pair_of(rope: RopeConfig, turns: float, channels: int) -> float:
    """The pair, as a fraction, that turns this many times within the original context."""
    wavelength = rope.original_max_position / (turns * 2 * math.pi)
    return channels * math.log(wavelength) / (2 * math.log(rope.theta))


def rope_table(
    rope: RopeConfig,
    head_dim: int,
    position_T: Tensor,
    dtype: torch.dtype,
    position_3T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cos_TC and sin_TC of every token, computed in float32, once for all layers.

    With `position_3T` (M-RoPE: Qwen2-VL, Wang et al. 2024) the first `rope.sections[0]` pairs of
    channels turn by its first row, the next ones by the second, the last ones by the third; where
    they are interleaved (Qwen3-VL), pairs take turns, and the first row has those that are left.
    Where the three are equal, the values are those of `position_T`, bit for bit.
    """
    position = position_T[:, None]
    if position_3T is not None:
        row_of_pair = _row_of_pair(rope.sections, rope.interleaved, position_3T.device)
        position = position_3T[row_of_pair].T
    angle = position.float() * inv_freq(rope, head_dim, position_T.device)
    angle_TC = torch.cat((angle, angle), dim=-1)
    cos_TC, sin_TC = angle_TC.cos(), angle_TC.sin()
    return (cos_TC * rope.attention_factor).to(dtype), (sin_TC * rope.attention_factor).to(dtype)


@cache
def _row_of_pair(sections: tuple[int, ...], interleaved: bool, device: torch.device) -> Tensor:
    """Which of the three positions turns each pair of channels: int64 [C / 2]."""
    with torch.inference_mode(False):
        if interleaved:
            row = torch.zeros(sum(sections), dtype=torch.int64, device=device)
            for n in (1, 2):
                row[n : 3 * sections[n] : 3] = n
            return row
        return torch.arange(3, device=device).repeat_interleave(
            torch.tensor(sections, device=device)
        )


def apply_rope(x_TNH: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Turn channel pairs (i, i + C/2) of every head by the token's angles; the rest stays."""
    torch._check(cos_TC.shape[0] == x_TNH.shape[0])  # the compiler learns it here
    torch._check(sin_TC.shape[0] == x_TNH.shape[0])
    C = cos_TC.shape[1]
    x_TNC, rest = x_TNH[..., :C], x_TNH[..., C:]
    first, second = x_TNC.chunk(2, dim=-1)
    turned_TNC = torch.cat((-second, first), dim=-1)
    o_TNC = x_TNC * cos_TC[:, None] + turned_TNC * sin_TC[:, None]
    return torch.cat((o_TNC, rest), dim=-1) if x_TNH.shape[2] > C else o_TNC
