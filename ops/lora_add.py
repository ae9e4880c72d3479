"""lora_add_: add every token's own low-rank delta to the output of one fused linear.

T tokens, D input width, O output width, S slices of O (fused projections), P paged adapter rows,
G groups (active adapters), n tokens and r adapter rows of one group.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


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
    tile = tile_rows(len(y_TO))
    token_T, row_P = token_T.cpu().numpy(), row_P.cpu().numpy()
    for tokens, rows in _batches(
        token_T, group_start_G1.tolist(), row_P, rank_start_G1.tolist(), tile
    ):
        token_n = torch.from_numpy(tokens).to(y_TO.device, torch.int64)  # index_copy_ asks for it
        delta_nO = _delta(x_TD.index_select(0, token_n), a_SPD, b_PO, rows, tile, out_sizes)
        y_nO = y_TO.index_select(0, token_n).float() + delta_nO
        y_TO.index_copy_(0, token_n, y_nO.to(y_TO.dtype))


def tile_rows(num_tokens: int) -> int:
    """Rows of every product at this T: about a decode step's share for each of four adapters."""
    return 4 if num_tokens <= 16 else 8 if num_tokens <= 32 else 16


def _batches(
    token_T: np.ndarray, group_start: list[int], row_P: np.ndarray, rank_start: list[int], tile: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Products that one bmm can do: (tokens [n], adapter rows [g, r]), n a multiple of g * tile.

    Groups that fit into one tile share a batch if their ranks are equal; the others go alone.
    A tile is filled up with its group's first token: that token's result is then written more
    than once, with the same bits.
    """
    small: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for g in range(len(group_start) - 1):
        tokens = token_T[group_start[g] : group_start[g + 1]]
        rows = row_P[rank_start[g] : rank_start[g + 1]]
        if len(tokens) == 0 or len(rows) == 0:
            continue
        full = np.full(-(-len(tokens) // tile) * tile, tokens[0])
        full[: len(tokens)] = tokens
        if len(full) == tile:
            small.setdefault(len(rows), []).append((full, rows))
        else:
            yield full, rows[None]
    for groups in small.values():
        yield np.concatenate([full for full, _ in groups]), np.stack([rows for _, rows in groups])


def _delta(
    x_nD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    rows_gr: np.ndarray,
    tile: int,
    out_sizes: Sequence[int],
) -> Tensor:
    """fp32 deltas of n tokens, cut into m tiles of t: either g = 1, or one tile for each group."""
    x_mtD = x_nD.float().view(-1, tile, x_nD.shape[1])
    b_grO = _take(b_PO, rows_gr).expand(len(x_mtD), -1, -1)
    parts = []
    for a_PD, b_gro in zip(a_SPD, b_grO.split(list(out_sizes), -1), strict=True):
        a_grD = _take(a_PD, rows_gr).expand(len(x_mtD), -1, -1)
        parts.append(torch.bmm(torch.bmm(x_mtD, a_grD.transpose(1, 2)), b_gro))
    return torch.cat(parts, -1).flatten(0, 1)


def _take(table_PX: Tensor, rows_gr: np.ndarray) -> Tensor:
    """fp32 [g, r, X]: the rows asked for, without a copy where they follow each other. The rank is
    filled up with zeros to a multiple of 8: at rank 1 the product is a matrix times a vector,
    where a token's bits were seen to depend on its place in the tile."""
    rows = rows_gr.ravel()
    if (rows[1:] - rows[:-1] == 1).all():
        taken = table_PX[int(rows[0]) : int(rows[-1]) + 1]
    else:
        taken = table_PX.index_select(0, torch.from_numpy(rows).to(table_PX.device))
    taken_grX = taken.float().view(*rows_gr.shape, -1)
    return F.pad(taken_grX, (0, 0, 0, spare)) if (spare := -rows_gr.shape[1] % 8) else taken_grX


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
# The fake reads no size, so that a compiled graph fits every number of tokens.
torch.library.register_fake("purestep::lora_add_", lambda *_: None)
