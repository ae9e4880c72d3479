"""paged_attention: every row's queries against its own pages, prefill chunks and decode alike.

T token rows, N query heads, K key/value heads, G = N / K, H head size, R request rows, M blocks of
the longest row, n queries of one row, c its visible keys.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.ops import kernels, native
from purestep.ops.attention_layout import Other, Singles, layout_of


def paged_attention(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
    end_T: Tensor | None = None,
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
    depend on its own n and c, and on a GPU on T and R, not on what other rows hold.

    Where tokens see each other in both directions (within an image), `end_T` is the position behind
    the last that a query sees, at most c; what is not beyond its own position, 0 say, changes
    nothing. Every query's mask stays an interval: `window` bounds it from below as ever. A row's
    last query has nothing behind it, so a lone one needs no end.

    Raises ValueError for shapes that do not fit.
    """
    return torch.ops.purestep.paged_attention(
        q_TNH, kv, query_start_R1, context_len_R, block_table_RM, scale, window, end_T
    )


def paged_attention_ref(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
    end_T: Tensor | None = None,
) -> Tensor:
    """The specification, in plain torch; also what runs without a GPU or a compiler.

    Rows with one query go together where their contexts round up to one length, the others one by
    one: a decode step of 16 rows took 65 of its 345 ms in 480 calls for single rows.
    """
    tables = query_start_R1, context_len_R, block_table_RM
    check_paged_attention(q_TNH, kv, *tables, scale, window, end_T)
    o_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    lone = "together" if q_TNH.dtype == torch.float32 else "alone"
    _attend_(o_TNH, q_TNH, kv, tables, scale, window, end_T, lone)
    return o_TNH


def _on_cpu(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
    end_T: Tensor | None = None,
) -> Tensor:
    """The reference, with our own code for rows that have one query."""
    tables = query_start_R1, context_len_R, block_table_RM
    heads = (q_TNH.stride(2), q_TNH.stride(1)) == (1, q_TNH.shape[2])
    if not (native.takes(kv) and q_TNH.dtype == torch.float32 and heads):
        return paged_attention_ref(q_TNH, kv, *tables, scale, window, end_T)
    check_paged_attention(q_TNH, kv, *tables, scale, window, end_T)
    o_TNH = torch.empty(q_TNH.shape)
    tables32 = (table.int().contiguous() for table in tables)
    done = native.attend_(o_TNH, q_TNH, kv, *tables32, scale, window)
    if done < len(q_TNH):
        _attend_(o_TNH, q_TNH, kv, tables, scale, window, end_T, "elsewhere")
    return o_TNH


def _attend_(
    o_TNH: Tensor,
    q_TNH: Tensor,
    kv: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    scale: float,
    window: int,
    end_T: Tensor | None,
    lone: str,
) -> None:
    """Every row, or those that `lone` leaves; padding gets zeros."""
    q_NTH, whole = q_TNH.transpose(0, 1), _places(kv)
    # CPU kernels were seen to give other last bits at addresses that are not a multiple of 16.
    # Head sizes in use never make such; the others are copied, so that no row's place matters.
    aligned = not (kv[0, 0].nbytes % 64 or q_TNH.stride(0) * q_TNH.element_size() % 64)
    options = window, aligned, lone, tuple(kv.shape[2:]), kv.device
    layout = layout_of(*tables, options)
    ends = None if end_T is None else end_T.cpu().numpy()
    for row in layout.others:
        k_KcH, v_KcH = _visible(kv, whole if aligned else None, row.blocks, row.begin, row.length)
        q_NnH = q_NTH[:, row.start : row.end] if aligned else q_NTH[:, row.start : row.end].clone()
        mask_nc = None if ends is None else _widened(ends[row.start : row.end], row, window)
        o_NnH = _attend(q_NnH, k_KcH, v_KcH, scale, window, mask_nc)
        o_TNH[row.start : row.end] = o_NnH.transpose(0, 1)
    for rows in layout.singles:
        _attend_singles_(o_TNH, q_TNH, kv, rows, scale)
    if layout.num_tokens < len(o_TNH):
        o_TNH[layout.num_tokens :] = 0


def _places(kv: Tensor) -> tuple[Tensor, ...]:
    """Keys and values, [K, places, H] each: views, places in the order of the blocks."""
    return kv.flatten(1, 2).transpose(1, 2).unbind()


def _visible(
    kv: Tensor, whole: tuple[Tensor, ...] | None, blocks: list[int], begin: int, length: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of `length` places from `begin` on. Blocks that are neighbours are not
    copied (a view of `whole` takes 4 us at any length, gathering 64 blocks of a 135M model 75)."""
    low, high = blocks[0], blocks[-1] + 1
    if whole and high - low == len(blocks) and blocks == list(range(low, high)):
        (k_KpH, v_KpH), begin = whole, begin + low * kv.shape[2]
    else:
        k_KpH, v_KpH = _places(kv.index_select(1, torch.tensor(blocks, device=kv.device)))
    return k_KpH.narrow(1, begin, length), v_KpH.narrow(1, begin, length)


def _attend_singles_(o_TNH: Tensor, q_TNH: Tensor, kv: Tensor, rows: Singles, scale: float) -> None:
    K, H = kv.shape[3:]
    places = kv.index_select(1, rows.block_Rm).view(2, -1, K, H)
    # What an unseen place holds may be NaN, which no mask and no weight of zero takes away.
    places.view(2, -1, K * H).index_fill_(1, rows.unseen, 0.0)
    k_RKpH, v_RKpH = places.unflatten(1, (len(rows.token_R), -1)).transpose(2, 3)
    o_RN1H = F.scaled_dot_product_attention(
        q_TNH.index_select(0, rows.token_R)[:, :, None],
        k_RKpH,
        v_RKpH,
        attn_mask=rows.mask_R11p,
        scale=scale,
        enable_gqa=q_TNH.shape[1] != K,
    )
    o_TNH.index_copy_(0, rows.token_R, o_RN1H.squeeze(2))


def _attend(
    q_NnH: Tensor,
    k_KcH: Tensor,
    v_KcH: Tensor,
    scale: float,
    window: int,
    mask_nc: Tensor | None = None,
) -> Tensor:
    """One row. Its queries are the last n of the c positions; `mask_nc` takes the place of the
    causal mask."""
    n, c = q_NnH.shape[1], k_KcH.shape[1]
    # torch aligns its own mask with the first key, not the last
    causal = mask_nc is None and 1 < n == c and not window
    if mask_nc is None and not causal and n > 1:
        mask_nc = _mask(n, c, window, q_NnH.device)
    mask_nc = None if mask_nc is None else mask_nc.to(q_NnH.device)
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


def _widened(end_n: np.ndarray, row: Other, window: int) -> Tensor | None:
    """The mask of a row's n queries where one of them sees beyond itself, else None: it is then
    computed as it would be without ends."""
    place_c = np.arange(row.first, row.first + row.length)
    own_n = place_c[len(place_c) - len(end_n) :]
    if (end_n <= own_n + 1).all():
        return None
    mask_nc = place_c < np.maximum(own_n + 1, end_n)[:, None]
    if window:
        mask_nc &= place_c > own_n[:, None] - window
    return torch.from_numpy(mask_nc)


def check_paged_attention(
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int = 0,
    end_T: Tensor | None = None,
) -> None:
    """Raises ValueError for shapes that do not fit."""
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
    if end_T is not None and end_T.shape != q_TNH.shape[:1]:
        raise ValueError(
            f"paged_attention wants end_T of shape ({len(q_TNH)},), got {tuple(end_T.shape)}"
        )


@kernels.named("paged_attention")
def _on_cuda(*args: Any) -> Tensor:
    if not kernels.usable():
        return paged_attention_ref(*args)
    check_paged_attention(*args)
    from purestep.ops.kernels.attention import launch

    return launch(*args)


@kernels.named("decode_attention")
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
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.decode_attention(
            q_TNH, kv, query_start_R1, context_len_R, block_table_RM, scale, window
        )
    args = q_TNH, kv, query_start_R1, context_len_R, block_table_RM, scale, window
    if not q_TNH.is_cuda:
        return paged_attention(*args)
    from purestep.ops.kernels.attention import launch

    return launch(*args, uniform=True)


# define/impl, not custom_op: 4 us a call against 22 to 38 us, and a step makes 200 such calls.
torch.library.define(
    "purestep::paged_attention",
    "(Tensor q_TNH, Tensor kv, Tensor query_start_R1, Tensor context_len_R,"
    " Tensor block_table_RM, float scale, int window=0, Tensor? end_T=None) -> Tensor",
)
torch.library.impl("purestep::paged_attention", "cpu", _on_cpu)
torch.library.impl("purestep::paged_attention", "cuda", _on_cuda)
torch.library.define(
    "purestep::decode_attention",
    "(Tensor q_TNH, Tensor kv, Tensor query_start_R1, Tensor context_len_R,"
    " Tensor block_table_RM, float scale, int window) -> Tensor",
)
torch.library.impl("purestep::decode_attention", ("cpu", "cuda"), decode_attention)
# The fakes read no size but q's, so that a compiled graph fits every number of rows and blocks.
for _name in ("paged_attention", "decode_attention"):
    torch.library.register_fake(
        f"purestep::{_name}", lambda q_TNH, *_: q_TNH.new_empty(q_TNH.shape)
    )
