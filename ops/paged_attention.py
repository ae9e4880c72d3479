"""paged_attention: every row's queries against its own pages, prefill chunks and decode alike.

T token rows, N query heads, K key/value heads, G = N / K, H head size, R request rows, M blocks of
the longest row, n queries of one row, c its visible keys.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.ops import kernels


def paged_attention(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention over paged keys and values, GQA; returns o_TNH, contiguous.

    `kv` is [2, num_blocks, block_size, K, H]: 0 keys, 1 values, the row's own tokens already
    written. Row r owns queries `query_start_R1[r]:query_start_R1[r+1]` (n of them) and sees the
    first `context_len_R[r]` (c) places of the blocks `block_table_RM[r]`; its i-th query has
    position c - n + i and sees no later position, and with `window` > 0 only the last `window`
    of those, itself included. Tokens after the last row (padding) give zeros; a row may have no
    query. Index tensors are int32 or int64.

    Nothing but the visible keys of a row is read into its result: other rows, unused blocks, the
    rest of the last block and table entries past the context may hold anything. A row's bits
    depend on its own n and c, not on the batch around it.

    Every query's mask is an interval of positions; spans that see each other in both directions
    (images) would widen intervals by an optional table of (start, end) per row, nothing else.

    Raises ValueError for shapes that do not fit.
    """
    return torch.ops.purestep.paged_attention(
        q_TNH, kv, query_start_R1, context_len_R, block_table_RM, scale, window
    )


def paged_attention_ref(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """The specification, in plain torch, row by row; also what runs without a GPU."""
    check_paged_attention(q_TNH, kv, query_start_R1, context_len_R, block_table_RM, scale, window)
    o_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    q_NTH, whole = q_TNH.transpose(0, 1), _places(kv)
    # CPU kernels were seen to give other last bits at addresses that are not a multiple of 16.
    # Head sizes in use never make such; the others are copied, so that no row's place matters.
    aligned = not (kv[0, 0].nbytes % 64 or q_TNH.stride(0) * q_TNH.element_size() % 64)
    starts, contexts = query_start_R1.tolist(), context_len_R.tolist()
    tables, grouped = block_table_RM.tolist(), (kv.shape[3], -1)
    q_TKGH, o_TKGH = q_TNH.unflatten(1, grouped), o_TNH.unflatten(1, grouped)
    for r, context in enumerate(contexts):
        start, end = starts[r], starts[r + 1]
        if start == end:
            continue
        first = max(0, context - (end - start) + 1 - window) if window else 0
        k_KcH, v_KcH = _visible(kv, whole if aligned else None, tables[r], first, context)
        if end - start == 1 and q_TNH.dtype == torch.float32:
            _attend_one_(o_TKGH[start], q_TKGH[start], k_KcH, v_KcH, scale)
            continue
        q_NnH = q_NTH[:, start:end] if aligned else q_NTH[:, start:end].clone()
        o_NnH = _attend(q_NnH, k_KcH, v_KcH, scale, window)
        o_TNH[start:end] = o_NnH.transpose(0, 1)
    o_TNH[starts[-1] :] = 0
    return o_TNH


def _places(kv: Tensor) -> tuple[Tensor, ...]:
    """Keys and values, [K, places, H] each: views, places in the order of the blocks."""
    return kv.flatten(1, 2).transpose(1, 2).unbind()


def _visible(
    kv: Tensor, whole: tuple[Tensor, ...] | None, table: list[int], first: int, context: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of positions first to context - 1. Blocks that are neighbours are not
    copied (a view of `whole` takes 4 us at any length, gathering 64 blocks of a 135M model 75)."""
    block_size = kv.shape[2]
    skipped = first // block_size
    blocks = table[skipped : -(-context // block_size)]
    low, high = blocks[0], blocks[-1] + 1
    if whole and high - low == len(blocks) and blocks == list(range(low, high)):
        (k_KpH, v_KpH), begin = whole, first + (low - skipped) * block_size
    else:
        index = torch.tensor(blocks, device=kv.device)
        (k_KpH, v_KpH), begin = _places(kv.index_select(1, index)), first - skipped * block_size
    length = context - first
    return k_KpH.narrow(1, begin, length), v_KpH.narrow(1, begin, length)


def _attend_one_(o_KGH: Tensor, q_KGH: Tensor, k_KcH: Tensor, v_KcH: Tensor, scale: float) -> None:
    """One row with one query, which sees all c positions; G query heads share a key head."""
    nothing = q_KGH.new_empty(())
    score_KGc = torch.baddbmm(nothing, q_KGH, k_KcH.mT, beta=0, alpha=scale)
    torch.bmm(torch.softmax(score_KGc, -1), v_KcH, out=o_KGH)


def _attend(q_NnH: Tensor, k_KcH: Tensor, v_KcH: Tensor, scale: float, window: int) -> Tensor:
    """One row. Its queries are the last n of the c positions."""
    n, c = q_NnH.shape[1], k_KcH.shape[1]
    causal = 1 < n == c and not window  # torch aligns this mask with the first key, not the last
    mask_nc = None if causal or n == 1 else _mask(n, c, window, q_NnH.device)
    return F.scaled_dot_product_attention(
        q_NnH[None],
        k_KcH[None],
        v_KcH[None],
        attn_mask=mask_nc,
        is_causal=causal,
        scale=scale,
        enable_gqa=q_NnH.shape[0] != k_KcH.shape[0],
    )[0]


def _mask(n: int, c: int, window: int, device: torch.device) -> Tensor:
    """True where visible: the diagonal ends in the lower right corner."""
    mask_nc = torch.ones(n, c, dtype=torch.bool, device=device).tril(c - n)
    return mask_nc.triu(c - n + 1 - window) if window else mask_nc


def check_paged_attention(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
) -> None:
    pages = kv.dim() == 5 and kv.shape[0] == 2 and q_TNH.dim() == 3
    pages = pages and kv.shape[4] == q_TNH.shape[2] and q_TNH.shape[1] % kv.shape[3] == 0
    rows = query_start_R1.dim() == context_len_R.dim() == 1 and block_table_RM.dim() == 2
    rows = rows and query_start_R1.shape[0] == context_len_R.shape[0] + 1
    if not pages or not rows or block_table_RM.shape[0] != context_len_R.shape[0] or window < 0:
        raise ValueError(
            "paged_attention wants (T,N,H) (2,blocks,block_size,K,H) (R+1,) (R,) (R,M), K dividing "
            f"N, window >= 0, got {tuple(q_TNH.shape)} {tuple(kv.shape)} "
            f"{tuple(query_start_R1.shape)} {tuple(context_len_R.shape)} "
            f"{tuple(block_table_RM.shape)} {window=}"
        )


def _on_cuda(*args: Any) -> Tensor:
    if not kernels.usable():
        return paged_attention_ref(*args)
    check_paged_attention(*args)
    from purestep.ops.kernels.attention import launch

    return launch(*args)


def decode_attention(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """`paged_attention` where row r's one query is token r, or r is padding and has no context.

    On a GPU a small batch's keys are split over programs and joined in a fixed order; how often is
    a function of R and K.
    """
    args = q_TNH, kv, query_start_R1, context_len_R, block_table_RM, scale, window
    if not q_TNH.is_cuda:
        return paged_attention(*args)
    from purestep.ops.kernels.attention import launch

    return launch(*args, uniform=True)


# define/impl, not custom_op: 4 us a call against 22 to 38 us, and a step makes 200 such calls.
torch.library.define(
    "purestep::paged_attention",
    "(Tensor q_TNH, Tensor kv, Tensor query_start_R1, Tensor context_len_R,"
    " Tensor block_table_RM, float scale, int window=0) -> Tensor",
)
torch.library.impl("purestep::paged_attention", "cpu", paged_attention_ref)
torch.library.impl("purestep::paged_attention", "cuda", _on_cuda)
# The fake reads no size but q's, so that a compiled graph fits every number of rows and blocks.
torch.library.register_fake(
    "purestep::paged_attention", lambda q_TNH, *_: q_TNH.new_empty(q_TNH.shape)
)
