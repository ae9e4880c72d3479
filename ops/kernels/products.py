"""Products with weights for few tokens, and with the adapters' A in the same launch.

T token rows, D input width, O output width, S slices of O, P paged adapter rows, E entries of the
step's adapters in chunks of 16, Z splits of D, whose fp32 addends lie one after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops.kernels.chain import chained, follow
from purestep.ops.kernels.deltas import CHUNK, h_shape
from purestep.ops.lora_linear import Deltas

NUM_PROGRAMS = 264  # what an H200 runs at once: two on each multiprocessor


@triton.jit
def _narrow(
    x_ptr,
    row_N,
    live_N,
    T,
    D,
    start,
    stop,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc[n, t]: rows of a matrix, given by pointers, times tokens."""
    t, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    w_ptrs = row_N[:, None] + d[None, :]
    x_ptrs = x_ptr + t[None, :] * D + d[:, None]
    for at in range(start, stop, BLOCK_D):
        if EVEN:
            w = tl.load(w_ptrs + at, mask=live_N[:, None], other=0.0)
            x = tl.load(x_ptrs + at, mask=(t < T)[None, :], other=0.0)
        else:
            inside = at + d < stop
            w = tl.load(w_ptrs + at, mask=live_N[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptrs + at, mask=(t < T)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["T"])
def _skinny(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    a_ptr,
    h_ptr,
    row_ptr,
    span_ptr,
    T,
    O,  # noqa: E741
    D,
    P,
    num_tiles,
    h_width,
    part,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr,
    LORA: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    tile, split = tl.program_id(0), tl.program_id(1)
    n, t = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    start, stop = split * part, tl.minimum(D, (split + 1) * part)
    if tile < num_tiles:
        o = tile * BLOCK_N + n
        rows = w_ptr + o.to(tl.int64) * D
        acc = _narrow(
            x_ptr, rows, o < O, T, D, start, stop, BLOCK_T, BLOCK_N, BLOCK_D, EVEN, PRECISION
        )
        if BIAS:
            bias = tl.load(bias_ptr + o, mask=(o < O) & (split == 0), other=0.0).to(tl.float32)
            acc += bias[:, None]
        y_at = (split * T + t).to(tl.int64)[None, :] * O + o[:, None]
        tl.store(y_ptr + y_at, acc, mask=(o < O)[:, None] & (t < T)[None, :])
    if LORA:
        if tile >= num_tiles:
            count = tl.load(span_ptr + 1) * CHUNK
            c = (tile - num_tiles) * BLOCK_N + n
            if (tile - num_tiles) * BLOCK_N < S * count:
                s, r = c // count, c % count
                live = c < S * count
                row = tl.load(row_ptr + r, mask=live, other=-1)
                live &= row >= 0
                rows = a_ptr + (s * P + row).to(tl.int64) * D
                acc = _narrow(
                    x_ptr, rows, live, T, D, start, stop,
                    BLOCK_T, BLOCK_N, BLOCK_D, EVEN, PRECISION,
                )  # fmt: skip
                place = s * (h_width // S) + r
                h_at = (split * T + t)[None, :] * h_width + place[:, None]
                tl.store(h_ptr + h_at, acc, mask=(c < S * count)[:, None] & (t < T)[None, :])


def skinny(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: Deltas | None = None,
    room: bool = False,
    out: Tensor | None = None,
    shape: tuple[int, int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(y, h): x W^T + bias for up to 64 tokens as fp32 addends [Z, T, O], and x A^T for all rows of
    the step's adapters, [Z, T, S E].

    With `room` y has one addend more, unwritten. Without `deltas` there is no h, and one split
    gives y [T, O] in `out`'s format, else in x's. `shape` is (BLOCK_N, BLOCK_D, splits, warps,
    stages).
    """
    (T, D), O = x_TD.shape, w_OD.shape[0]  # noqa: E741
    S, h_width = (0, 0) if deltas is None else h_shape(deltas)
    BLOCK_N, BLOCK_D, Z, warps, stages = shape or skinny_shape(T, O, D, h_width)
    wide = x_TD.dtype == torch.float32
    part = triton.cdiv(triton.cdiv(D, Z), BLOCK_D) * BLOCK_D
    if out is None:
        lone = Z == 1 and deltas is None
        sizes = (T, O) if lone else (Z + room, T, O)
        out = torch.empty(sizes, dtype=x_TD.dtype if lone else torch.float32, device=x_TD.device)
    num_tiles = triton.cdiv(O, BLOCK_N)
    h = None
    if deltas is not None:
        h = torch.empty((Z, T, h_width), dtype=torch.float32, device=x_TD.device)
    _skinny[(num_tiles + triton.cdiv(h_width, BLOCK_N), Z)](
        x_TD,
        w_OD,
        out if bias_O is None else bias_O,
        out,
        out if deltas is None else deltas.a_SPD,
        out if h is None else h,
        out if deltas is None else deltas.row_E,
        out if deltas is None else deltas.span_X2,
        T,
        O,
        D,
        0 if deltas is None else deltas.a_SPD.shape[1],
        num_tiles,
        h_width,
        part,
        S=S,
        BLOCK_T=max(16, triton.next_power_of_2(T)),
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        EVEN=D % BLOCK_D == 0,
        LORA=deltas is not None,
        BIAS=bias_O is not None,
        PRECISION="ieee" if wide else "tf32",
        num_warps=warps,
        num_stages=stages,
        **chained(x_TD, T),
    )
    return out, h


def skinny_shape(T: int, O: int, D: int, h_width: int = 0) -> tuple[int, int, int, int, int]:  # noqa: E741
    """(BLOCK_N, BLOCK_D, splits, warps, stages), by what was fastest on an H200.

    Microseconds at 1 row for Llama 8B, cuBLAS in brackets: qkv 14.3 (17.6), out 10.3 (12.9),
    gate_up 58 (63), down 29.8 (31.8), head 234 (276). More programs than run at once would make
    the last ones a second round, which at 64 rows and 512 adapter rows cost as much as the rest.
    """
    if O >= 16384:
        return (64, 128, 1, 4, 4) if T <= 16 else (128, 64, 1, 8, 4)
    splits = 2 if O > 5120 and D < 8192 else 4
    while splits > 1 and D // splits < 256:
        splits //= 2
    if h_width and T > 16:
        tiles = triton.cdiv(O, 64) + triton.cdiv(h_width, 64)
        splits = max(1, min(splits, NUM_PROGRAMS // tiles))
    return (64, 128, splits, 4, 3)
