"""Products with weights for few tokens, and low-rank deltas for any number of them.

T token rows, D input width, O output width, S slices of O, P paged adapter rows in chunks of 16,
C chunks of the step, Z splits of D, whose fp32 addends lie one after the other.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops import lora_linear

CHUNK: tl.constexpr = tl.constexpr(lora_linear.CHUNK)
TILE: tl.constexpr = tl.constexpr(lora_linear.TILE)


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
    chunk_ptr,
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
):
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
            low = tl.load(span_ptr)
            count = (tl.load(span_ptr + 1) - low) * CHUNK
            c = (tile - num_tiles) * BLOCK_N + n
            if (tile - num_tiles) * BLOCK_N < S * count:
                s, r = c // count, c % count
                live = c < S * count
                chunk = tl.load(chunk_ptr + low + r // CHUNK, mask=live, other=0)
                row = chunk * CHUNK + r % CHUNK
                live &= row < P
                rows = a_ptr + (s * P + row).to(tl.int64) * D
                acc = _narrow(
                    x_ptr, rows, live, T, D, start, stop,
                    BLOCK_T, BLOCK_N, BLOCK_D, EVEN, PRECISION,
                )  # fmt: skip
                place = s * (h_width // S) + low * CHUNK + r
                h_at = (split * T + t)[None, :] * h_width + place[:, None]
                tl.store(h_ptr + h_at, acc, mask=(c < S * count)[:, None] & (t < T)[None, :])


@triton.jit(do_not_specialize=["T"])
def _shrink(
    x_ptr,
    a_ptr,
    h_ptr,
    chunk_ptr,
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
    PRECISION: tl.constexpr,
):
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
    row = tl.load(chunk_ptr + low + r // CHUNK, mask=live, other=0) * CHUNK + r % CHUNK
    known = live & (row < P)
    a_ptrs = a_ptr + (s * P + row).to(tl.int64)[None, :] * D + d[:, None]
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * D + d[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for at in range(split * part, tl.minimum(D, (split + 1) * part), BLOCK_D):
        inside = at + d < D
        x = tl.load(x_ptrs + at, mask=(t >= 0)[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_ptrs + at, mask=known[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision=PRECISION)
    place = s * (h_width // S) + low * CHUNK + r
    h_at = (split * T + t).to(tl.int64)[:, None] * h_width + place[None, :]
    tl.store(h_ptr + h_at, acc, mask=live[None, :] & (t >= 0)[:, None])


@triton.jit
def _rows(chunk_ptr, owner_ptr, slot, at, high, P, BLOCK_R: tl.constexpr):
    """The adapter rows of some chunks, which of them have an owner, and which are a token's own."""
    r = tl.arange(0, BLOCK_R)
    live = at + r // CHUNK < high
    row = tl.load(chunk_ptr + at + r // CHUNK, mask=live, other=0) * CHUNK + r % CHUNK
    live &= row < P
    owner = tl.load(owner_ptr + row, mask=live, other=-1)
    used = live & (owner >= 0)
    return row, used, (owner[None, :] == slot[:, None]) & used[None, :]


@triton.jit
def _shrunk(h_ptrs, inside, own, h_slab, PARTS: tl.constexpr):
    """Tokens times their own rows of A: addends summed in order, zero for foreign rows, which are
    read all the same: a mask by element would make every access 4 bytes wide."""
    h = tl.load(h_ptrs, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        h += tl.load(h_ptrs + part * h_slab, mask=inside, other=0.0)
    return tl.where(own, h, 0.0)


@triton.jit(do_not_specialize=["T"])
def _expand(
    y_ptr,
    h_ptr,
    b_ptr,
    chunk_ptr,
    owner_ptr,
    slot_ptr,
    span_ptr,
    token_ptr,
    T,
    P,
    O,  # noqa: E741
    h_width,
    ranks,
    h_slab,
    S: tl.constexpr,
    O0: tl.constexpr,
    O1: tl.constexpr,
    O2: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
    SUBS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, pid = tl.program_id(1), tl.program_id(0)
    WIDTH: tl.constexpr = BLOCK_N * SUBS
    tiles0: tl.constexpr = (O0 + WIDTH - 1) // WIDTH
    tiles1: tl.constexpr = (O1 + WIDTH - 1) // WIDTH
    s, first, width = 0, 0, O0
    if pid >= tiles0 + tiles1:
        s, first, width, pid = 2, O0 + O1, O2, pid - tiles0 - tiles1
    elif pid >= tiles0:
        s, first, width, pid = 1, O0, O1, pid - tiles0
    r = tl.arange(0, BLOCK_R)
    span = span_ptr
    if ADD:
        span += 2 + tile * 2
    low, high = tl.load(span), tl.load(span + 1)
    if ADD:
        t = tl.load(token_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T))
        here = t >= 0
    else:
        t = tl.arange(0, BLOCK_T)
        here = t < T
    slot = tl.load(slot_ptr + t, mask=here, other=-1)
    mine = (slot >= 0)[:, None]
    row, used, own = _rows(chunk_ptr, owner_ptr, slot, low, high, P, BLOCK_R)
    if ADD:
        if low >= high:
            return
    h_row = h_ptr + t.to(tl.int64)[:, None] * h_width + (s * ranks + r)[None, :]
    inside_h = here[:, None] & (low * CHUNK + r < ranks)[None, :]
    h = _shrunk(h_row + low * CHUNK, inside_h, own, h_slab, PARTS).to(DTYPE)
    for i in range(tl.minimum(SUBS, tl.cdiv(width - pid * WIDTH, BLOCK_N))):
        n = pid * WIDTH + i * BLOCK_N + tl.arange(0, BLOCK_N)
        column = first + n
        y_mask, b_mask = here[:, None] & (n < width)[None, :], used[:, None] & (n < width)[None, :]
        if EVEN:  # said, so that accesses are 16 bytes wide
            column = tl.max_contiguous(tl.multiple_of(column, BLOCK_N), BLOCK_N)
            y_mask, b_mask = here[:, None], used[:, None]
        y_ptrs = y_ptr + t.to(tl.int64)[:, None] * O + column[None, :]
        if ADD:
            y = tl.load(y_ptrs, mask=y_mask, other=0.0).to(tl.float32)
        b_n = b_ptr + column[None, :]
        b = tl.load(b_n + row.to(tl.int64)[:, None] * O, mask=b_mask, other=0.0)
        acc = tl.dot(h, b, input_precision=PRECISION)
        for at in range(low + BLOCK_R // CHUNK, high, BLOCK_R // CHUNK):
            more, used_too, own_too = _rows(chunk_ptr, owner_ptr, slot, at, high, P, BLOCK_R)
            inside_h = here[:, None] & (at * CHUNK + r < ranks)[None, :]
            g = _shrunk(h_row + at * CHUNK, inside_h, own_too, h_slab, PARTS).to(DTYPE)
            b_mask = used_too[:, None]
            if not EVEN:
                b_mask &= (n < width)[None, :]
            b = tl.load(b_n + more.to(tl.int64)[:, None] * O, mask=b_mask, other=0.0)
            acc = tl.dot(g, b, acc, input_precision=PRECISION)
        if ADD:
            tl.store(y_ptrs, (y + acc).to(DTYPE), mask=y_mask)
        else:
            # Minus zero changes no bit of a sum. As bits: triton takes the sign off the literal.
            zero = tl.full((BLOCK_T, BLOCK_N), -2147483648, tl.int32).to(tl.float32, bitcast=True)
            tl.store(y_ptrs, tl.where(mine, acc, zero), mask=y_mask)


def skinny(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    lora: Sequence[Tensor] | None,
    out_sizes: Sequence[int],
    out: Tensor | None = None,
    shape: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """x W^T + bias and deltas for up to 64 tokens, as fp32 addends [Z (+ 1), T, O].

    `lora` is the fields of a `Deltas`. Without it and with one split the result is [T, O] in
    `out`'s format. `shape` is (BLOCK_N, BLOCK_D, splits, warps, stages).
    """
    (T, D), O = x_TD.shape, w_OD.shape[0]  # noqa: E741
    BLOCK_N, BLOCK_D, Z, warps, stages = shape or skinny_shape(T, O, D)
    BLOCK_T, S = max(16, triton.next_power_of_2(T)), len(out_sizes)
    wide = x_TD.dtype == torch.float32
    part = triton.cdiv(triton.cdiv(D, Z), BLOCK_D) * BLOCK_D
    if out is None:
        lone = Z == 1 and lora is None
        parts = (T, O) if lone else (Z + (lora is not None), T, O)
        out = torch.empty(parts, dtype=x_TD.dtype if lone else torch.float32, device=x_TD.device)
    num_tiles, extra, P, h_width = triton.cdiv(O, BLOCK_N), 0, 0, 0
    a_SPD = h = chunk_C = span_X2 = out
    if lora is not None:
        a_SPD, _, chunk_C, _, _, span_X2, _ = lora
        P, h_width = a_SPD.shape[1], S * len(chunk_C) * CHUNK.value
        extra = triton.cdiv(h_width, BLOCK_N)
        h = torch.empty((Z, T, h_width), dtype=torch.float32, device=x_TD.device)
    _skinny[(num_tiles + extra, Z)](
        x_TD,
        w_OD,
        out if bias_O is None else bias_O,
        out,
        a_SPD,
        h,
        chunk_C,
        span_X2,
        T,
        O,
        D,
        P,
        num_tiles,
        h_width,
        part,
        S=S,
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        EVEN=part * Z == D,
        LORA=lora is not None,
        BIAS=bias_O is not None,
        PRECISION="ieee" if wide else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    if lora is not None:
        expand_(out[Z], h, lora, out_sizes, add=False, dtype=x_TD.dtype)
    return out


def skinny_shape(T: int, O: int, D: int) -> tuple[int, int, int, int, int]:  # noqa: E741
    """(BLOCK_N, BLOCK_D, splits, warps, stages), by what was fastest on an H200.

    Microseconds at 1 row for Llama 8B, cuBLAS in brackets: qkv 14.3 (17.6), out 10.3 (12.9),
    gate_up 58 (63), down 29.8 (31.8), head 234 (276).
    """
    if O >= 16384:
        return (64, 128, 1, 4, 4) if T <= 16 else (128, 64, 1, 8, 4)
    splits = 2 if O > 5120 and D < 8192 else 4
    while splits > 1 and D // splits < 256:
        splits //= 2
    return (64, 128, splits, 4, 3)


def add_deltas_(
    y_TO: Tensor, x_TD: Tensor, lora: Sequence[Tensor], out_sizes: Sequence[int]
) -> None:
    """Add every token's delta to `y_TO`, for any number of tokens."""
    a_SPD, _, chunk_C, _, _, span_X2, token_X = lora
    (T, D), (S, P, _) = x_TD.shape, a_SPD.shape
    if T == 0:
        return
    h_width, tiles, wide = (
        S * len(chunk_C) * CHUNK.value,
        len(span_X2) - 1,
        x_TD.dtype == torch.float32,
    )
    columns = triton.cdiv(h_width, 64)
    Z = 8 if tiles <= 24 and D >= 2048 else 1  # two values: each is a kernel to compile
    BLOCK_D = 32 if wide else 64
    part = triton.cdiv(triton.cdiv(D, Z), BLOCK_D) * BLOCK_D
    h = torch.empty((Z, T, h_width), dtype=torch.float32, device=x_TD.device)
    _shrink[(tiles, columns, Z)](
        x_TD,
        a_SPD,
        h,
        chunk_C,
        span_X2,
        token_X,
        T,
        D,
        P,
        h_width,
        part,
        S=S,
        BLOCK_T=TILE.value,
        BLOCK_N=64,
        BLOCK_D=BLOCK_D,
        PRECISION="ieee" if wide else "tf32",
        num_warps=4,
        num_stages=2 if wide else 4,
    )
    expand_(y_TO, h, lora, out_sizes, add=True, dtype=x_TD.dtype)


def expand_(
    y_TO: Tensor,
    h: Tensor,
    lora: Sequence[Tensor],
    out_sizes: Sequence[int],
    add: bool,
    dtype: torch.dtype,
) -> None:
    """y (+)= the shrunk tokens times their own rows of B; `h` is [Z, T, S C 16]."""
    _, b_PO, chunk_C, owner_P, slot_T, span_X2, token_X = lora
    (T, O), sizes = y_TO.shape, (*out_sizes, 0, 0)[:3]  # noqa: E741
    BLOCK_N = 32 if dtype == torch.float32 else 128 if add else 64
    BLOCK_T = TILE.value if add else max(16, triton.next_power_of_2(T))
    # More rows at a time where the tokens of all adapters are mixed; 128 make triton 3.6 fail.
    BLOCK_R = CHUNK.value * min(2 if add else 4, triton.next_power_of_2(len(chunk_C)))
    tiles = len(span_X2) - 1 if add else 1
    SUBS = 8 if T > 1024 else 2 if add else 1
    grid = (sum(triton.cdiv(size, BLOCK_N * SUBS) for size in sizes), tiles)
    _expand[grid](
        y_TO,
        h,
        b_PO,
        chunk_C,
        owner_P,
        slot_T,
        span_X2,
        token_X,
        T,
        b_PO.shape[0],
        O,
        h.shape[2],
        h.shape[2] // len(out_sizes),
        h.stride(0),
        S=len(out_sizes),
        O0=sizes[0],
        O1=sizes[1],
        O2=sizes[2],
        PARTS=h.shape[0],
        ADD=add,
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_N,
        BLOCK_R=BLOCK_R,
        DTYPE=FORMATS[dtype],
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        SUBS=SUBS,
        EVEN=all(size % BLOCK_N == 0 for size in sizes),
        num_warps=4,
        num_stages=1,  # loops are short, and the pipeliner of triton 3.6 fails on this one
    )


FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
