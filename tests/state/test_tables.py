"""Block tables in pages say what whole arrays say."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from purestep.state.canonical import from_plain, to_plain
from purestep.state.request import frozen
from purestep.state.tables import Tables, block_matrix, grown, newest, same_tables, tables_of

PAGES = st.integers(1, 4)
LENGTHS = st.lists(st.integers(0, 11), min_size=1, max_size=4)


def rows_of(tables: Tables) -> list[list[int]]:
    assert not any(table.flags.writeable for table in (*tables, tables.newest_RK, *tables.pages))
    return [table.tolist() for table in tables]


@given(PAGES, LENGTHS, st.data())
def test_growing_is_appending(page: int, lengths: list[int], data: st.DataObject) -> None:
    model, number = [[100 * i + n for n in range(k)] for i, k in enumerate(lengths)], 1000
    tables, old = tables_of(model, page), []
    for _ in range(data.draw(st.integers(1, 5))):
        old.append((tables, [list(table) for table in model]))
        need = data.draw(st.lists(st.integers(0, 6), min_size=len(model), max_size=len(model)))
        blocks = list(range(number, number + sum(need)))
        number += len(blocks)
        growing = np.flatnonzero(need)
        tables = grown(tables, growing, np.array(need, np.int32)[growing], frozen(blocks))
        for table, count in zip(model, need, strict=True):
            table += [blocks.pop(0) for _ in range(count)]
    for kept, wanted in [*old, (tables, model)]:
        assert rows_of(kept) == wanted
        assert kept.length_R.tolist() == [len(table) for table in wanted]
        # The form follows from the content, however it came about, so digests of states agree.
        assert to_plain(kept) == to_plain(tables_of(wanted, page))
        assert rows_of(from_plain(to_plain(kept))) == wanted


@given(PAGES, LENGTHS)
def test_views_of_all_rows(page: int, lengths: list[int]) -> None:
    model = [[1 + 100 * i + n for n in range(k)] for i, k in enumerate(lengths)]
    tables = tables_of(model, page)
    some = [row for row, table in enumerate(model) if table]
    assert newest(tables, np.array(some, np.intp)).tolist() == [model[row][-1] for row in some]
    width, height = max(lengths) + 1, len(model) + 1
    matrix = block_matrix(tables, height, width)
    assert matrix.dtype == np.int32
    assert matrix.tolist() == [t + [0] * (width - len(t)) for t in [*model, []]]


@given(PAGES, LENGTHS, st.data())
def test_same_tables_hold_the_same(page: int, lengths: list[int], data: st.DataObject) -> None:
    model = [list(range(k)) for k in lengths]
    assert same_tables(tables_of(model, page), tables_of(model, page))
    row = data.draw(st.integers(0, len(model) - 1))
    if model[row]:
        model[row][data.draw(st.integers(0, len(model[row]) - 1))] = 99
    else:
        model[row] = [0]
    before = [list(range(k)) for k in lengths]
    assert not same_tables(tables_of(model, page), tables_of(before, page))
