"""Paged attention. A tile is a few queries of one row with all G heads of a key head.

T token rows, N query heads, K key/value heads, G = N / K, H head size, R request rows, M blocks of
the longest row, Z splits of a row's keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from purestep.ops.kernels.chain import chained, follow

LOG2E = 1.4426950408889634
NUM_PROGRAMS = 264  # two for each multiprocessor of an H200
LONG = 1000  # tokens of a row, on average, from which on tiles have more keys


@triton.jit
def _row_of(start_ptr, pid, num_rows, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr):
    """The last r of 0..num_rows whose first tile, start[r] // BLOCK_Q + r, is not after `pid`. They
    are counted: a search would wait for memory at each of its turns."""
    found = 0
    for begin in range(1, num_rows + 1, BLOCK_R):  # row 0 has the first one
        r = begin + tl.arange(0, BLOCK_R)
        start = tl.load(start_ptr + r, mask=r <= num_rows, other=0).to(tl.int32)
        found += tl.sum(((start // BLOCK_Q + r <= pid) & (r <= num_rows)).to(tl.int32), 0)
    return found


@triton.jit
def _step(
    q,
    kv_ptr,
    table_ptr,
    key,
    row,
    head,
    half,
    M,
    at,
    limit,
    first_key,
    high,
    scale,
    top,
    mass,
    acc,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The keys from `key` on, added to the running softmax."""
    h = tl.arange(0, BLOCK_H)
    index = key + tl.arange(0, BLOCK_C)
    seen = (index < high) & (index >= first_key)
    block_ptr = table_ptr + row.to(tl.int64) * M + index // BLOCK_SIZE
    if MASKED:
        block = tl.load(block_ptr, mask=seen, other=0)
    else:
        block = tl.load(block_ptr)
    place = ((block.to(tl.int64) * BLOCK_SIZE + index % BLOCK_SIZE) * K + head) * H
    k_ptr = kv_ptr + place[None, :] + h[:, None]
    v_ptr = kv_ptr + half + place[:, None] + h[None, :]
    if MASKED:
        k = tl.load(k_ptr, mask=seen[None, :] & (h < H)[:, None], other=0.0)
    elif BLOCK_H == H:
        k = tl.load(k_ptr)
    else:
        k = tl.load(k_ptr, mask=(h < H)[:, None], other=0.0)
    s = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        visible = seen[None, :] & (index[None, :] < limit[:, None])
        if WINDOW > 0:
            visible &= index[None, :] > at[:, None] - WINDOW
        s = tl.where(visible, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    p = tl.exp2(s * scale - base[:, None])
    old = tl.exp2(top - base)
    if MASKED:
        v = tl.load(v_ptr, mask=seen[:, None] & (h < H)[None, :], other=0.0)
    elif BLOCK_H == H:
        v = tl.load(v_ptr)
    else:
        v = tl.load(v_ptr, mask=(h < H)[None, :], other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return new_top, mass * old + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["T", "num_rows", "M"])
def _attend(
    q_ptr,
    kv_ptr,
    o_ptr,
    stat_ptr,
    start_ptr,
    context_ptr,
    table_ptr,
    end_ptr,
    T,
    num_rows,
    half,
    M,
    q_stride,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    ENDS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    head, split = tl.program_id(1), tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    if ROWS == "uniform":  # one query a row, and row r is token r
        row = tl.program_id(0)
        context = tl.load(context_ptr + row).to(tl.int32)
        first = row
        count = 1
        position = context - 1
        live = context > 0
    elif ROWS == "single":  # of rows of all sorts those with one query
        row = tl.program_id(0)
        context = tl.load(context_ptr + row).to(tl.int32)
        first = tl.load(start_ptr + row).to(tl.int32)
        count = (tl.load(start_ptr + row + 1).to(tl.int32) - first == 1).to(tl.int32)
        position = context - 1
        live = context > 0
    else:
        pid = tl.num_programs(0) - 1 - tl.program_id(0)  # the long ones first
        row = _row_of(start_ptr, pid, num_rows, BLOCK_Q, 256)
        live = row < num_rows
        begin = tl.load(start_ptr + row).to(tl.int32)
        end = tl.load(start_ptr + row + 1, mask=live, other=T).to(tl.int32)
        first = begin + (pid - begin // BLOCK_Q - row) * BLOCK_Q
        count = tl.minimum(end - first, BLOCK_Q)
        if ROWS == "longer":  # those with more than one, and padding
            count = tl.where(live & (end - begin == 1), 0, count)
        context = tl.load(context_ptr + row, mask=live, other=0).to(tl.int32)
        position = context - (end - first)
    if count <= 0:
        return
    query, group = m // G, m % G
    real = query < count
    token = (first + query).to(tl.int64)
    q = tl.load(
        q_ptr + (token * q_stride + (head * G + group) * H)[:, None] + h[None, :],
        mask=(real & live)[:, None] & (h < H)[None, :],
        other=0.0,
    )
    at = position + query
    limit = at + 1
    low, high = 0, tl.minimum(position + count, context)
    if ENDS:
        end_m = tl.load(end_ptr + token, mask=real & live, other=0).to(tl.int32)
        limit = tl.maximum(limit, end_m)
        high = tl.minimum(tl.maximum(position + count, tl.max(end_m, 0)), context)
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0) // BLOCK_C * BLOCK_C
    first_key = low
    if WINDOW > 0:
        first_key = tl.maximum(position - WINDOW + 1, 0)
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_C), SPLITS) * BLOCK_C
        low += split * share
        high = tl.minimum(high, low + share)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    interior = low
    if WINDOW == 0:  # where every query sees every key
        interior = tl.maximum(low, tl.minimum(high, position + 1) // BLOCK_C * BLOCK_C)
        for key in range(low, interior, BLOCK_C):
            top, mass, acc = _step(
                q, kv_ptr, table_ptr, key, row, head, half, M, at, limit, first_key, high,
                scale, top, mass, acc, K, H, BLOCK_H, BLOCK_SIZE, BLOCK_C, WINDOW, False, PRECISION,
            )  # fmt: skip
    for key in range(interior, high, BLOCK_C):
        top, mass, acc = _step(
            q, kv_ptr, table_ptr, key, row, head, half, M, at, limit, first_key, high,
            scale, top, mass, acc, K, H, BLOCK_H, BLOCK_SIZE, BLOCK_C, WINDOW, True, PRECISION,
        )  # fmt: skip
    n = token * (K * G) + head * G + group
    if SPLITS > 1:
        tl.store(
            o_ptr + (n * SPLITS + split)[:, None] * H + h[None, :],
            acc,
            mask=real[:, None] & (h < H)[None, :],
        )
        tl.store(stat_ptr + (n * SPLITS + split) * 2, top, mask=real)
        tl.store(stat_ptr + (n * SPLITS + split) * 2 + 1, mass, mask=real)
    else:
        out = acc / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(o_ptr + n[:, None] * H + h[None, :], out, mask=real[:, None] & (h < H)[None, :])


@triton.jit
def _combine(
    part_ptr,
    stat_ptr,
    o_ptr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    Z: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Join the splits of one query head, always in the same order."""
    follow(CHAINED)
    n = tl.program_id(0).to(tl.int64)
    z, h = tl.arange(0, Z), tl.arange(0, BLOCK_H)
    top = tl.load(stat_ptr + (n * Z + z) * 2)
    mass = tl.load(stat_ptr + (n * Z + z) * 2 + 1)
    part = tl.load(part_ptr + (n * Z + z)[:, None] * H + h[None, :], mask=(h < H)[None, :], other=0)
    most = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(mass * weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(o_ptr + n * H + h, out, mask=h < H)


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Splits of a decode step's keys: as many as fill the chip, a power of two up to 16."""
    wanted = NUM_PROGRAMS // max(1, num_rows * num_kv_heads)
    return min(16, 1 << max(0, wanted.bit_length() - 1))


def tile_shape(
    few: bool, split: bool, T: int, R: int, BLOCK_H: int, wide: bool
) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_C, warps, stages), for rows of one query (`few`) or of more, by what was
    fastest on an H200: Llama 8B's 256 rows of 540 tokens take 137 us (a copy's rate: 134), of 640
    158 (159), with tiles of 64 keys and two warps 160 and 162. Four prompts of 2,048 tokens take
    401 us, sixteen of 512 161, each with the other's tiles 441 and 174."""
    if wide:
        return 16, 32, 4, 1
    if few and BLOCK_H > 128:
        return 16, 32, 2, 3
    if few:
        return (16, 64, 2, 3) if split else (16, 32, 1, 3)
    if BLOCK_H > 128:
        return 64, 32, 8, 2
    return 128, 64 if T >= LONG * R else 32, 4, 3


def launch(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
    end_T: Tensor | None = None,
    uniform: bool = False,
    splits: int | None = None,
    shape: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """`scale` is above 0. `uniform` promises one query a row, that of token r for row r; rows
    without context are padding. Only then keys are split. No end is read of a row with one query.
    `shape` is (BLOCK_M, BLOCK_C, warps, stages)."""
    (T, N, H), (R, M) = q_TNH.shape, block_table_RM.shape
    K, block_size = kv.shape[3], kv.shape[2]
    if q_TNH.stride(2) != 1 or q_TNH.stride(1) != H:
        q_TNH = q_TNH.contiguous()
    o_TNH = torch.empty((T, N, H), dtype=q_TNH.dtype, device=q_TNH.device)
    if T == 0:
        return o_TNH
    wide = q_TNH.dtype == torch.float32
    Z = (num_splits(R, K) if splits is None else splits) if uniform else 1
    part, stat = o_TNH, o_TNH
    if Z > 1:
        part = torch.empty((T, N, Z, H), dtype=torch.float32, device=q_TNH.device)
        stat = torch.empty((T, N, Z, 2), dtype=torch.float32, device=q_TNH.device)
    # A tile of many queries is wasted on rows that have one: they go beside each other.
    kinds = ("uniform",) if uniform else ("single", "longer") if R > 1 else ("all",)
    BLOCK_H, G = max(16, triton.next_power_of_2(H)), N // K
    for rows in kinds:
        few = rows in ("uniform", "single")
        own = None if rows == "single" else shape
        chosen = own or tile_shape(few, Z > 1, T, R, BLOCK_H, wide)
        BLOCK_M, BLOCK_C, warps, stages = chosen
        BLOCK_M = max(BLOCK_M, triton.next_power_of_2(G))
        _attend[(R, K, Z) if few else (T // (BLOCK_M // G) + R + 1, K, 1)](
            q_TNH,
            kv,
            part,
            stat,
            query_start_R1,
            context_len_R,
            block_table_RM,
            end_T,
            T,
            R,
            kv.stride(0),
            M,
            q_TNH.stride(0),
            scale * LOG2E,
            K=K,
            G=G,
            H=H,
            BLOCK_H=BLOCK_H,
            BLOCK_SIZE=block_size,
            BLOCK_M=BLOCK_M,
            BLOCK_Q=1 if few else BLOCK_M // G,
            BLOCK_C=BLOCK_C,
            WINDOW=window,
            SPLITS=Z,
            ROWS=rows,
            ENDS=end_T is not None and not few,
            PRECISION="ieee" if wide else "tf32",
            num_warps=warps,
            num_stages=stages,
            **chained(q_TNH, T),
        )
    if Z > 1:
        _combine[(T * N,)](
            part, stat, o_TNH, H=H, BLOCK_H=BLOCK_H, Z=Z, num_warps=1, **chained(q_TNH, T)
        )
    return o_TNH
