"""Rotation and KV write, and the gated activation, where the product before has deltas to come:
they are added on the way, for a tile of tokens of one adapter at a time.

Arguments are those of `elementwise` and `deltas`; tokens without an adapter get the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops.kernels.deltas import CHUNK, FORMATS, shrunk_of, tile_of
from purestep.ops.kernels.elementwise import activated
from purestep.ops.lora_linear import Shrunk

REGISTERS = 64  # of a thread: so many programs run at once that their waits for memory overlap


@triton.jit
def _sum(ptr, slab, offset, mask, PARTS: tl.constexpr):
    x = tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)
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
    h_width,
    h_slab,
    PARTS: tl.constexpr,
    H_PARTS: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if tl.load(token_ptr + tl.program_id(1) * BLOCK_T) < 0:  # an unused tile
        return
    t, here, low, high = tile_of(token_ptr, span_ptr, tl.program_id(1), BLOCK_T)
    f = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = here[:, None]
    if EVEN:
        f = tl.max_contiguous(tl.multiple_of(f, BLOCK_N), BLOCK_N)
    else:
        live &= (f < F)[None, :]
    at_y = t[:, None] * (2 * F) + f[None, :]
    gate = _sum(y_ptr, slab, at_y, live, PARTS)
    up = _sum(y_ptr, slab, at_y + F, live, PARTS)
    h_row = h_ptr + t * h_width
    for at in range(low, high):
        row = tl.load(row_ptr + tl.arange(0, CHUNK) + at * CHUNK)
        b_mask = (row >= 0)[:, None]
        if not EVEN:
            b_mask &= (f < F)[None, :]
        b_ptrs = b_ptr + row.to(tl.int64)[:, None] * (2 * F) + f[None, :]
        h = shrunk_of(h_row, here, at, h_slab, H_PARTS, DTYPE)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        gate = tl.dot(h, b, gate, input_precision=PRECISION)
        h = shrunk_of(h_row + h_width // 2, here, at, h_slab, H_PARTS, DTYPE)
        b = tl.load(b_ptrs + F, mask=b_mask, other=0.0)
        up = tl.dot(h, b, up, input_precision=PRECISION)
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    active = activated(gate, GELU, DTYPE)
    tl.store(o_ptr + t[:, None] * F + f[None, :], (active * up).to(DTYPE), mask=live)


def gated_shape(BLOCK_T: int, wide: bool) -> tuple[int, int]:
    """(BLOCK_N, warps)."""
    return 32 if wide else 128 if BLOCK_T == 16 else 64, 4


def gated_mul(y: Tensor, dtype: torch.dtype, gelu: bool, shrunk: Shrunk) -> Tensor:
    h, deltas = shrunk
    T, F, wide = y.shape[-2], y.shape[-1] // 2, dtype == torch.float32
    o_TF = torch.empty((T, F), dtype=dtype, device=y.device)
    X, BLOCK_T = deltas.token_XI.shape
    BLOCK_N, warps = gated_shape(BLOCK_T, wide)
    _gated_mul[(triton.cdiv(F, BLOCK_N), X)](
        y,
        o_TF,
        h,
        deltas.b_PO,
        *deltas[2:],
        T * 2 * F,
        F,
        h.shape[2],
        h.stride(0),
        PARTS=y.shape[0] if y.dim() == 3 else 0,
        H_PARTS=h.shape[0],
        GELU=gelu,
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_N,
        EVEN=F % BLOCK_N == 0,
        DTYPE=FORMATS[dtype],
        PRECISION="ieee" if wide else "tf32",
        num_warps=warps,
        num_stages=1,
        maxnreg=REGISTERS if BLOCK_T == 16 else None,
    )
    return o_TF


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
    h_width,
    h_slab,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    H_PARTS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if tl.load(token_ptr + tl.program_id(1) * BLOCK_T) < 0:  # an unused tile
        return
    n = tl.program_id(0)
    t, here, low, high = tile_of(token_ptr, span_ptr, tl.program_id(1), BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    width: tl.constexpr = (N + 2 * K) * H
    other = tl.where(h < C // 2, h + C // 2, h - C // 2)
    if C % 16 == 0:  # said, so that accesses are 16 bytes wide
        other = tl.max_contiguous(tl.multiple_of(other, 8), 8)
    live = here[:, None] & (h < H)[None, :]
    turns = here[:, None] & (h < C)[None, :] & (n < N + K)
    y_row = y_ptr + t[:, None] * width + n * H
    x = _sum(y_row, slab, h[None, :], live, PARTS)
    partner = _sum(y_row, slab, other[None, :], turns, PARTS)
    slice_of = (n >= N).to(tl.int32) + (n >= N + K).to(tl.int32)
    h_row = h_ptr + t * h_width + slice_of * (h_width // 3)
    for at in range(low, high):
        row = tl.load(row_ptr + tl.arange(0, CHUNK) + at * CHUNK)
        b_row = b_ptr + row.to(tl.int64)[:, None] * width + n * H
        shrunk = shrunk_of(h_row, here, at, h_slab, H_PARTS, DTYPE)
        b = tl.load(b_row + h[None, :], mask=(row >= 0)[:, None] & (h < H)[None, :], other=0.0)
        x = tl.dot(shrunk, b, x, input_precision=PRECISION)
        b_mask = (row >= 0)[:, None] & (h < C)[None, :] & (n < N + K)
        b = tl.load(b_row + other[None, :], mask=b_mask, other=0.0)
        partner = tl.dot(shrunk, b, partner, input_precision=PRECISION)
    x, partner = x.to(DTYPE).to(tl.float32), partner.to(DTYPE).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / H + eps)[:, None]
        normed = n < N + K
        w = tl.load(norm_ptr + n * H + h, mask=(h < H) & normed, other=0.0).to(tl.float32)
        w_partner = tl.load(norm_ptr + n * H + other, mask=(h < C) & normed, other=0.0)
        w_partner = w_partner.to(tl.float32)[None, :]
        scaled = ((x * scale).to(DTYPE).to(tl.float32) * w[None, :]).to(DTYPE).to(tl.float32)
        x = tl.where(normed, scaled, x)
        partner = ((partner * scale).to(DTYPE).to(tl.float32) * w_partner).to(DTYPE).to(tl.float32)
    at_cos = t[:, None] * C + h[None, :]
    cos = tl.load(cos_ptr + at_cos, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at_cos, mask=turns, other=0.0).to(tl.float32)
    sign = tl.where(h < C // 2, -1.0, 1.0)[None, :]
    turned = x * cos + sign * partner * sin
    x = tl.where(turns, turned, x).to(DTYPE)
    if n < N:
        tl.store(q_ptr + (t * (N * H) + n * H)[:, None] + h[None, :], x, mask=live)
    else:
        place = tl.load(index_ptr + t, mask=here, other=-1).to(tl.int64)
        target = place * (K * H) + ((n - N) % K) * H + slice_of // 2 * half
        tl.store(kv_ptr + target[:, None] + h[None, :], x, mask=live & (place >= 0)[:, None])


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
    h, deltas = shrunk
    T, K, H = y.shape[-2], kv.shape[3], kv.shape[4]
    N = y.shape[-1] // H - 2 * K
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
        h,
        deltas.b_PO,
        *deltas[2:],
        T * y.shape[-1],
        kv.stride(0),
        eps,
        h.shape[2],
        h.stride(0),
        N=N,
        K=K,
        H=H,
        C=cos_TC.shape[1],
        BLOCK_H=max(16, triton.next_power_of_2(H)),
        PARTS=y.shape[0] if y.dim() == 3 else 0,
        H_PARTS=h.shape[0],
        NORM=norm_NH is not None,
        BLOCK_T=BLOCK_T,
        DTYPE=FORMATS[kv.dtype],
        PRECISION="ieee" if kv.dtype == torch.float32 else "tf32",
        num_warps=rope_warps(BLOCK_T),
        num_stages=1,
        maxnreg=REGISTERS if BLOCK_T == 16 else None,
    )
    return q_TNH
