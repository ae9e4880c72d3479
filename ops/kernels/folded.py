"""Rotation and KV write, and the gated activation, where the product before has deltas to come:
they are added on the way, for a tile of tokens of one adapter at a time.

Arguments are those of `elementwise` and `deltas`; tokens without an adapter get the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops.kernels.deltas import (
    CHUNK,
    FORMATS,
    h_start,
    h_strides,
    nothing,
    shrunk_of,
    tile_of,
)
from purestep.ops.kernels.elementwise import activated
from purestep.ops.lora_linear import Shrunk, tile_size

# Of a thread, so that many programs run at once and their waits for memory overlap.
ROPE_REGISTERS = 80


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
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.load(token_ptr + tl.program_id(1) * BLOCK_T)
    t, here, low, high = tile_of(token_ptr, span_ptr, tl.program_id(1), BLOCK_T)
    if first < 0:  # an unused tile
        return
    f = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = here[:, None]
    if EVEN:
        f = tl.max_contiguous(tl.multiple_of(f, BLOCK_N), BLOCK_N)
    else:
        live &= (f < F)[None, :]
    at_y = t[:, None] * y_row + f[None, :]
    gate = _addend(y_ptr, slab, at_y, live, PARTS).to(tl.float32)
    up = _addend(y_ptr, slab, at_y + F, live, PARTS).to(tl.float32)
    h_of_t = h_ptr + t * h_row
    for at in range(low, high):
        row = tl.load(row_ptr + tl.arange(0, CHUNK) + at * CHUNK)
        b_mask = (row >= 0)[:, None]
        if not EVEN:
            b_mask &= (f < F)[None, :]
        b_ptrs = b_ptr + row.to(tl.int64)[:, None] * (2 * F) + f[None, :]
        h = shrunk_of(h_of_t, here, at, row, h_slab, H_PARTS, DTYPE)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        gate = tl.dot(h, b, gate, input_precision=PRECISION)
        h = shrunk_of(h_of_t + h_slice, here, at, row, h_slab, H_PARTS, DTYPE)
        b = tl.load(b_ptrs + F, mask=b_mask, other=0.0)
        up = tl.dot(h, b, up, input_precision=PRECISION)
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    active = activated(gate, GELU, DTYPE)
    tl.store(o_ptr + t[:, None] * F + f[None, :], (active * up).to(DTYPE), mask=live)


def gated_shape(T: int, wide: bool) -> tuple[int, int, int | None]:
    """(BLOCK_N, warps, registers of a thread), by what was fastest on an H200: with 8 adapters at
    8, 64 and 256 rows 7.6, 7.4 and 8.0 us over the base's of Llama 8B's MLP, where another of the
    three takes 8.1, 9.0 and 11.3."""
    if wide:
        return 32, 4, None
    if tile_size(T) > 16:
        return 64, 4, None
    return (128, 4, 64) if T <= 16 else (128, 2, 128) if T <= 64 else (256, 8, 64)


def gated_mul(y: Tensor, dtype: torch.dtype, gelu: bool, shrunk: Shrunk) -> Tensor:
    deltas = shrunk.deltas
    T, F, wide = y.shape[-2], deltas.b_PO.shape[1] // 2, dtype == torch.float32
    o_TF = torch.empty((T, F), dtype=dtype, device=y.device)
    X, BLOCK_T = deltas.token_XI.shape
    BLOCK_N, warps, registers = gated_shape(T, wide)
    _gated_mul[(triton.cdiv(F, BLOCK_N), X)](
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
        BLOCK_N=BLOCK_N,
        EVEN=F % BLOCK_N == 0,
        DTYPE=FORMATS[dtype],
        PRECISION="ieee" if wide else "tf32",
        num_warps=warps,
        num_stages=1,
        maxnreg=registers,
    )
    return o_TF


@triton.jit
def _scaled(x, scale, w_ptrs, mask, DTYPE: tl.constexpr):
    """Normed, rounded, times the weights, rounded."""
    w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)[None, :]
    return ((x * scale).to(DTYPE).to(tl.float32) * w).to(DTYPE).to(tl.float32)


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
    BLOCK_T: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.load(token_ptr + tl.program_id(1) * BLOCK_T)
    t, here, low, high = tile_of(token_ptr, span_ptr, tl.program_id(1), BLOCK_T)
    if first < 0:  # an unused tile
        return
    n = tl.program_id(0)
    # A head in three: the two halves that turn each other, and what does not turn.
    HALF: tl.constexpr = C // 2
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    in_c, in_r = (c < HALF)[None, :], (r < H - C)[None, :]
    live_c, live_r = here[:, None] & in_c, here[:, None] & in_r
    width: tl.constexpr = (N + 2 * K) * H
    y_at = (t * y_row + n * H)[:, None]
    x1 = _addend(y_ptr, slab, y_at + c[None, :], live_c, PARTS)
    x2 = _addend(y_ptr, slab, y_at + HALF + c[None, :], live_c, PARTS)
    delta1, delta2 = nothing(BLOCK_T, BLOCK_C), nothing(BLOCK_T, BLOCK_C)
    if C < H:
        rest = _addend(y_ptr, slab, y_at + C + r[None, :], live_r, PARTS)
        rest_delta = nothing(BLOCK_T, BLOCK_R)
    slice_of = (n >= N).to(tl.int32) + (n >= N + K).to(tl.int32)
    h_of_t = h_ptr + t * h_row + slice_of * h_slice
    for at in range(low, high):
        row = tl.load(row_ptr + tl.arange(0, CHUNK) + at * CHUNK)
        known = (row >= 0)[:, None]
        b_row = b_ptr + (row.to(tl.int64) * width + n * H)[:, None]
        shrunk = shrunk_of(h_of_t, here, at, row, h_slab, H_PARTS, DTYPE)
        b = tl.load(b_row + c[None, :], mask=known & in_c, other=0.0)
        delta1 = tl.dot(shrunk, b, delta1, input_precision=PRECISION)
        b = tl.load(b_row + HALF + c[None, :], mask=known & in_c, other=0.0)
        delta2 = tl.dot(shrunk, b, delta2, input_precision=PRECISION)
        if C < H:
            b = tl.load(b_row + C + r[None, :], mask=known & in_r, other=0.0)
            rest_delta = tl.dot(shrunk, b, rest_delta, input_precision=PRECISION)
    x1 = (x1.to(tl.float32) + delta1).to(DTYPE).to(tl.float32)
    x2 = (x2.to(tl.float32) + delta2).to(DTYPE).to(tl.float32)
    if C < H:
        rest = (rest.to(tl.float32) + rest_delta).to(DTYPE).to(tl.float32)
    turns = n < N + K
    if NORM:
        if turns:
            square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
            if C < H:
                square += tl.sum(rest * rest, 1)
            scale = tl.rsqrt(square / H + eps)[:, None]
            w_row = norm_ptr + n * H
            x1 = _scaled(x1, scale, w_row + c, c < HALF, DTYPE)
            x2 = _scaled(x2, scale, w_row + HALF + c, c < HALF, DTYPE)
            if C < H:
                rest = _scaled(rest, scale, w_row + C + r, r < H - C, DTYPE)
    at_cos = t[:, None] * C + c[None, :]
    cos1 = tl.load(cos_ptr + at_cos, mask=live_c & turns, other=1.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + at_cos, mask=live_c & turns, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + HALF + at_cos, mask=live_c & turns, other=1.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + HALF + at_cos, mask=live_c & turns, other=0.0).to(tl.float32)
    o1 = tl.where(turns, x1 * cos1 - x2 * sin1, x1).to(DTYPE)
    o2 = tl.where(turns, x2 * cos2 + x1 * sin2, x2).to(DTYPE)
    if n < N:
        target, written = q_ptr + t * (N * H) + n * H, here
    else:
        place = tl.load(index_ptr + t, mask=here, other=-1).to(tl.int64)
        target = kv_ptr + place * (K * H) + ((n - N) % K) * H + slice_of // 2 * half
        written = here & (place >= 0)
    tl.store(target[:, None] + c[None, :], o1, mask=written[:, None] & in_c)
    tl.store(target[:, None] + HALF + c[None, :], o2, mask=written[:, None] & in_c)
    if C < H:
        tl.store(target[:, None] + C + r[None, :], rest.to(DTYPE), mask=written[:, None] & in_r)


def rope_warps(BLOCK_T: int) -> int:
    return 4 if BLOCK_T == 16 else 8


def rope_write_(
    kv: Tensor,
    y: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    norm_NH: Tensor | None,
    kv_index_T: Tensor,
    eps: float,
    shrunk: Shrunk,
) -> Tensor:
    deltas = shrunk.deltas
    T, K, H, C = y.shape[-2], kv.shape[3], kv.shape[4], cos_TC.shape[1]
    N = deltas.b_PO.shape[1] // H - 2 * K
    q_TNH = torch.empty((T, N, H), dtype=kv.dtype, device=y.device)
    X, BLOCK_T = deltas.token_XI.shape
    _rope_write[(N + 2 * K, X)](
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
        BLOCK_T=BLOCK_T,
        DTYPE=FORMATS[kv.dtype],
        PRECISION="ieee" if kv.dtype == torch.float32 else "tf32",
        num_warps=rope_warps(BLOCK_T),
        num_stages=1,
        maxnreg=ROPE_REGISTERS if BLOCK_T == 16 else None,
    )
    return q_TNH
