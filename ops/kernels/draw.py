"""A token of each row, drawn or the likeliest, and its logprob, in one pass over the logits.

S sampled rows, V vocabulary, B pieces of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _log(x):
    """The logarithm of positive normal numbers, right to the last digit or the one before it.
    Triton's own is not near 1, where the largest noise comes from. Coefficients are FreeBSD's."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) >> 23  # x = 2 ** power * (1 + f), 1 + f about 1
    f = (bits - (power << 23)).to(tl.float32, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    r = z * (0.6666666269302368 + w * 0.2849878668785095)
    r += w * (0.40000972151756287 + w * 0.24279078841209412)
    half, k = 0.5 * f * f, power.to(tl.float32)
    return s * (half + r) + k * 9.0580006145e-06 - half + f + k * 6.9313812256e-01


@triton.jit
def _high(a, b: tl.constexpr):
    return ((a.to(tl.uint64) * b) >> 32).to(tl.uint32)


@triton.jit
def _low(a, b: tl.constexpr):
    return (a.to(tl.uint64) * b).to(tl.uint32)


@triton.jit
def _noise(first, key, position, BLOCK: tl.constexpr):
    """`gumbel_noise` of the ids `first` to `first + BLOCK`, a multiple of four."""
    c0 = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    c1 = tl.zeros((BLOCK // 4,), tl.uint32) + position.to(tl.uint32)
    c2 = tl.zeros((BLOCK // 4,), tl.uint32)
    c3 = tl.zeros((BLOCK // 4,), tl.uint32)
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in tl.static_range(10):
        low, high = _low(c0, 0xD2511F53), _high(c0, 0xD2511F53)
        c0 = _high(c2, 0xCD9E8D57) ^ c1 ^ k0.to(tl.uint32)
        c1 = _low(c2, 0xCD9E8D57)
        c2 = high ^ c3 ^ k1.to(tl.uint32)
        c3 = low
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    bits = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (BLOCK,))
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -_log(-_log(uniform))


@triton.jit(do_not_specialize=["V"])
def _piece(
    logits_ptr,
    raw_ptr,
    temperature_ptr,
    stream_ptr,
    position_ptr,
    best_ptr,
    stat_ptr,
    V,
    EDITED: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A piece's best id and how good it is; of the raw logits the largest, the sum of exponentials,
    whether all are sound."""
    s, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperature_ptr + s)
    key, position = tl.load(stream_ptr + s), tl.load(position_ptr + s)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = piece * PIECE + lane
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    sound = tl.full((BLOCK,), 1, tl.int32)
    for start in range(0, PIECE, BLOCK):
        first = piece * PIECE + start
        v = first + lane
        live = v < V
        x = tl.load(raw_ptr + s * V + v, mask=live, other=float("-inf"))
        y = x
        if EDITED:
            y = tl.load(logits_ptr + s * V + v, mask=live, other=float("-inf"))
        if temperature > 0:
            y = tl.div_rn(y, temperature) + _noise(first, key, position, BLOCK)
        y = tl.where(y == y, y, float("inf"))  # such a row is in error; it needs some id
        higher = live & (y > best)
        best = tl.where(higher, y, best)
        place = tl.where(higher, v, place)
        finite = (x == x) & (tl.abs(x) != float("inf"))
        sound = tl.where(live & (finite == 0), 0, sound)
        new = tl.maximum(top, x)
        base = tl.where(new == float("-inf"), 0.0, new)
        mass = mass * tl.exp(top - base) + tl.exp(x - base)
        top = new
    at = s * pieces + piece
    highest = tl.max(best, 0)
    tl.store(best_ptr + at, tl.min(tl.where(best == highest, place, 2147483647), 0))
    most = tl.max(top, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(stat_ptr + at * 4, highest)
    tl.store(stat_ptr + at * 4 + 1, most)
    tl.store(stat_ptr + at * 4 + 2, tl.sum(mass * tl.exp(top - base), 0))
    tl.store(stat_ptr + at * 4 + 3, tl.min(sound, 0).to(tl.float32))


@triton.jit(do_not_specialize=["S", "V"])
def _join(raw_ptr, best_ptr, stat_ptr, out_ptr, S, V, B, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCK)
    at, live = s * B + b, b < B
    best = tl.load(stat_ptr + at * 4, mask=live, other=float("-inf"))
    top = tl.load(stat_ptr + at * 4 + 1, mask=live, other=float("-inf"))
    mass = tl.load(stat_ptr + at * 4 + 2, mask=live, other=0.0)
    sound = tl.load(stat_ptr + at * 4 + 3, mask=live, other=1.0)
    place = tl.load(best_ptr + at, mask=live, other=2147483647)
    token = tl.min(tl.where(best == tl.max(best, 0), place, 2147483647), 0)
    most = tl.max(top, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(mass * tl.exp(top - base), 0)
    own = tl.load(raw_ptr + s * V + token)
    logprob = tl.where(tl.min(sound, 0) > 0, own - most - tl.log(total), float("nan"))
    tl.store(out_ptr + s, token)
    tl.store(out_ptr + S + s, logprob.to(tl.int32, bitcast=True))


def launch(
    logits_SV: Tensor,
    raw_SV: Tensor,
    temperature_S: Tensor,
    stream_S: Tensor,
    position_S: Tensor,
) -> Tensor:
    """int32 [2, S]: ids drawn from `logits_SV`, or their likeliest where the temperature is 0, and
    the bits of their logprobs under `raw_SV`. Both float32, stream and position int64."""
    (S, V), device = logits_SV.shape, logits_SV.device
    PIECE = 4096
    B = triton.cdiv(V, PIECE)
    best_SB = torch.empty((S, B), dtype=torch.int32, device=device)
    stat_SB4 = torch.empty((S, B, 4), dtype=torch.float32, device=device)
    out_2S = torch.empty((2, S), dtype=torch.int32, device=device)
    _piece[(S, B)](
        logits_SV,
        raw_SV,
        temperature_S,
        stream_S,
        position_S,
        best_SB,
        stat_SB4,
        V,
        EDITED=logits_SV is not raw_SV,
        PIECE=PIECE,
        BLOCK=1024,
    )
    _join[(S,)](
        raw_SV, best_SB, stat_SB4, out_2S, S, V, B, BLOCK=triton.next_power_of_2(B), num_warps=1
    )
    return out_2S
