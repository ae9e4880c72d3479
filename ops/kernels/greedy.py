"""The largest logit of each row and its logprob, in one pass over the logits.

S sampled rows, V vocabulary, B pieces of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# On an H200 256 rows of 128,256 take 43 us, in a step 51 (a copy's rate would be 31), 8 rows 4.5.
PIECE = 2048


@triton.jit
def _piece(logits_ptr, best_ptr, stat_ptr, V, B, PIECE: tl.constexpr):
    """A piece's largest logit, its place, the sum of exponentials, whether all are sound."""
    at = tl.program_id(0)
    s, piece = (at // B).to(tl.int64), at % B
    v = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits_ptr + s * V + v, mask=v < V, other=float("-inf"))
    is_nan = x != x
    most = tl.max(tl.where(is_nan, float("inf"), x), 0)
    is_best = x == most
    if most == float("inf"):  # the first NaN wins, as in torch
        is_best = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, is_nan, is_best)
    best = tl.min(tl.where(is_best, v, 2147483647), 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.exp(x - base), 0)
    sound = (v >= V) | (tl.abs(x) < float("inf"))
    tl.store(best_ptr + at, best)
    tl.store(stat_ptr + at * 3, most)
    tl.store(stat_ptr + at * 3 + 1, total)
    tl.store(stat_ptr + at * 3 + 2, tl.min(sound.to(tl.int32), 0).to(tl.float32))


@triton.jit(do_not_specialize=["S"])
def _join(best_ptr, stat_ptr, out_ptr, S, B, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCK)
    live = b < B
    top = tl.load(stat_ptr + (s * B + b) * 3, mask=live, other=float("-inf"))
    mass = tl.load(stat_ptr + (s * B + b) * 3 + 1, mask=live, other=0.0)
    sound = tl.load(stat_ptr + (s * B + b) * 3 + 2, mask=live, other=1.0)
    place = tl.load(best_ptr + s * B + b, mask=live, other=2147483647)
    most = tl.max(top, 0)
    best = tl.min(tl.where(top == most, place, 2147483647), 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(mass * tl.exp(top - base), 0)
    logprob = tl.where(tl.min(sound, 0) > 0, -tl.log(total), float("nan"))
    tl.store(out_ptr + s, best)
    tl.store(out_ptr + S + s, logprob.to(tl.int32, bitcast=True))


def launch(logits_SV: Tensor) -> Tensor:
    (S, V), device = logits_SV.shape, logits_SV.device
    B = triton.cdiv(V, PIECE)
    best_SB = torch.empty((S, B), dtype=torch.int32, device=device)
    stat_SB3 = torch.empty((S, B, 3), dtype=torch.float32, device=device)
    out_2S = torch.empty((2, S), dtype=torch.int32, device=device)
    _piece[(S * B,)](logits_SV, best_SB, stat_SB3, V, B, PIECE=PIECE)
    _join[(S,)](best_SB, stat_SB3, out_2S, S, B, BLOCK=triton.next_power_of_2(B), num_warps=1)
    return out_2S
