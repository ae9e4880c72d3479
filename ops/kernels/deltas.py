"""Low-rank deltas of tokens with adapters, a tile of tokens of one adapter at a time.

T token rows, D input width, O output width, S slices of O, P paged adapter rows, E entries of the
step's adapters in chunks of 16, X tiles of I tokens, Z splits of D, whose fp32 addends lie one
after the other. Tokens without an adapter fill tiles of their own, which meet no adapter rows.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops import lora_linear
from purestep.ops.kernels.chain import chained, follow
from purestep.ops.lora_linear import Deltas, Shrunk, tile_size

CHUNK: tl.constexpr = tl.constexpr(lora_linear.CHUNK)


@triton.jit
def tile_of(token_ptr, span_ptr, piece, BLOCK_T: tl.constexpr, PIECES: tl.constexpr):
    """Tokens of a piece of a tile, which of them there are, first and last + 1 of its chunks."""
    t = tl.load(token_ptr + piece * BLOCK_T + tl.arange(0, BLOCK_T))
    span = span_ptr + 2 + piece // PIECES * 2
    return t.to(tl.int64), t >= 0, tl.load(span), tl.load(span + 1)


@triton.jit
def shrunk_of(h_row, here, at, row, h_slab, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Tokens times a chunk of their own rows of A: addends summed in a fixed order. Where a chunk
    has no row, zeros were written. Without addends (PARTS = 0) all rows of A are there, as they
    lie, and `row` are those of the chunk."""
    c = tl.arange(0, CHUNK) + at * CHUNK
    live = here[:, None]
    if PARTS == 0:
        c = row
        live &= (row >= 0)[None, :]
    h_ptrs = h_row[:, None] + c[None, :]
    if PARTS < 2:
        h = tl.load(h_ptrs, mask=live, other=0.0)
    else:  # one block, so that it changes its layout once, where each addend else would
        part = tl.arange(0, triton.next_power_of_2(PARTS))[:, None, None]
        there = live[None, :, :] & (part < PARTS)
        h = tl.sum(tl.load(h_ptrs[None, :, :] + part * h_slab, mask=there, other=0.0), 0)
    return h.to(DTYPE)


@triton.jit
def b_of(b_ptr, row, n, N, b_row, EVEN: tl.constexpr):
    """A chunk's rows of B, of outputs n < N of a slice."""
    mask = (row >= 0)[:, None]
    if not EVEN:
        mask &= (n < N)[None, :]
    return tl.load(b_ptr + row.to(tl.int64)[:, None] * b_row + n[None, :], mask=mask, other=0.0)


@triton.jit
def next_block(
    start, i, here, N, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Outputs of the block behind block i of a program, where a tile's tokens have them, and
    whether there is one."""
    n = start + (i + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    more = (i + 1 < BLOCKS) & (start + (i + 1) * BLOCK_N < N)
    live = (here & more)[:, None]
    if EVEN:
        n = tl.max_contiguous(tl.multiple_of(n, BLOCK_N), BLOCK_N)
    else:
        live &= (n < N)[None, :]
    return n, live, more


@triton.jit
def nothing(M: tl.constexpr, N: tl.constexpr):
    """Minus zeros, which change no bit of a sum. As bits: triton takes the sign off the literal."""
    return tl.full((M, N), -2147483648, tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T"])
def _shrink(
    x_ptr,
    a_ptr,
    h_ptr,
    row_ptr,
    span_ptr,
    token_ptr,
    T,
    D,
    P,
    h_width,
    part,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    tile, split = tl.program_id(0), tl.program_id(2)
    span = span_ptr + 2 + tile * 2
    low = tl.load(span)
    count = (tl.load(span + 1) - low) * CHUNK
    first = tl.program_id(1) * BLOCK_N
    if first >= S * count:
        return
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    t = tl.load(token_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T))
    c = first + n
    s, r = c // count, c % count
    live = c < S * count
    row = tl.load(row_ptr + low * CHUNK + r, mask=live, other=-1)
    known = row >= 0
    a_ptrs = a_ptr + (s * P + row).to(tl.int64)[None, :] * D + d[:, None]
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * D + d[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for at in range(split * part, tl.minimum(D, (split + 1) * part), BLOCK_D):
        if EVEN:
            x = tl.load(x_ptrs + at, mask=(t >= 0)[:, None], other=0.0)
            a = tl.load(a_ptrs + at, mask=known[None, :], other=0.0)
        else:
            inside = at + d < D
            x = tl.load(x_ptrs + at, mask=(t >= 0)[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_ptrs + at, mask=known[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision=PRECISION)
    place = s * (h_width // S) + low * CHUNK + r
    h_at = (split * T + t).to(tl.int64)[:, None] * h_width + place[None, :]
    tl.store(h_ptr + h_at, acc, mask=live[None, :] & (t >= 0)[:, None])


@triton.jit
def _expand(
    y_ptr,
    h_ptr,
    b_ptr,
    row_ptr,
    span_ptr,
    token_ptr,
    O,  # noqa: E741
    y_row,
    h_row,
    h_slab,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """BLOCKS blocks of outputs one after the other: what the next one reads is on its way while the
    present one is computed, and its tokens' products with a first chunk of A stay."""
    follow(CHAINED)
    first = tl.load(token_ptr + tl.program_id(1) * BLOCK_T)
    t, here, low, high = tile_of(token_ptr, span_ptr, tl.program_id(1), BLOCK_T, PIECES)
    if first < 0:  # unused
        return
    adapted = low < high
    if ADD:
        if not adapted:
            return
    start = tl.program_id(0) * BLOCKS * BLOCK_N
    n = start + tl.arange(0, BLOCK_N)
    live = here[:, None]
    if EVEN:  # said, so that accesses are 16 bytes wide
        n = tl.max_contiguous(tl.multiple_of(n, BLOCK_N), BLOCK_N)
    else:
        live &= (n < O)[None, :]
    h_of_t = h_ptr + t * h_row
    row = tl.load(row_ptr + tl.arange(0, CHUNK) + low * CHUNK, mask=adapted, other=-1)
    h = shrunk_of(h_of_t, here & adapted, low, row, h_slab, PARTS, DTYPE)
    next_b = b_of(b_ptr, row, n, O, O, EVEN)
    y_of_t = y_ptr + (t * y_row)[:, None]
    if ADD:
        next_y = tl.load(y_of_t + n[None, :], mask=live, other=0.0)
    for i in range(tl.minimum(BLOCKS, tl.cdiv(O - start, BLOCK_N))):
        now, live_now, b = n, live, next_b
        acc = nothing(BLOCK_T, BLOCK_N)
        if ADD:
            acc = next_y.to(tl.float32)
        if BLOCKS > 1:
            n, live, more = next_block(start, i, here, O, BLOCKS, BLOCK_N, EVEN)
            next_b = b_of(b_ptr, tl.where(more, row, -1), n, O, O, EVEN)
            if ADD:
                next_y = tl.load(y_of_t + n[None, :], mask=live, other=0.0)
        if adapted:
            acc = tl.dot(h, b, acc, input_precision=PRECISION)
        for at in range(low + 1, high):
            row_c = tl.load(row_ptr + tl.arange(0, CHUNK) + at * CHUNK)
            h_c = shrunk_of(h_of_t, here, at, row_c, h_slab, PARTS, DTYPE)
            b = b_of(b_ptr, row_c, now, O, O, EVEN)
            acc = tl.dot(h_c, b, acc, input_precision=PRECISION)
        tl.store(y_of_t + now[None, :], acc.to(DTYPE) if ADD else acc, mask=live_now)


def h_shape(deltas: Deltas) -> tuple[int, int]:
    """(S, S E): slices, and how many numbers a token's products with all rows of A are."""
    S = deltas.a_SPD.shape[0]
    return S, S * len(deltas.row_E)


def shrink(x_TD: Tensor, deltas: Deltas) -> Tensor:
    """x A^T for every token's own rows, as fp32 addends [Z, T, S E]; the rest is unwritten."""
    (T, D), (S, h_width), wide = x_TD.shape, h_shape(deltas), x_TD.dtype == torch.float32
    X, BLOCK_T = deltas.token_XI.shape
    BLOCK_N, BLOCK_D, Z, warps, stages = shrink_shape(T, D, S, wide)
    part = triton.cdiv(triton.cdiv(D, Z), BLOCK_D) * BLOCK_D
    h = torch.empty((Z, T, h_width), dtype=torch.float32, device=x_TD.device)
    _shrink[(X, triton.cdiv(h_width, BLOCK_N), Z)](
        x_TD,
        deltas.a_SPD,
        h,
        deltas.row_E,
        deltas.span_X2,
        deltas.token_XI,
        T,
        D,
        deltas.a_SPD.shape[1],
        h_width,
        part,
        S=S,
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        EVEN=D % BLOCK_D == 0,
        PRECISION="ieee" if wide else "tf32",
        num_warps=warps,
        num_stages=stages,
        **chained(x_TD, T),
    )
    return h


def shrink_shape(T: int, D: int, S: int, wide: bool) -> tuple[int, int, int, int, int]:
    """(BLOCK_N, BLOCK_D, splits, warps, stages), by what was fastest on an H200, for adapters of
    rank 16 columns of all slices at once: at 8,448 tokens of Llama 8B qkv 31 us, out 25, gate_up
    27, down 66 (67 with twice the columns)."""
    if wide:
        return 64, 32, 8 if T <= 512 and D >= 2048 else 1, 4, 2
    if T <= 512:  # each addend costs the reader, so 4 are faster than 8, though not here
        return 32, 128, 4 if D >= 2048 else 1, 4, 4
    return (16, 128, 1, 4, 4) if S == 1 else (32, 128, 1, 4, 4) if S == 2 else (64, 128, 1, 4, 3)


def h_start(y: Tensor, shrunk: Shrunk) -> Tensor:
    """Where a token's products with rows of A begin: behind its others, where they were made
    together."""
    return shrunk.h if len(shrunk.h) else y[:, shrunk.deltas.b_PO.shape[1] :]


def h_strides(y: Tensor, shrunk: Shrunk) -> tuple[int, int, int]:
    """From a token's to the next one's, from addend to addend, from slice to slice."""
    h, a_SPD = shrunk.h, shrunk.deltas.a_SPD
    if not len(h):
        return y.stride(0), 0, a_SPD.shape[1]
    return h.stride(1), h.stride(0), h.shape[2] // a_SPD.shape[0]


def expand_(y: Tensor, shrunk: Shrunk, dtype: torch.dtype) -> None:
    """Add deltas to a product of one slice, y [T, O or more]; or fill the last of addends
    [n, T, O] with them, and with minus zero for tokens that have none."""
    deltas = shrunk.deltas
    O, add, wide = deltas.b_PO.shape[1], y.dim() == 2, dtype == torch.float32  # noqa: E741
    X, size = deltas.token_XI.shape
    BLOCK_T, BLOCK_N, BLOCKS, warps = expand_shape(y.shape[-2], wide)
    PIECES = size // BLOCK_T
    _expand[(triton.cdiv(O, BLOCK_N * BLOCKS), X * PIECES)](
        y if add else y[-1],
        h_start(y, shrunk),
        deltas.b_PO,
        deltas.row_E,
        deltas.span_X2,
        deltas.token_XI,
        O,
        y.stride(-2),
        *h_strides(y, shrunk)[:2],
        PARTS=len(shrunk.h),
        ADD=add,
        BLOCK_T=BLOCK_T,
        PIECES=PIECES,
        BLOCK_N=BLOCK_N,
        BLOCKS=BLOCKS,
        EVEN=O % BLOCK_N == 0,
        DTYPE=FORMATS[dtype],
        PRECISION="ieee" if wide else "tf32",
        num_warps=warps,
        num_stages=1,  # loops are short, and the pipeliner of triton 3.6 fails on this one
        **chained(y, y.shape[-2]),
    )


def add_slices_(y_TO: Tensor, x_TD: Tensor, deltas: Deltas, out_sizes: Sequence[int]) -> None:
    """Add deltas to a product of slices `out_sizes`, each as a product of one slice."""
    if len(out_sizes) == 1:
        expand_(y_TO, Shrunk(shrink(x_TD, deltas), deltas), x_TD.dtype)
        return
    slices = y_TO.split_with_sizes(list(out_sizes), 1)
    rows = deltas.a_SPD, deltas.b_PO.split_with_sizes(list(out_sizes), 1)
    for y_To, a_PD, b_Po in zip(slices, *rows, strict=True):
        own, sum_To = deltas._replace(a_SPD=a_PD[None], b_PO=b_Po.contiguous()), y_To.contiguous()
        expand_(sum_To, Shrunk(shrink(x_TD, own), own), x_TD.dtype)
        y_To.copy_(sum_To)


def expand_shape(T: int, wide: bool) -> tuple[int, int, int, int]:
    """(BLOCK_T, BLOCK_N, BLOCKS, warps), by what was fastest on an H200: 8,448 tokens and 4,096
    outputs take 49 us, whole tiles of 64 tokens one block at a time 56; 256 rows 3.4 us."""
    if wide:
        return 16, 32, 1, 4
    if tile_size(T) > 16:
        return 16, 128, 4, 2
    return (16, 128, 1, 4) if T <= 64 else (16, 128, 1, 2)


FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
