"""Rotation and KV write, and the gated activation, where the product before has deltas to come:
they are added on the way, for a tile of tokens of one adapter, or a piece of it, at a time.

Arguments are those of `elementwise` and `deltas`; tokens without an adapter get the same.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops.kernels.chain import chained, follow
from purestep.ops.kernels.deltas import (
    CHUNK,
    FORMATS,
    b_of,
    h_start,
    h_strides,
    next_block,
    shrunk_of,
    tile_of,
)
from purestep.ops.kernels.elementwise import activated, turned
from purestep.ops.lora_linear import Shrunk, tile_size

ROPE_TOKENS = 16  # of a program of the rotation, a piece of a tile


@triton.jit
def _addend(ptr, slab, offset, mask, PARTS: tl.constexpr):
    """The product, fp32 where it has addends."""
    x = tl.load(ptr + offset, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(ptr + part * slab + offset, mask=mask, other=0.0)
    return x


@triton.jit
def _gated_mul(
    y_ptr,
    o_ptr,
    h_ptr,
    b_ptr,
    row_ptr,
    span_ptr,
    token_ptr,
    slab,
    F,
    y_row,
    h_row,
    h_slab,
    h_slice,
    PARTS: tl.constexpr,
    H_PARTS: tl.constexpr,
    GELU: tl.constexpr,
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
    n = tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * BLOCKS * BLOCK_N
    f = start + n
    live = here[:, None]
    if EVEN:
        f = tl.max_contiguous(tl.multiple_of(f, BLOCK_N), BLOCK_N)
    else:
        live &= (f < F)[None, :]
    at_y = t[:, None] * y_row + f[None, :]
    next_gate = _addend(y_ptr, slab, at_y, live, PARTS)
    next_up = _addend(y_ptr, slab, at_y + F, live, PARTS)
    h_of_t = h_ptr + t * h_row
    adapted = low < high
    row = tl.load(row_ptr + tl.arange(0, CHUNK) + low * CHUNK, mask=adapted, other=-1)
    h_gate = shrunk_of(h_of_t, here & adapted, low, row, h_slab, H_PARTS, DTYPE)
    h_up = shrunk_of(h_of_t + h_slice, here & adapted, low, row, h_slab, H_PARTS, DTYPE)
    next_b_gate = b_of(b_ptr, row, f, F, 2 * F, EVEN)
    next_b_up = b_of(b_ptr + F, row, f, F, 2 * F, EVEN)
    for i in range(tl.minimum(BLOCKS, tl.cdiv(F - start, BLOCK_N))):
        gate, up, b_gate, b_up = (
            next_gate.to(tl.float32),
            next_up.to(tl.float32),
            next_b_gate,
            next_b_up,
        )
        now, live_now = f, live
        f, live, more = next_block(start, i, here, F, BLOCKS, BLOCK_N, EVEN)
        at_y = t[:, None] * y_row + f[None, :]
        next_gate = _addend(y_ptr, slab, at_y, live, PARTS)
        next_up = _addend(y_ptr, slab, at_y + F, live, PARTS)
        next_row = tl.where(more, row, -1)
        next_b_gate = b_of(b_ptr, next_row, f, F, 2 * F, EVEN)
        next_b_up = b_of(b_ptr + F, next_row, f, F, 2 * F, EVEN)
        if adapted:
            gate = tl.dot(h_gate, b_gate, gate, input_precision=PRECISION)
            up = tl.dot(h_up, b_up, up, input_precision=PRECISION)
        for at in range(low + 1, high):
            row_c = tl.load(row_ptr + tl.arange(0, CHUNK) + at * CHUNK)
            c_gate = b_of(b_ptr, row_c, now, F, 2 * F, EVEN)
            c_up = b_of(b_ptr + F, row_c, now, F, 2 * F, EVEN)
            h = shrunk_of(h_of_t, here, at, row_c, h_slab, H_PARTS, DTYPE)
            gate = tl.dot(h, c_gate, gate, input_precision=PRECISION)
            h = shrunk_of(h_of_t + h_slice, here, at, row_c, h_slab, H_PARTS, DTYPE)
            up = tl.dot(h, c_up, up, input_precision=PRECISION)
        gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        out = (activated(gate, GELU, DTYPE) * up).to(DTYPE)
        tl.store(o_ptr + t[:, None] * F + now[None, :], out, mask=live_now)


def gated_shape(T: int, wide: bool) -> tuple[int, int, int, int, int | None]:
    """(BLOCK_T, BLOCK_N, BLOCKS, warps, registers of a thread), by what was fastest on an H200: for
    Llama 8B's MLP and 8 adapters at 256 rows 0.5 us over the base's, one block at a time 2 (with B
    in the cache; 5 in a step, where it is not); at 8,448 227 us (the base's 180), with pieces of 32
    tokens 230; at 8,192 these 236, whole tiles of 64 258, one block at a time 339."""
    if wide:
        return 16, 32, 1, 4, None
    if tile_size(T) > 16:
        return 16, 64, 8, 4, None
    if T > 64:
        return 16, 64, 4, 4, None
    return (16, 128, 1, 4, 64) if T <= 16 else (16, 128, 1, 2, 128)


def gated_mul(y: Tensor, dtype: torch.dtype, gelu: bool, shrunk: Shrunk) -> Tensor:
    deltas = shrunk.deltas
    T, F, wide = y.shape[-2], deltas.b_PO.shape[1] // 2, dtype == torch.float32
    o_TF = torch.empty((T, F), dtype=dtype, device=y.device)
    X, size = deltas.token_XI.shape
    BLOCK_T, BLOCK_N, BLOCKS, warps, registers = gated_shape(T, wide)
    PIECES = size // BLOCK_T
    _gated_mul[(triton.cdiv(F, BLOCK_N * BLOCKS), X * PIECES)](
        y,
        o_TF,
        h_start(y, shrunk),
        deltas.b_PO,
        *deltas[2:],
        T * 2 * F,
        F,
        y.stride(-2),
        *h_strides(y, shrunk),
        PARTS=y.shape[0] if y.dim() == 3 else 0,
        H_PARTS=len(shrunk.h),
        GELU=gelu,
        BLOCK_T=BLOCK_T,
        PIECES=PIECES,
        BLOCK_N=BLOCK_N,
        BLOCKS=BLOCKS,
        EVEN=F % BLOCK_N == 0,
        DTYPE=FORMATS[dtype],
        PRECISION="ieee" if wide else "tf32",
        num_warps=warps,
        num_stages=1,
        maxnreg=registers,
        **chained(y, T),
    )
    return o_TF


@triton.jit
def _scaled(x, scale, w_ptrs, mask, DTYPE: tl.constexpr):
    """Normed, rounded, times the weights, rounded."""
    w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)[None, :]
    return ((x * scale).to(DTYPE).to(tl.float32) * w).to(DTYPE).to(tl.float32)


@triton.jit
def _plus_chunk(
    x1, x2, rest, h, row_b, there, c, r,
    H: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A head's parts and what another chunk of an adapter's rows adds to them."""
    in_c, in_r = (c < C // 2)[None, :], (r < H - C)[None, :]
    b = tl.load(row_b + c[None, :], mask=there & in_c, other=0.0)
    x1 = tl.dot(h, b, x1, input_precision=PRECISION)
    b = tl.load(row_b + C // 2 + c[None, :], mask=there & in_c, other=0.0)
    x2 = tl.dot(h, b, x2, input_precision=PRECISION)
    if C < H:
        b = tl.load(row_b + C + r[None, :], mask=there & in_r, other=0.0)
        rest = tl.dot(h, b, rest, input_precision=PRECISION)
    return x1, x2, rest


@triton.jit
def _normed(
    x1, x2, rest, w_row, c, r, eps, H: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """A head's parts, normed together."""
    square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
    if C < H:
        square += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(square / H + eps)[:, None]
    x1 = _scaled(x1, scale, w_row + c, c < C // 2, DTYPE)
    x2 = _scaled(x2, scale, w_row + C // 2 + c, c < C // 2, DTYPE)
    if C < H:
        rest = _scaled(rest, scale, w_row + C + r, r < H - C, DTYPE)
    return x1, x2, rest


@triton.jit
def _rope_write(
    y_ptr,
    q_ptr,
    kv_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    index_ptr,
    h_ptr,
    b_ptr,
    row_ptr,
    span_ptr,
    token_ptr,
    slab,
    half,
    eps,
    y_row,
    h_row,
    h_slab,
    h_slice,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    H_PARTS: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """HEADS heads of one slice one after the other: what the next one reads is on its way while the
    present one turns, and angles and its tokens' products with a first chunk of A stay."""
    follow(CHAINED)
    first = tl.load(token_ptr + tl.program_id(1) * BLOCK_T)
    t, here, low, high = tile_of(token_ptr, span_ptr, tl.program_id(1), BLOCK_T, PIECES)
    if first < 0:  # unused
        return
    begin = tl.program_id(0) * HEADS
    # A head in three: the two halves that turn each other, and what does not turn.
    HALF: tl.constexpr = C // 2
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    in_c, in_r = (c < HALF)[None, :], (r < H - C)[None, :]
    live_c, live_r = here[:, None] & in_c, here[:, None] & in_r
    width: tl.constexpr = (N + 2 * K) * H
    at_y = (t * y_row + begin * H)[:, None] + c[None, :]
    next_x1 = _addend(y_ptr, slab, at_y, live_c, PARTS)
    next_x2 = _addend(y_ptr, slab, at_y + HALF, live_c, PARTS)
    place = tl.load(index_ptr + t, mask=here & (begin >= N), other=-1).to(tl.int64)
    slice_of = (begin >= N).to(tl.int32) + (begin >= N + K).to(tl.int32)
    h_of_t = h_ptr + t * h_row + slice_of * h_slice
    adapted = low < high
    row = tl.load(row_ptr + tl.arange(0, CHUNK) + low * CHUNK, mask=adapted, other=-1)
    shrunk = shrunk_of(h_of_t, here & adapted, low, row, h_slab, H_PARTS, DTYPE)
    b_row = b_ptr + (row.to(tl.int64) * width + begin * H)[:, None]
    known_c, known_r = (row >= 0)[:, None] & in_c, (row >= 0)[:, None] & in_r
    next_b1 = tl.load(b_row + c[None, :], mask=known_c, other=0.0)
    next_b2 = tl.load(b_row + HALF + c[None, :], mask=known_c, other=0.0)
    turns = begin < N + K
    at_cos = t[:, None] * C + c[None, :]
    cos1 = tl.load(cos_ptr + at_cos, mask=live_c & turns, other=1.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + at_cos, mask=live_c & turns, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + HALF + at_cos, mask=live_c & turns, other=1.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + HALF + at_cos, mask=live_c & turns, other=0.0).to(tl.float32)
    for i in range(HEADS):
        n = begin + i
        x1, x2 = next_x1.to(tl.float32), next_x2.to(tl.float32)
        rest, b1, b2 = x2, next_b1, next_b2  # where all turn there is no rest
        if C < H:
            at_rest = (t * y_row + n * H + C)[:, None] + r[None, :]
            rest = _addend(y_ptr, slab, at_rest, live_r, PARTS).to(tl.float32)
            b_rest = tl.load(b_row + i * H + C + r[None, :], mask=known_r, other=0.0)
        if HEADS > 1:
            more, ahead = i + 1 < HEADS, (i + 1) * H
            next_x1 = _addend(y_ptr, slab, at_y + ahead, live_c & more, PARTS)
            next_x2 = _addend(y_ptr, slab, at_y + ahead + HALF, live_c & more, PARTS)
            next_b1 = tl.load(b_row + ahead + c[None, :], mask=known_c & more, other=0.0)
            next_b2 = tl.load(b_row + ahead + HALF + c[None, :], mask=known_c & more, other=0.0)
        if adapted:
            x1 = tl.dot(shrunk, b1, x1, input_precision=PRECISION)
            x2 = tl.dot(shrunk, b2, x2, input_precision=PRECISION)
            if C < H:
                rest = tl.dot(shrunk, b_rest, rest, input_precision=PRECISION)
        for at in range(low + 1, high):
            row_c = tl.load(row_ptr + tl.arange(0, CHUNK) + at * CHUNK)
            h = shrunk_of(h_of_t, here, at, row_c, h_slab, H_PARTS, DTYPE)
            row_b = b_ptr + (row_c.to(tl.int64) * width + n * H)[:, None]
            there = (row_c >= 0)[:, None]
            x1, x2, rest = _plus_chunk(x1, x2, rest, h, row_b, there, c, r, H, C, PRECISION)
        x1, x2 = x1.to(DTYPE).to(tl.float32), x2.to(DTYPE).to(tl.float32)
        if C < H:
            rest = rest.to(DTYPE).to(tl.float32)
        if NORM:
            if turns:
                x1, x2, rest = _normed(x1, x2, rest, norm_ptr + n * H, c, r, eps, H, C, DTYPE)
        o1 = tl.where(turns, turned(x1, -x2, cos1, sin1), x1).to(DTYPE)
        o2 = tl.where(turns, turned(x2, x1, cos2, sin2), x2).to(DTYPE)
        if n < N:
            target, written = q_ptr + t * (N * H) + n * H, here
        else:
            target = kv_ptr + place * (K * H) + ((n - N) % K) * H + slice_of // 2 * half
            written = here & (place >= 0)
        tl.store(target[:, None] + c[None, :], o1, mask=written[:, None] & in_c)
        tl.store(target[:, None] + HALF + c[None, :], o2, mask=written[:, None] & in_c)
        if C < H:
            tl.store(target[:, None] + C + r[None, :], rest.to(DTYPE), mask=written[:, None] & in_r)


def rope_shape(T: int, N: int, K: int) -> tuple[int, int | None]:
    """(HEADS, registers of a thread), by what was fastest on an H200: 8,448 tokens of Llama 8B take
    96 us (the base's 61), one head at a time 130; 256 rows 5.6, one at a time 5.9."""
    if T <= 64:
        return 1, 80
    many = tile_size(T) > ROPE_TOKENS
    return math.gcd(8 if many else 2, N, K), 128 if many else None


def rope_write_(
    kv: Tensor,
    y: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    norm_NH: Tensor | None,
    kv_index_T: Tensor,
    eps: float,
    shrunk: Shrunk,
    shape: tuple[int, int | None] | None = None,
) -> Tensor:
    """`shape` is (HEADS, registers of a thread)."""
    deltas = shrunk.deltas
    T, K, H, C = y.shape[-2], kv.shape[3], kv.shape[4], cos_TC.shape[1]
    N = deltas.b_PO.shape[1] // H - 2 * K
    q_TNH = torch.empty((T, N, H), dtype=kv.dtype, device=y.device)
    X, size = deltas.token_XI.shape
    PIECES = size // ROPE_TOKENS
    HEADS, registers = shape or rope_shape(T, N, K)
    _rope_write[((N + 2 * K) // HEADS, X * PIECES)](
        y,
        q_TNH,
        kv,
        cos_TC,
        sin_TC,
        q_TNH if norm_NH is None else norm_NH,
        kv_index_T,
        h_start(y, shrunk),
        deltas.b_PO,
        *deltas[2:],
        T * y.shape[-1],
        kv.stride(0),
        eps,
        y.stride(-2),
        *h_strides(y, shrunk),
        N=N,
        K=K,
        H=H,
        C=C,
        BLOCK_C=max(16, triton.next_power_of_2(C // 2)),
        BLOCK_R=max(16, triton.next_power_of_2(H - C)),
        PARTS=y.shape[0] if y.dim() == 3 else 0,
        H_PARTS=len(shrunk.h),
        NORM=norm_NH is not None,
        HEADS=HEADS,
        BLOCK_T=ROPE_TOKENS,
        PIECES=PIECES,
        DTYPE=FORMATS[kv.dtype],
        PRECISION="ieee" if kv.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=1,
        maxnreg=registers,
        **chained(y, T),
    )
    return q_TNH
