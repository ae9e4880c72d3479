"""The block tables of running rows, which grow without a copy of what they hold.

R rows, K blocks in a page.
"""

from collections.abc import Sequence

import numpy as np

from purestep.state.pytree import tree
from purestep.state.request import frozen
from purestep.state.scores import locked


@tree
class Tables:
    """The KV blocks of each row, in the order of its tokens; `tables[row]` puts one together.

    The newest 1 to K blocks of all rows stand in one matrix, block k of a row at k % K, so that a
    step in which rows grow copies that and no table. What stands before them is a row's own array,
    made anew once in K blocks. Which is where follows from the lengths alone.
    """

    pages: tuple[np.ndarray, ...]  # int32, (length - 1) // K * K blocks
    newest_RK: np.ndarray  # int32, those behind; 0 where there is none yet
    length_R: np.ndarray  # int32

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, row: int) -> np.ndarray:
        pages = self.pages[row]
        rest = int(self.length_R[row]) - len(pages)
        return locked(np.concatenate((pages, self.newest_RK[row, :rest])))


def tables_of(tables: Sequence[Sequence[int] | np.ndarray], page: int) -> Tables:
    """Whole tables, in pages of `page` blocks."""
    newest_RK = np.zeros((len(tables), page), np.int32)
    length_R, pages = frozen([len(table) for table in tables]), []
    for row, table in enumerate(tables):
        full = _num_paged(len(table), page)
        pages.append(frozen(table[:full]))
        newest_RK[row, : len(table) - full] = table[full:]
    return Tables(pages=tuple(pages), newest_RK=locked(newest_RK), length_R=length_R)


def _num_paged(length: int, page: int) -> int:
    return max(length - 1, 0) // page * page


def grown(tables: Tables, row_G: np.ndarray, need_G: np.ndarray, blocks_N: np.ndarray) -> Tables:
    """With `need_G` more blocks for the different rows `row_G`, out of `blocks_N` in order."""
    K, pages, newest_RK = tables.newest_RK.shape[1], tables.pages, tables.newest_RK.copy()
    length_R, row_N, place_N = tables.length_R.copy(), row_G, tables.length_R[row_G]
    length_R[row_G] += need_G
    if len(row_G) < len(blocks_N):
        first_G = np.cumsum(need_G) - need_G
        place_N = np.repeat(place_N - first_G, need_G) + np.arange(len(blocks_N))
        row_N = np.repeat(row_G, need_G)
    column_N = place_N % K
    newest_RK.reshape(-1)[row_N * K + column_N] = blocks_N
    turned = row_N[column_N == 0].tolist()  # those that begin a page
    if turned:
        pages = list(pages)
    for row in dict.fromkeys(turned):
        table = np.concatenate((tables[row], blocks_N[row_N == row]))
        full = _num_paged(len(table), K)
        pages[row] = locked(table[:full])
        newest_RK[row] = 0
        newest_RK[row, : len(table) - full] = table[full:]
    return Tables(
        pages=tuple(pages),
        newest_RK=locked(newest_RK),
        length_R=locked(length_R),
    )


def newest(tables: Tables, rows: np.ndarray) -> np.ndarray:
    """The last block of each of these rows, which have one."""
    K = tables.newest_RK.shape[1]
    return tables.newest_RK.reshape(-1)[rows * K + (tables.length_R[rows] - 1) % K]


def block_matrix(tables: Tables, num_rows: int, num_blocks: int) -> np.ndarray:
    """int32 [num_rows, num_blocks]: all tables from the left, zeros behind them."""
    K = tables.newest_RK.shape[1]
    table_RM = np.zeros((num_rows, num_blocks), np.int32)
    for row, pages in enumerate(tables.pages):
        if len(pages):
            table_RM[row, : len(pages)] = pages
    paged_R = np.maximum(tables.length_R - 1, 0) // K * K
    row_N, column_N = (np.arange(K) < (tables.length_R - paged_R)[:, None]).nonzero()
    table_RM[row_N, paged_R[row_N] + column_N] = tables.newest_RK[row_N, column_N]
    return table_RM


def same_tables(one: Tables, other: Tables) -> bool:
    """Whether they hold the same blocks. Pages that both share are not looked at."""
    arrays = ((getattr(one, n), getattr(other, n)) for n in ("length_R", "newest_RK"))
    return all(np.array_equal(a, b) for a, b in arrays) and all(
        a is b or np.array_equal(a, b) for a, b in zip(one.pages, other.pages, strict=True)
    )
