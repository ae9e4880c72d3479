"""Who attends to what in paged attention on a CPU: which rows go alone, which together, and how.

R request rows, M blocks of the longest row, m blocks and p places of each row of a group, K
key/value heads, H head size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_COPY_BYTES = 4 << 20  # of keys and values that are copied at a time: they stay in a cache

# Window, whether addresses are aligned, how lone queries go ("alone", "together", or not at all:
# "elsewhere"), the sizes of a block, the device.
Options = tuple[int, bool, str, tuple[int, ...], torch.device]


class Other(NamedTuple):
    """A row that goes alone: its tokens, and which places of which blocks it sees."""

    start: int
    end: int
    blocks: list[int]
    begin: int  # the first place it sees, in the first of these blocks
    first: int  # that place's position
    length: int


class Singles(NamedTuple):
    """R rows with one query, which go together: p places are copied for each."""

    token_R: Tensor  # int64
    block_Rm: Tensor  # flat, m blocks of each row
    unseen: Tensor  # places among the R * p copied ones that the rows do not see
    mask_R11p: Tensor  # float32: 0 where a row sees a place, else minus infinity


class Layout(NamedTuple):
    """Who attends to what: the same in every layer of a step, whatever the keys and values hold."""

    num_tokens: int
    others: list[Other]
    singles: list[Singles]


def layout_of(
    query_start_R1: Tensor, context_len_R: Tensor, block_table_RM: Tensor, options: Options
) -> Layout:
    """The layout, kept with the block table: made anew for each of 30 layers it took 0.6 ms each.

    The tables may be changed in place, so it is used for equal ones alone.
    """
    tables = [t.cpu().numpy() for t in (query_start_R1, context_len_R, block_table_RM)]
    known = getattr(block_table_RM, "_purestep_layouts", None)
    if known is None or not all(map(np.array_equal, known[0], tables)):
        known = [table.copy() for table in tables], {}
        block_table_RM._purestep_layouts = known
    layouts = known[1]
    if options not in layouts:
        layouts[options] = _layout(*tables, options)
    return layouts[options]


def _layout(
    start_R1: np.ndarray, context_R: np.ndarray, table_RM: np.ndarray, options: Options
) -> Layout:
    window, aligned, lone, (size, K, H), device = options
    count_R, others = np.diff(start_R1), []
    for r in np.flatnonzero(count_R > (0 if lone == "alone" else 1)).tolist():
        start, end, context = int(start_R1[r]), int(start_R1[r + 1]), int(context_R[r])
        first = max(0, context - (end - start) + 1 - window) if window else 0
        blocks = table_RM[r, first // size : -(-context // size)].tolist()
        others.append(Other(start, end, blocks, first % size, first, context - first))
    singles = np.flatnonzero((count_R == 1) & (lone == "together"))
    tables = table_RM[singles], start_R1[singles], context_R[singles]
    # Where addresses matter each row goes alone.
    most = MAX_COPY_BYTES // (8 * size * K * H) if aligned else 0  # blocks: 4 bytes, k and v
    groups = list(_groups(*tables, window, size, most, device)) if len(singles) else []
    return Layout(int(start_R1[-1]), others, groups)


def _groups(
    table_RM: np.ndarray,
    token_R: np.ndarray,
    context_R: np.ndarray,
    window: int,
    size: int,
    most_blocks: int,
    device: torch.device,
) -> Iterator[Singles]:
    """Rows whose places round up to one number, which depends on their own context alone, as their
    bits then do; at most `most_blocks` blocks together, but one row at least."""
    skipped_R = np.maximum(context_R - window, 0) // size if window else np.zeros_like(context_R)
    end_R = context_R - skipped_R * size
    rounded_R = end_R + -end_R % np.where(end_R <= 256, 32, 128)
    blocks_R = -(-rounded_R // size)
    for m in sorted(set(blocks_R.tolist())):
        most = max(1, most_blocks // m)
        same = np.flatnonzero(blocks_R == m)
        for at in range(0, len(same), most):
            rows = same[at : at + most]
            end_R1, column_m, place_p = end_R[rows, None], np.arange(m), np.arange(m * size)
            column_Rm = np.where(column_m * size < end_R1, column_m, 0) + skipped_R[rows, None]
            seen_Rp = place_p < end_R1
            if window:
                seen_Rp &= place_p >= end_R1 - window
            yield Singles(
                token_R=torch.tensor(token_R[rows], dtype=torch.int64, device=device),
                block_Rm=torch.tensor(table_RM[rows[:, None], column_Rm].ravel(), device=device),
                unseen=torch.tensor(np.flatnonzero(~seen_Rp), device=device),
                mask_R11p=torch.tensor(
                    np.where(seen_Rp, 0, -np.inf)[:, None, None], dtype=torch.float32, device=device
                ),
            )
