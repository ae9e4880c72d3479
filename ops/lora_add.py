"""lora_add_: add every token's own low-rank delta to the output of one fused linear.

T tokens, D input width, O output width, S slices of O (fused projections), P paged adapter rows,
G groups (active adapters), n tokens and r adapter rows of one group.
"""

from collections.abc import Iterator, Sequence

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

    At one T a token's bits do not depend on the other tokens: products run on tiles of a fixed
    number of rows, however many tokens a group has (one CPU GEMM was seen to give a row other last
    bits at M = 1, 2, 3, 5 than at M = 64). Tiles share a bmm, whose results were seen not to depend
    on their number where D and the slices are multiples of 16 bytes, as in every model in use.

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
    starts, ranks = group_start_G1.tolist(), rank_start_G1.tolist()
    for tokens, rows, g in _batches(token_T.tolist(), starts, row_P.tolist(), ranks, tile):
        token_n = torch.tensor(tokens, device=y_TO.device)
        x_mtD = x_TD.index_select(0, token_n).float().view(-1, tile, x_TD.shape[1])
        delta_nO = _delta(x_mtD, a_SPD, b_PO, rows, g, out_sizes)
        y_nO = delta_nO.add_(y_TO.index_select(0, token_n)).to(y_TO.dtype)
        y_TO.index_copy_(0, token_n, y_nO)


def tile_rows(num_tokens: int) -> int:
    """Rows of every product at this T: about a decode step's share for each of four adapters."""
    return 4 if num_tokens <= 16 else 8 if num_tokens <= 32 else 16


def _batches(
    tokens: list[int], group_start: list[int], rows: list[int], rank_start: list[int], tile: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """What one bmm can do: (tokens, adapter rows, g), the tokens in whole tiles.

    Groups of one tile share a batch of g tiles if their ranks are equal; others go alone, g = 1.
    A tile is filled up with its group's first token: that token's result is then written more
    than once, with the same bits.
    """
    small: dict[int, tuple[list[int], list[int]]] = {}
    for g in range(len(group_start) - 1):
        mine = tokens[group_start[g] : group_start[g + 1]]
        mine_rows = rows[rank_start[g] : rank_start[g + 1]]
        if not mine or not mine_rows:
            continue
        mine += mine[:1] * (-len(mine) % tile)
        if len(mine) > tile:
            yield mine, mine_rows, 1
        else:
            shared, shared_rows = small.setdefault(len(mine_rows), ([], []))
            shared += mine
            shared_rows += mine_rows
    for shared, shared_rows in small.values():
        yield shared, shared_rows, len(shared) // tile


def _delta(
    x_mtD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    rows: list[int],
    g: int,
    out_sizes: Sequence[int],
) -> Tensor:
    """fp32 deltas [m * t, O] of m tiles of t tokens: one tile for each of g groups, or g = 1."""
    (S, _, D), O, r = a_SPD.shape, b_PO.shape[1], len(rows) // g  # noqa: E741
    a_SgrD, b_grO = _take(a_SPD, 1, rows).view(S, g, r, D), _take(b_PO, 0, rows).view(g, r, O)
    if spare := -r % 8:
        # At rank 1 a product is a matrix times a vector, and a token's bits were seen to depend
        # on its place in the tile: the rank is filled up with zeros.
        a_SgrD, b_grO = F.pad(a_SgrD, (0, 0, 0, spare)), F.pad(b_grO, (0, 0, 0, spare))
    m = len(x_mtD)
    a_parts = a_SgrD.transpose(2, 3).expand(-1, m, -1, -1).unbind()
    b_parts = b_grO.expand(m, -1, -1).split_with_sizes(list(out_sizes), -1)
    slices = zip(a_parts, b_parts, strict=True)
    parts = [torch.bmm(torch.bmm(x_mtD, a_mDr), b_mro) for a_mDr, b_mro in slices]
    return (parts[0] if S == 1 else torch.cat(parts, -1)).view(-1, O)


def _take(table: Tensor, dim: int, rows: list[int]) -> Tensor:
    """The rows asked for, in fp32; no copy where they follow each other."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return table.narrow(dim, rows[0], len(rows)).float()
    return table.index_select(dim, torch.tensor(rows, device=table.device)).float()


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
