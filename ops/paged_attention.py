"""paged_attention: every row's queries against its own pages, prefill chunks and decode alike.

T token rows, N query heads, K key/value heads, H head size, R request rows, M blocks of the
longest row, n queries of one row, c its visible keys.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


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
    o_TNH = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    q_1NTH, whole = q_TNH.transpose(0, 1)[None], _places(kv)
    # CPU kernels were seen to give other last bits at addresses that are not a multiple of 16.
    # Head sizes in use never make such; the others are copied, so that no row's place matters.
    aligned = not (kv[0, 0].nbytes % 64 or q_TNH.stride(0) * q_TNH.element_size() % 64)
    starts, contexts = query_start_R1.tolist(), context_len_R.tolist()
    tables = block_table_RM.cpu().numpy()
    for r, context in enumerate(contexts):
        start, end = starts[r], starts[r + 1]
        if start == end:
            continue
        first = max(0, context - (end - start) + 1 - window) if window else 0
        k_1KcH, v_1KcH = _visible(kv, whole if aligned else None, tables[r], first, context)
        q_1NnH = q_1NTH[:, :, start:end] if aligned else q_1NTH[:, :, start:end].clone()
        o_1NnH = _attend(q_1NnH, k_1KcH, v_1KcH, scale, window)
        o_TNH[start:end] = o_1NnH[0].transpose(0, 1)
    return o_TNH


def _places(kv: Tensor) -> tuple[Tensor, ...]:
    """Keys and values, [1, K, places, H] each: views, places in the order of the blocks."""
    return kv.flatten(1, 2).transpose(1, 2).split(1)


def _visible(
    kv: Tensor, whole: tuple[Tensor, ...] | None, table: np.ndarray, first: int, context: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of positions first to context - 1. Blocks that are neighbours are not
    copied (a view of `whole` takes 4 us at any length, gathering 64 blocks of a 135M model 75)."""
    block_size = kv.shape[2]
    skipped = first // block_size
    blocks = table[skipped : -(-context // block_size)].tolist()
    low, high = blocks[0], blocks[-1] + 1
    if whole and high - low == len(blocks) and blocks == list(range(low, high)):
        (k_1KpH, v_1KpH), begin = whole, first + (low - skipped) * block_size
    else:
        index = torch.tensor(blocks, device=kv.device)
        (k_1KpH, v_1KpH), begin = _places(kv.index_select(1, index)), first - skipped * block_size
    end = begin + context - first
    return k_1KpH[:, :, begin:end], v_1KpH[:, :, begin:end]


def _attend(q_1NnH: Tensor, k_1KcH: Tensor, v_1KcH: Tensor, scale: float, window: int) -> Tensor:
    """One row. Its queries are the last n of the c positions."""
    n, c = q_1NnH.shape[2], k_1KcH.shape[2]
    causal = 1 < n == c and not window  # torch aligns this mask with the first key, not the last
    mask_nc = None if causal or n == 1 else _mask(n, c, window, q_1NnH.device)
    return F.scaled_dot_product_attention(
        q_1NnH,
        k_1KcH,
        v_1KcH,
        attn_mask=mask_nc,
        is_causal=causal,
        scale=scale,
        enable_gqa=q_1NnH.shape[1] != k_1KcH.shape[1],
    )


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


# define/impl, not custom_op: 4 us a call against 22 to 38 us, and a step makes 200 such calls.
torch.library.define(
    "purestep::paged_attention",
    "(Tensor q_TNH, Tensor kv, Tensor query_start_R1, Tensor context_len_R,"
    " Tensor block_table_RM, float scale, int window=0) -> Tensor",
)
torch.library.impl("purestep::paged_attention", ("cpu", "cuda"), paged_attention_ref)
# The fake reads no size but q's, so that a compiled graph fits every number of rows and blocks.
torch.library.register_fake(
    "purestep::paged_attention", lambda q_TNH, *_: q_TNH.new_empty(q_TNH.shape)
)
