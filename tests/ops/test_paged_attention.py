"""paged_attention against float64 loops, and its laws: a row sees its own visible keys alone."""

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from purestep.ops.paged_attention import paged_attention
from tests.ops.forms import both_forms  # noqa: F401

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows as (queries, context): the row's last `queries` positions are asked for."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 3
    heads: tuple[int, int] = (4, 2)  # query heads, key/value heads
    head_dim: int = 8
    window: int = 0
    padding: int = 0
    seed: int = 0
    scattered: bool = True


def keys_and_values(case: Case, r: int) -> Tensor:
    """[2, context, K, H] of row r, the same wherever the row is put."""
    g = torch.Generator().manual_seed(1000 * case.seed + 7 * case.rows[r][1])
    return torch.randn(2, case.rows[r][1], case.heads[1], case.head_dim, generator=g)


def queries(case: Case, r: int) -> Tensor:
    n, c = case.rows[r]
    g = torch.Generator().manual_seed(1000 * case.seed + 7 * c + 1)
    return torch.randn(c, case.heads[0], case.head_dim, generator=g)[c - n :]


def arguments(case: Case, garbage: float = NAN) -> tuple:
    """Pages are all `garbage` but for the visible places; so are padding queries."""
    size, H = case.block_size, case.head_dim
    needs = [-(-c // size) for _, c in case.rows]
    total = sum(needs) + 2
    g = torch.Generator().manual_seed(case.seed)
    free = (torch.randperm(total, generator=g) if case.scattered else torch.arange(total)).tolist()
    kv = torch.full((2, total, size, case.heads[1], H), garbage)
    table = torch.full((len(needs), max(needs, default=0) + 1), total - 1, dtype=torch.int32)
    for r, need in enumerate(needs):
        blocks, free = free[:need], free[need:]
        table[r, :need] = torch.tensor(blocks, dtype=torch.int32)
        for p, both in enumerate(keys_and_values(case, r).unbind(1)):
            kv[:, blocks[p // size], p % size] = both
    padding = torch.full((case.padding, case.heads[0], H), garbage)
    q = torch.cat([*(queries(case, r) for r in range(len(needs))), padding])
    starts = torch.tensor([0] + [n for n, _ in case.rows]).cumsum(0).int()
    contexts = torch.tensor([c for _, c in case.rows], dtype=torch.int32)
    return q, kv, starts, contexts, table, H**-0.5, case.window


def run(case: Case, garbage: float = NAN) -> Tensor:
    return paged_attention(*arguments(case, garbage))


def row_of(case: Case, out: Tensor, r: int) -> Tensor:
    start = sum(n for n, _ in case.rows[:r])
    return out[start : start + case.rows[r][0]]


def by_hand(case: Case, r: int, end_n: list[int] | None = None) -> Tensor:
    """One query and head at a time, in float64, straight from the definition."""
    n, c = case.rows[r]
    k, v = keys_and_values(case, r).double()
    q = queries(case, r).double()
    out = torch.zeros(n, case.heads[0], case.head_dim, dtype=torch.float64)
    for i in range(n):
        position = c - n + i
        first = max(0, position + 1 - case.window) if case.window else 0
        for head in range(case.heads[0]):
            kv_head = head // (case.heads[0] // case.heads[1])
            end = max(position + 1, end_n[i] if end_n else 0)
            seen_k, seen_v = k[first:end, kv_head], v[first:end, kv_head]
            weights = (seen_k @ q[i, head] * case.head_dim**-0.5).softmax(0)
            out[i, head] = weights @ seen_v
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    contexts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    kv_heads = draw(st.integers(1, 3))
    return Case(
        rows=tuple((draw(st.sampled_from(sorted({0, 1, c // 2, c}))), c) for c in contexts),
        block_size=draw(st.integers(1, 6)),
        heads=(kv_heads * draw(st.integers(1, 4)), kv_heads),
        head_dim=draw(st.sampled_from([1, 2, 5, 8, 16])),
        window=draw(st.sampled_from([0, 0, 1, 3, 7, 30])),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 50)),
        scattered=draw(st.booleans()),
    )


@given(cases())
@example(Case(rows=((1, 1),)))
@example(Case(rows=((5, 5), (1, 9), (3, 8), (0, 4)), padding=2))
@example(Case(rows=((4, 12), (1, 12)), window=3, block_size=4))
def test_matches_the_definition(case: Case) -> None:
    out = run(case)
    for r in range(len(case.rows)):
        want = by_hand(case, r)
        torch.testing.assert_close(row_of(case, out, r).double(), want, rtol=1e-5, atol=1e-5)
        if want.numel():
            with pytest.raises(AssertionError):
                torch.testing.assert_close(torch.zeros_like(want), want, rtol=1e-5, atol=1e-5)
    assert not out[len(out) - case.padding :].any()


@st.composite
def ends(draw: st.DrawFn, case: Case) -> list[list[int]]:
    """Of each row's queries, where what it sees ends: runs of positions, 0 between them."""
    found = []
    for n, c in case.rows:
        end_n, at = [0] * n, c - n
        while at < c:
            end = draw(st.integers(at + 1, c))
            if draw(st.booleans()):
                end_n[at - (c - n) : end - (c - n)] = [end] * (end - at)
            at = end
        found.append(end_n)
    return found


@given(st.data())
def test_ends_let_queries_see_what_is_behind_them(data: st.DataObject) -> None:
    """CI-07. A row without any is computed as it would be beside rows without any."""
    case = data.draw(cases())
    found = data.draw(ends(case))
    end_T = torch.tensor([end for end_n in found for end in end_n] + [0] * case.padding)
    out, causal = paged_attention(*arguments(case), end_T.int()), run(case)
    for r, (n, c) in enumerate(case.rows):
        want = by_hand(case, r, found[r])
        torch.testing.assert_close(row_of(case, out, r).double(), want, rtol=1e-5, atol=1e-5)
        if all(end <= c - n + i + 1 for i, end in enumerate(found[r])):
            assert row_of(case, out, r).equal(row_of(case, causal, r))
    assert not out[len(out) - case.padding :].any()


def test_an_end_changes_the_answer_and_needs_a_place_for_every_token() -> None:
    case = Case(rows=((5, 9), (4, 4)), window=3)
    out = paged_attention(*arguments(case), torch.tensor([0, 7, 7, 0, 0, 0, 0, 0, 0]))
    changed = (out != run(case)).flatten(1).any(1)
    assert changed.tolist() == [False, True, False, False, False, False, False, False, False]
    with pytest.raises(ValueError, match=r"end_T of shape \(9,\), got \(8,\)"):
        paged_attention(*arguments(case), torch.zeros(8))


@given(cases(), st.integers(1, 6))
def test_chunks_equal_the_whole(case: Case, chunk: int) -> None:
    """Every row's context asked for at once, and in chunks of `chunk` queries."""
    whole = replace(case, rows=tuple((c, c) for _, c in case.rows))
    out = run(whole)
    for r, (_, c) in enumerate(case.rows):
        args = list(arguments(replace(whole, rows=((c, c),), padding=0)))
        parts = []
        for start in range(0, c, chunk):
            end = min(c, start + chunk)
            args[0] = queries(whole, r)[start:end]
            args[2] = torch.tensor([0, end - start], dtype=torch.int32)
            args[3] = torch.tensor([end], dtype=torch.int32)
            parts.append(paged_attention(*args))
        torch.testing.assert_close(torch.cat(parts), row_of(whole, out, r), rtol=1e-5, atol=1e-5)


@given(cases())
def test_contents_that_no_row_sees_change_no_bit(case: Case) -> None:
    """Unused blocks, the rest of last blocks, spare table entries, padding: NaN, inf or zero."""
    want = run(case, 0.0)
    assert torch.equal(run(case, NAN), want)
    assert torch.equal(run(case, float("inf")), want)


@given(cases(), st.randoms(use_true_random=False))
def test_a_row_has_the_same_bits_in_any_company(case: Case, random: object) -> None:
    """Alone, in another order, on other blocks: only its own queries and context count."""
    out = run(case)
    order = random.sample(range(len(case.rows)), len(case.rows))  # type: ignore[attr-defined]
    shuffled = replace(case, rows=tuple(case.rows[r] for r in order), scattered=False)
    moved = run(shuffled)
    for place, r in enumerate(order):
        want = row_of(case, out, r)
        assert torch.equal(row_of(shuffled, moved, place), want)
        alone = replace(case, rows=(case.rows[r],), padding=0)
        assert torch.equal(run(alone), want)


@given(cases())
def test_the_future_is_not_seen(case: Case) -> None:
    """NaN at the last position reaches the last query, and no earlier one."""
    case = replace(case, rows=tuple((c, c) for _, c in case.rows))
    args = list(arguments(case))
    table, contexts = args[4].tolist(), args[3].tolist()
    for blocks, c in zip(table, contexts, strict=True):
        args[1][:, blocks[(c - 1) // case.block_size], (c - 1) % case.block_size] = NAN
    # A masked NaN key still poisons a product with its zero weight, so the value must be finite;
    # what the mask hides is compared through the keys alone.
    args[1][1].nan_to_num_(nan=3.0)
    args[1][0].nan_to_num_(nan=1e4)
    poisoned, clean = paged_attention(*args), run(case)
    for r, (n, _) in enumerate(case.rows):
        seen, want = row_of(case, poisoned, r), row_of(case, clean, r)
        torch.testing.assert_close(seen[: n - 1], want[: n - 1], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(seen[n - 1 :], want[n - 1 :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case(rows=((5, 5), (1, 19), (4, 17)), head_dim=16)
    q, kv, *rest = arguments(case)
    out = paged_attention(q.to(dtype), kv.to(dtype), *rest)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), run(case), rtol=3e-2, atol=3e-2)


def test_long_rows_with_threads() -> None:
    """Beyond the tiles of any kernel, and with more than one thread."""
    case = Case(rows=((1, 700), (600, 700), (700, 700), (1, 3)), block_size=16, head_dim=16)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        out = run(case)
        for r in range(len(case.rows)):
            alone = run(replace(case, rows=(case.rows[r],)))
            assert torch.equal(alone, row_of(case, out, r))
    finally:
        torch.set_num_threads(threads)
    whole = row_of(case, out, 2)
    torch.testing.assert_close(row_of(case, out, 1), whole[100:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row_of(case, out, 0), whole[699:], rtol=1e-5, atol=1e-5)


@settings(max_examples=3)
@given(cases())
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(torch.ops.purestep.paged_attention.default, arguments(case, 0.0))


@pytest.mark.parametrize(
    ("position", "shape"),
    [(0, (3, 5, 8)), (0, (3, 4, 7)), (1, (2, 9, 3, 2)), (2, (3,)), (3, (2,)), (4, (2, 3))],
    ids=["heads", "head_dim", "kv", "query_start", "context_len", "table"],
)
def test_refuses_what_does_not_fit(position: int, shape: tuple[int, ...]) -> None:
    args = list(arguments(Case(rows=((3, 3),))))
    args[position] = torch.zeros(shape, dtype=args[position].dtype)
    with pytest.raises(ValueError, match="paged_attention wants"):
        paged_attention(*args)


def test_tables_may_change_in_place() -> None:
    """As static buffers do, and without a version to tell: what was laid out is not used again."""
    with torch.inference_mode():
        kv = torch.randn(2, 8, 4, 2, 16, generator=torch.Generator().manual_seed(0))
        q_TNH = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
        starts = torch.tensor([0, 1, 2])
        contexts, tables = torch.tensor([7, 5]), torch.tensor([[0, 1], [2, 3]])
        first = paged_attention(q_TNH, kv, starts, contexts, tables, 0.25)
        tables.copy_(torch.tensor([[4, 5], [6, 7]]))
        contexts.copy_(torch.tensor([6, 8]))
        second = paged_attention(q_TNH, kv, starts, contexts, tables, 0.25)
        fresh = paged_attention(q_TNH, kv, starts, contexts.clone(), tables.clone(), 0.25)
    assert torch.equal(second, fresh)
    assert not torch.equal(first, second)
