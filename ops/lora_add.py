"""lora_add_: add every token's own low-rank delta to the output of one fused linear.

T tokens, D input width, O output width, S slices of O (fused projections), P paged adapter rows,
R rows of the step's adapters, C chunks of t tokens and r rows each.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens that share their products
MIN_ROWS = 16


def lora_add_(
    y_TO: Tensor,
    x_TD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    row_R: Tensor,
    foreign_TR: Tensor,
    span_C2: Tensor,
    out_sizes: Sequence[int],
) -> None:
    """y[t, slice s] += sum over r of (x[t] . a[s, row[r]]) * b[row[r], slice s], in place.

    `row_R` (int64) are the adapter rows of the step, ascending, and `foreign_TR` (bool) is true
    where row r is not token t's; `span_C2` is `chunk_spans(foreign_TR)`. `out_sizes` are the
    slices' widths. Sums are fp32 and rounded once, at the final add. Mutates `y_TO` only; a token
    without an adapter keeps its values (a -0 may become 0). Adapter rows that are not listed may
    hold anything, those of B that are listed must be finite.

    At one T a token's bits do not depend on the other tokens or their adapters: what is foreign
    enters the second product as zeros, and the sums of a product run in the same order whatever
    the number of adapter rows. That was seen to be so in MKL for 16 rows or more, in blocks of 8,
    and for widths and slices of at least 32; at 8 rows the bits are others, so none has so few.

    Raises ValueError for shapes that do not fit.
    """
    torch.ops.purestep.lora_add_(
        y_TO, x_TD, a_SPD, b_PO, row_R, foreign_TR, span_C2, list(out_sizes)
    )


def chunk_spans(foreign_TR: Tensor) -> Tensor:
    """int64 [C, 2]: for every `CHUNK` tokens, the first and last + 1 of the rows they need.

    A span is widened to `MIN_ROWS` where there are so many; it is empty where no row is needed.
    """
    R, spans = foreign_TR.shape[1], []
    for foreign_tR in foreign_TR.split(CHUNK):
        used = (~foreign_tR).any(0).nonzero().flatten().tolist()
        end = min(R, max(used[-1] + 1, used[0] + MIN_ROWS)) if used else 0
        spans.append((min(used[0], max(0, end - MIN_ROWS)), end) if used else (0, 0))
    return torch.tensor(spans, dtype=torch.int64).view(-1, 2)


def lora_add_ref_(
    y_TO: Tensor,
    x_TD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    row_R: Tensor,
    foreign_TR: Tensor,
    span_C2: Tensor,
    out_sizes: Sequence[int],
) -> None:
    """The specification, in plain torch; also what runs without a GPU."""
    check_lora_add(y_TO, x_TD, a_SPD, b_PO, row_R, foreign_TR, span_C2, out_sizes)
    rows = row_R.tolist()
    for chunk, (lo, hi) in enumerate(span_C2.tolist()):
        if lo < hi:
            tokens = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            foreign_tr = foreign_TR[tokens, lo:hi]
            _add_chunk_(y_TO[tokens], x_TD[tokens], a_SPD, b_PO, rows[lo:hi], foreign_tr, out_sizes)


def _add_chunk_(
    y_tO: Tensor,
    x_tD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    rows: list[int],
    foreign_tr: Tensor,
    out_sizes: Sequence[int],
) -> None:
    if len(rows) < MIN_ROWS:  # the step has no more
        spare = len(rows) * -(-MIN_ROWS // len(rows)) - len(rows)
        foreign_tr = F.pad(foreign_tr, (0, spare), value=True)
        rows = rows * (1 + spare // len(rows))
    a_SrD, b_rO = _take(a_SPD, 1, rows), _take(b_PO, 0, rows)
    h_Str = torch.bmm(x_tD.float().expand(len(a_SrD), -1, -1), a_SrD.mT)
    h_Str.masked_fill_(foreign_tr, 0.0)
    y32_tO = y_tO.float()
    slices = y32_tO.split_with_sizes(out_sizes, 1), b_rO.split_with_sizes(out_sizes, 1)
    for y_to, h_tr, b_ro in zip(slices[0], h_Str, slices[1], strict=True):
        y_to.addmm_(h_tr, b_ro)
    if y32_tO is not y_tO:
        y_tO.copy_(y32_tO)


def _take(table: Tensor, dim: int, rows: list[int]) -> Tensor:
    """The rows asked for, in fp32; no copy where they follow each other."""
    if rows[-1] - rows[0] == len(rows) - 1:  # they ascend
        return table.narrow(dim, rows[0], len(rows)).float()
    return table.index_select(dim, torch.tensor(rows, device=table.device)).float()


def check_lora_add(
    y_TO: Tensor,
    x_TD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    row_R: Tensor,
    foreign_TR: Tensor,
    span_C2: Tensor,
    out_sizes: Sequence[int],
) -> None:
    (T, O), S = y_TO.shape, len(out_sizes)  # noqa: E741
    P = b_PO.shape[0]
    fits = x_TD.shape == (T, a_SPD.shape[-1]) and a_SPD.shape[:2] == (S, P) and b_PO.shape == (P, O)
    fits = fits and foreign_TR.shape == (T, len(row_R)) and span_C2.shape == (-(-T // CHUNK), 2)
    if not fits or sum(out_sizes) != O:
        raise ValueError(
            "lora_add_ wants (T,O) (T,D) (S,P,D) (P,O) (R,) (T,R) and a span for every "
            f"{CHUNK} tokens, out_sizes summing to O, got {tuple(y_TO.shape)} {tuple(x_TD.shape)} "
            f"{tuple(a_SPD.shape)} {tuple(b_PO.shape)} {tuple(row_R.shape)} "
            f"{tuple(foreign_TR.shape)} {tuple(span_C2.shape)} {tuple(out_sizes)}"
        )


# define/impl, not custom_op: 4 us a call against 22 to 38 us, and a step makes 200 such calls.
torch.library.define(
    "purestep::lora_add_",
    "(Tensor(a!) y_TO, Tensor x_TD, Tensor a_SPD, Tensor b_PO, Tensor row_R, Tensor foreign_TR,"
    " Tensor span_C2, int[] out_sizes) -> ()",
)
torch.library.impl("purestep::lora_add_", ("cpu", "cuda"), lora_add_ref_)
# The fake reads no size, so that a compiled graph fits every number of tokens.
torch.library.register_fake("purestep::lora_add_", lambda *_: None)
