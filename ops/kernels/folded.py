"""Rotation and KV write, and the gated activation, where the product before has deltas to come:
they are added on the way, for a tile of tokens of one adapter at a time.

Arguments are those of `elementwise` and `deltas`. Tokens without an adapter get the same bits as
there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops.kernels.deltas import CHUNK, FORMATS, rows_at_once, rows_of, shrunk_of, tile_of
from purestep.ops.lora_linear import Shrunk


@triton.jit
def _sum(ptr, slab, offset, mask, PARTS: tl.constexpr):
    x = tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(ptr + part * slab + offset, mask=mask, other=0.0)
    return x


@triton.jit
def _silu_mul(
    y_ptr,
    o_ptr,
    h_ptr,
    b_ptr,
    chunk_ptr,
    owner_ptr,
    slot_ptr,
    span_ptr,
    token_ptr,
    slab,
    F,
    P,
    h_width,
    h_slab,
    PARTS: tl.constexpr,
    H_PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if tl.load(token_ptr + tl.program_id(1) * BLOCK_T) < 0:
        return
    t, here, slot, low, high = tile_of(token_ptr, slot_ptr, span_ptr, tl.program_id(1), BLOCK_T)
    f = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = here[:, None]
    if EVEN:
        f = tl.max_contiguous(tl.multiple_of(f, BLOCK_N), BLOCK_N)
    else:
        live &= (f < F)[None, :]
    at_y = t.to(tl.int64)[:, None] * (2 * F) + f[None, :]
    gate = _sum(y_ptr, slab, at_y, live, PARTS)
    up = _sum(y_ptr, slab, at_y + F, live, PARTS)
    h_row = h_ptr + t.to(tl.int64)[:, None] * h_width
    for at in range(low, high, BLOCK_R // CHUNK):
        row, used, own = rows_of(chunk_ptr, owner_ptr, slot, at, high, P, BLOCK_R)
        b_mask = used[:, None]
        if not EVEN:
            b_mask &= (f < F)[None, :]
        b_ptrs = b_ptr + row.to(tl.int64)[:, None] * (2 * F) + f[None, :]
        h = shrunk_of(h_row, here, at, high, own, h_slab, H_PARTS, BLOCK_R, DTYPE)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        gate = tl.dot(h, b, gate, input_precision=PRECISION)
        half = h_row + h_width // 2
        h = shrunk_of(half, here, at, high, own, h_slab, H_PARTS, BLOCK_R, DTYPE)
        b = tl.load(b_ptrs + F, mask=b_mask, other=0.0)
        up = tl.dot(h, b, up, input_precision=PRECISION)
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    at_o = t.to(tl.int64)[:, None] * F + f[None, :]
    tl.store(o_ptr + at_o, (active * up).to(DTYPE), mask=live)


def silu_shape(BLOCK_T: int, P: int, wide: bool) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_R, warps)."""
    BLOCK_N = 32 if wide else 256 if BLOCK_T <= 16 else 128
    return BLOCK_N, rows_at_once(BLOCK_T, P), 4 if BLOCK_T <= 32 else 8


def silu_mul(y: Tensor, dtype: torch.dtype, shrunk: Shrunk) -> Tensor:
    h, deltas = shrunk
    T, F, P = y.shape[-2], y.shape[-1] // 2, deltas.b_PO.shape[0]
    o_TF = torch.empty((T, F), dtype=dtype, device=y.device)
    X, BLOCK_T = deltas.token_XI.shape
    BLOCK_N, BLOCK_R, warps = silu_shape(BLOCK_T, P, dtype == torch.float32)
    _silu_mul[(triton.cdiv(F, BLOCK_N), X)](
        y,
        o_TF,
        h,
        deltas.b_PO,
        *deltas[2:],
        T * 2 * F,
        F,
        P,
        h.shape[2],
        h.stride(0),
        PARTS=y.shape[0] if y.dim() == 3 else 0,
        H_PARTS=h.shape[0],
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_N,
        BLOCK_R=BLOCK_R,
        EVEN=F % BLOCK_N == 0,
        DTYPE=FORMATS[dtype],
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=1,
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
    chunk_ptr,
    owner_ptr,
    slot_ptr,
    span_ptr,
    token_ptr,
    slab,
    half,
    eps,
    P,
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
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if tl.load(token_ptr + tl.program_id(1) * BLOCK_T) < 0:
        return
    n = tl.program_id(0)
    t, here, slot, low, high = tile_of(token_ptr, slot_ptr, span_ptr, tl.program_id(1), BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    width: tl.constexpr = (N + 2 * K) * H
    other = tl.where(h < C // 2, h + C // 2, h - C // 2)
    if C % 16 == 0:  # said, so that accesses are 16 bytes wide
        other = tl.max_contiguous(tl.multiple_of(other, 8), 8)
    live = here[:, None] & (h < H)[None, :]
    turns = here[:, None] & (h < C)[None, :] & (n < N + K)
    y_row = y_ptr + t.to(tl.int64)[:, None] * width + n * H
    x = _sum(y_row, slab, h[None, :], live, PARTS)
    partner = _sum(y_row, slab, other[None, :], turns, PARTS)
    slice_of = (n >= N).to(tl.int32) + (n >= N + K).to(tl.int32)
    h_row = h_ptr + t.to(tl.int64)[:, None] * h_width + slice_of * (h_width // 3)
    for at in range(low, high, BLOCK_R // CHUNK):
        row, used, own = rows_of(chunk_ptr, owner_ptr, slot, at, high, P, BLOCK_R)
        shrunk = shrunk_of(h_row, here, at, high, own, h_slab, H_PARTS, BLOCK_R, DTYPE)
        b_row = b_ptr + row.to(tl.int64)[:, None] * width + n * H
        b = tl.load(b_row + h[None, :], mask=used[:, None] & (h < H)[None, :], other=0.0)
        x = tl.dot(shrunk, b, x, input_precision=PRECISION)
        b_mask = used[:, None] & (h < C)[None, :] & (n < N + K)
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
    at_cos = t.to(tl.int64)[:, None] * C + h[None, :]
    cos = tl.load(cos_ptr + at_cos, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at_cos, mask=turns, other=0.0).to(tl.float32)
    sign = tl.where(h < C // 2, -1.0, 1.0)[None, :]
    turned = x * cos + sign * partner * sin
    x = tl.where(turns, turned, x).to(DTYPE)
    if n < N:
        tl.store(q_ptr + (t.to(tl.int64) * (N * H) + n * H)[:, None] + h[None, :], x, mask=live)
    else:
        place = tl.load(index_ptr + t, mask=here, other=-1).to(tl.int64)
        target = place * (K * H) + ((n - N) % K) * H + slice_of // 2 * half
        tl.store(kv_ptr + target[:, None] + h[None, :], x, mask=live & (place >= 0)[:, None])


def rope_shape(BLOCK_T: int, P: int) -> tuple[int, int]:
    """(BLOCK_R, warps)."""
    return rows_at_once(BLOCK_T, P), 4 if BLOCK_T <= 32 else 8


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
    T, K, H, P = y.shape[-2], kv.shape[3], kv.shape[4], deltas.b_PO.shape[0]
    N = y.shape[-1] // H - 2 * K
    q_TNH = torch.empty((T, N, H), dtype=kv.dtype, device=y.device)
    X, BLOCK_T = deltas.token_XI.shape
    BLOCK_R, warps = rope_shape(BLOCK_T, P)
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
        P,
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
        BLOCK_R=BLOCK_R,
        DTYPE=FORMATS[kv.dtype],
        PRECISION="ieee" if kv.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=1,
    )
    return q_TNH
