"""lora_add_: add every token's own low-rank delta to the output of one fused linear.

T tokens, D input width, O output width, S slices of O (fused projections), P paged adapter rows,
G groups (active adapters), n tokens and r adapter rows of one group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 16


def lora_add_(
    y_TO: Tensor,
    x_TD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    token_T: Tensor,
    group_start_G1: Tensor,
    row_P: Tensor,
    rank_start_G1: Tensor,
    out_sizes: Sequence[int],
) -> None:
    """y[t, slice s] += sum over p of (x[t] . a[s, p]) * b[p, slice s], in place.

    Group g holds the tokens `token_T[group_start_G1[g]:group_start_G1[g+1]]` and the adapter
    rows `row_P[rank_start_G1[g]:rank_start_G1[g+1]]`; either may be empty, no token is in two
    groups, and entries past the last start are ignored. `out_sizes` are the slices' widths.
    Sums are fp32 and rounded once, at the final add. Mutates `y_TO` only; a token in no group
    keeps its bits, and adapter rows that are not listed may hold anything.

    A token's bits do not depend on the other tokens: products run on tiles of TILE rows, so
    their shape is the same however many tokens a group has (one CPU GEMM was seen to give a row
    other last bits at M = 1, 2, 3, 5 than at M = 64).

    Raises ValueError for shapes that do not fit.
    """
    torch.ops.purestep.lora_add_(
        y_TO, x_TD, a_SPD, b_PO, token_T, group_start_G1, row_P, rank_start_G1, list(out_sizes)
    )


def lora_add_ref_(
    y_TO: Tensor,
    x_TD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    token_T: Tensor,
    group_start_G1: Tensor,
    row_P: Tensor,
    rank_start_G1: Tensor,
    out_sizes: Sequence[int],
) -> None:
    """The specification, in plain torch, group by group; also what runs without a GPU."""
    check_lora_add(
        y_TO, x_TD, a_SPD, b_PO, token_T, group_start_G1, row_P, rank_start_G1, out_sizes
    )
    groups, ranks = group_start_G1.tolist(), rank_start_G1.tolist()
    for start, end, low, high in zip(groups, groups[1:], ranks, ranks[1:], strict=False):
        if start == end or low == high:
            continue
        token_n, row_r = token_T[start:end], row_P[low:high]
        n = end - start
        padded = torch.nn.functional.pad(x_TD[token_n].float(), (0, 0, 0, -n % TILE))
        x_mtD = padded.view(-1, TILE, x_TD.shape[1])
        delta = [
            torch.matmul(torch.matmul(x_mtD, a_rD.float().T), b_ro.float())
            for a_rD, b_ro in zip(a_SPD[:, row_r], b_PO[row_r].split(out_sizes, -1), strict=True)
        ]
        delta_nO = torch.cat(delta, -1).flatten(0, 1)[:n]
        y_TO[token_n] = (y_TO[token_n].float() + delta_nO).to(y_TO.dtype)


def check_lora_add(
    y_TO: Tensor,
    x_TD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    token_T: Tensor,
    group_start_G1: Tensor,
    row_P: Tensor,
    rank_start_G1: Tensor,
    out_sizes: Sequence[int],
) -> None:
    (T, O), S = y_TO.shape, len(out_sizes)  # noqa: E741
    P = b_PO.shape[0]
    fits = x_TD.shape == (T, a_SPD.shape[-1]) and a_SPD.shape[:2] == (S, P) and b_PO.shape == (P, O)
    fits = fits and sum(out_sizes) == O and group_start_G1.shape == rank_start_G1.shape
    if not fits:
        raise ValueError(
            "lora_add_ wants (T,O) (T,D) (S,P,D) (P,O) and two equal start tables, out_sizes "
            f"summing to O, got {tuple(y_TO.shape)} {tuple(x_TD.shape)} {tuple(a_SPD.shape)} "
            f"{tuple(b_PO.shape)} {tuple(group_start_G1.shape)} {tuple(rank_start_G1.shape)} "
            f"{tuple(out_sizes)}"
        )


# define/impl, not custom_op: 4 us a call against 22 to 38 us, and a step makes 200 such calls.
torch.library.define(
    "purestep::lora_add_",
    "(Tensor(a!) y_TO, Tensor x_TD, Tensor a_SPD, Tensor b_PO, Tensor token_T,"
    " Tensor group_start_G1, Tensor row_P, Tensor rank_start_G1, int[] out_sizes) -> ()",
)
torch.library.impl("purestep::lora_add_", ("cpu", "cuda"), lora_add_ref_)
torch.library.register_fake("purestep::lora_add_", check_lora_add)
