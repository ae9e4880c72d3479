"""What happens between products: norms, rotation and KV write, the gated activation.

Where a kernel takes `parts`, its input is n fp32 addends [n, T, O] of a product, summed in order
and rounded once, or (n = 0) the product itself [T, O].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops.kernels.chain import chained, follow
from purestep.ops.kernels.deltas import FORMATS


@triton.jit
def _gather(ptr, slab, offset, mask, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """The product at `offset`, fp32 but rounded to the model's format."""
    x = tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(ptr + part * slab + offset, mask=mask, other=0.0)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _add_norm(
    h_ptr,
    y_ptr,
    inner_ptr,
    weight_ptr,
    sum_ptr,
    x_ptr,
    slab,
    y_row,
    D,
    eps,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    live = d < D
    weight = tl.load(weight_ptr + d, mask=live, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + t * D + d, mask=live, other=0.0).to(tl.float32)
    if ADD:
        y = _gather(y_ptr, slab, t * y_row + d, live, PARTS, DTYPE)
        if INNER:
            inner = tl.load(inner_ptr + d, mask=live, other=0.0).to(tl.float32)
            y = (y * tl.rsqrt(tl.sum(y * y, 0) / D + eps)).to(DTYPE).to(tl.float32)
            y = (y * inner).to(DTYPE).to(tl.float32)
        h = (h + y).to(DTYPE)
        tl.store(sum_ptr + t * D + d, h, mask=live)
        h = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 0) / D + eps)
    normed = (h * scale).to(DTYPE).to(tl.float32)
    tl.store(x_ptr + t * D + d, (normed * weight).to(DTYPE), mask=live)


def add_rms_norm(
    h_TD: Tensor, y: Tensor | None, weight_D: Tensor, eps: float, inner_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (T, D), x_TD = h_TD.shape, torch.empty_like(h_TD)
    sum_TD = h_TD if y is None else torch.empty_like(h_TD)
    if T:
        _add_norm[(T,)](
            h_TD,
            h_TD if y is None else y,
            weight_D if inner_D is None else inner_D,
            weight_D,
            sum_TD,
            x_TD,
            T * D,
            D if y is None else y.stride(-2),
            D,
            eps,
            PARTS=y.shape[0] if y is not None and y.dim() == 3 else 0,
            ADD=y is not None,
            INNER=inner_D is not None,
            BLOCK=triton.next_power_of_2(D),
            DTYPE=FORMATS[h_TD.dtype],
            num_warps=8 if D > 2048 else 4,
            **chained(h_TD, T),
        )
    return sum_TD, x_TD


@triton.jit
def activated(gate, GELU: tl.constexpr, DTYPE: tl.constexpr):
    """silu, or gelu by tanh: 1 + tanh(z) is 2 / (1 + exp(-2z)). Rounded to the model's format."""
    z = gate
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-z))).to(DTYPE).to(tl.float32)


@triton.jit
def _gated_mul(
    y_ptr,
    o_ptr,
    slab,
    F,
    PARTS: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = _gather(y_ptr, slab, t * 2 * F + f, f < F, PARTS, DTYPE)
    up = _gather(y_ptr, slab, t * 2 * F + F + f, f < F, PARTS, DTYPE)
    active = activated(gate, GELU, DTYPE)
    tl.store(o_ptr + t * F + f, (active * up).to(DTYPE), mask=f < F)


def gated_mul(y: Tensor, dtype: torch.dtype, gelu: bool = False) -> Tensor:
    T, F = y.shape[-2], y.shape[-1] // 2
    o_TF = torch.empty((T, F), dtype=dtype, device=y.device)
    BLOCK = 1024
    if T:
        _gated_mul[(T, triton.cdiv(F, BLOCK))](
            y,
            o_TF,
            T * 2 * F,
            F,
            PARTS=y.shape[0] if y.dim() == 3 else 0,
            GELU=gelu,
            BLOCK=BLOCK,
            DTYPE=FORMATS[dtype],
            **chained(y, T),
        )
    return o_TF


@triton.jit
def turned(x, partner, cos, sin):
    """x cos + partner sin. It says which of the products is rounded: else a compiler chooses, and
    may choose the other one in the next kernel."""
    return tl.fma(x, cos, partner * sin)


@triton.jit
def _rope_write(
    y_ptr,
    q_ptr,
    kv_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    index_ptr,
    slab,
    half,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)
    width: tl.constexpr = (N + 2 * K) * H
    live = (n < N + 2 * K)[:, None] & (h < H)[None, :]
    offset = n[:, None] * H + h[None, :]
    x = _gather(y_ptr, slab, t * width + offset, live, PARTS, DTYPE)
    # The partner of a channel in its pair: i + C/2 for the first half of C, i - C/2 for the second.
    other = tl.where(h < C // 2, h + C // 2, h - C // 2)
    if C % 16 == 0:  # said, so that accesses are 16 bytes wide
        other = tl.max_contiguous(tl.multiple_of(other, 8), 8)
    turns = live & (h < C)[None, :] & (n < N + K)[:, None]
    partner_at = n[:, None] * H + other[None, :]
    partner = _gather(y_ptr, slab, t * width + partner_at, turns, PARTS, DTYPE)
    if NORM:
        normed = (n < N + K)[:, None]
        scale = tl.rsqrt(tl.sum(x * x, 1) / H + eps)[:, None]
        w = tl.load(norm_ptr + offset, mask=live & normed, other=0.0).to(tl.float32)
        w_partner = tl.load(norm_ptr + partner_at, mask=turns, other=0.0).to(tl.float32)
        x = tl.where(normed, ((x * scale).to(DTYPE).to(tl.float32) * w).to(DTYPE).to(tl.float32), x)
        partner = ((partner * scale).to(DTYPE).to(tl.float32) * w_partner).to(DTYPE).to(tl.float32)
    cos = tl.load(cos_ptr + t * C + h, mask=h < C, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + t * C + h, mask=h < C, other=0.0).to(tl.float32)[None, :]
    sign = tl.where(h < C // 2, -1.0, 1.0)[None, :]
    x = tl.where(turns, turned(x, sign * partner, cos, sin), x).to(DTYPE)
    tl.store(q_ptr + t * N * H + offset, x, mask=live & (n < N)[:, None])
    place = tl.load(index_ptr + t).to(tl.int64)
    write = live & (n >= N)[:, None] & (place >= 0)
    is_value = (n >= N + K)[:, None]
    key_head = tl.where(n >= N + K, n - N - K, n - N)[:, None]
    target = place * K * H + key_head * H + h[None, :]
    tl.store(kv_ptr + tl.where(is_value, half + target, target), x, mask=write)


def rope_write_(
    kv: Tensor,
    y: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    norm_NH: Tensor | None,
    kv_index_T: Tensor,
    eps: float,
) -> Tensor:
    T, K, H = y.shape[-2], kv.shape[3], kv.shape[4]
    N = y.shape[-1] // H - 2 * K
    q_TNH = torch.empty((T, N, H), dtype=kv.dtype, device=y.device)
    BLOCK_N = 8
    if T:
        _rope_write[(T, triton.cdiv(N + 2 * K, BLOCK_N))](
            y,
            q_TNH,
            kv,
            cos_TC,
            sin_TC,
            q_TNH if norm_NH is None else norm_NH,
            kv_index_T,
            T * y.shape[-1],
            kv.stride(0),
            eps,
            N=N,
            K=K,
            H=H,
            C=cos_TC.shape[1],
            BLOCK_H=triton.next_power_of_2(H),
            BLOCK_N=BLOCK_N,
            PARTS=y.shape[0] if y.dim() == 3 else 0,
            NORM=norm_NH is not None,
            DTYPE=FORMATS[kv.dtype],
            **chained(y, T),
        )
    return q_TNH


@triton.jit
def _kv_write(
    k_ptr,
    v_ptr,
    kv_ptr,
    index_ptr,
    k_stride,
    v_stride,
    half,
    width,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    place = tl.load(index_ptr + t)
    if place >= 0:
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            live = at < width
            k = tl.load(k_ptr + t * k_stride + at, mask=live)
            v = tl.load(v_ptr + t * v_stride + at, mask=live)
            tl.store(kv_ptr + place * width + at, k, mask=live)
            tl.store(kv_ptr + half + place * width + at, v, mask=live)


def kv_write_(kv: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_index_T: Tensor) -> None:
    T, K, H = k_TKH.shape
    k_TKH, v_TKH = (x if x.stride()[1:] == (H, 1) else x.contiguous() for x in (k_TKH, v_TKH))
    if T:
        _kv_write[(T,)](
            k_TKH,
            v_TKH,
            kv,
            kv_index_T,
            k_TKH.stride(0),
            v_TKH.stride(0),
            kv.stride(0),
            K * H,
            BLOCK=min(1024, triton.next_power_of_2(K * H)),
        )
