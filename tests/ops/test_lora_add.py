"""lora_add_ against a vmap oracle, and the laws of mixed batches (LK-01, LK-03, LK-05, LK-07).

T tokens, D input width, O output width, S slices, P adapter rows, R those of the step, G groups
(adapters), r rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from purestep.ops.lora_add import CHUNK, chunk_spans, lora_add_

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    group_T: tuple[int, ...]  # each token's group, -1 for none
    ranks: tuple[int, ...]  # each group's rank
    D: int = 12
    sizes: tuple[int, ...] = (8, 4, 4)
    seed: int = 0
    spare_blocks: int = 2
    scattered: bool = True

    @property
    def blocks(self) -> list[int]:
        """Row blocks of 8 of each group, as the ledger gives them."""
        return [-(-rank // 8) for rank in self.ranks]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def adapter(case: Case, g: int) -> tuple[Tensor, Tensor]:
    """a [S, r, D] and b [r, O] of group g, scaled so that deltas are near 1."""
    r, S, source = case.ranks[g], len(case.sizes), generator(100 * case.seed + g)
    a_SrD = torch.randn(S, r, case.D, generator=source) * case.D**-0.5
    b_rO = torch.randn(r, sum(case.sizes), generator=source) * max(r, 1) ** -0.5
    return a_SrD, b_rO


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    T, source = len(case.group_T), generator(case.seed)
    return (
        torch.randn(T, sum(case.sizes), generator=source),
        torch.randn(T, case.D, generator=source),
    )


def tables(case: Case, active: set[int] | None = None) -> tuple[Tensor, ...]:
    """a_SPD, b_PO and the index tensors; blocks scattered, rows that are not listed NaN.

    `active` are the groups whose rows are listed; by default those that have a token.
    """
    active = set(case.group_T) if active is None else active
    total, S = sum(case.blocks) + case.spare_blocks, len(case.sizes)
    a, b = torch.full((S, 8 * total, case.D), NAN), torch.full((8 * total, sum(case.sizes)), NAN)
    order = torch.randperm(total, generator=generator(case.seed + 1)).tolist()
    free = order if case.scattered else list(range(total))
    listed: list[tuple[int, int]] = []
    for g, (rank, need) in enumerate(zip(case.ranks, case.blocks, strict=True)):
        mine, free = sorted(free[:need]), free[need:]
        rows = torch.tensor([8 * block + i for block in mine for i in range(8)], dtype=torch.int64)
        if g in active:
            listed += [(row, g) for row in rows.tolist()]
            a[:, rows], b[rows] = 0.0, 0.0
        a[:, rows[:rank]], b[rows[:rank]] = adapter(case, g)
    listed.sort()
    row_R = torch.tensor([row for row, _ in listed], dtype=torch.int64)
    owner_R = torch.tensor([g for _, g in listed], dtype=torch.int64)
    group_T = torch.tensor(case.group_T)
    foreign_TR = group_T[:, None] != owner_R
    return a, b, row_R, foreign_TR, chunk_spans(foreign_TR)


def run(case: Case, x_TD: Tensor | None = None) -> Tensor:
    y_TO, x = inputs(case)
    lora_add_(y_TO, x if x_TD is None else x_TD, *tables(case), case.sizes)
    return y_TO


def oracle(case: Case) -> Tensor:
    """float64: vmap over tokens, each with its own adapter, of the definition on one token."""
    y_TO, x_TD = (t.double() for t in inputs(case))
    width = max([*case.ranks, 1])
    adapters = [adapter(case, g) for g in range(len(case.ranks))]
    pad = torch.nn.functional.pad
    a_G = torch.stack([pad(a, (0, 0, 0, width - a.shape[1])) for a, _ in adapters]).double()
    b_G = torch.stack([pad(b, (0, 0, 0, width - b.shape[0])) for _, b in adapters]).double()

    def one(y_O: Tensor, x_D: Tensor, a_SrD: Tensor, b_rO: Tensor, has: Tensor) -> Tensor:
        parts = zip(a_SrD, b_rO.split(case.sizes, -1), strict=True)
        return y_O + torch.where(has, torch.cat([x_D @ a.T @ b for a, b in parts]), 0.0)

    group = torch.tensor(case.group_T)
    mine = group.clamp(min=0)
    return torch.func.vmap(one)(y_TO, x_TD, a_G[mine], b_G[mine], group >= 0)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@st.composite
def cases(draw: st.DrawFn, step: int = 1) -> Case:
    """`step` 32 keeps widths as wide as a real model's narrowest."""
    ranks = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 17]), min_size=1, max_size=5))
    widths = st.integers(1, 7).map(lambda n: n * step)
    return Case(
        group_T=tuple(draw(st.lists(st.integers(-1, len(ranks) - 1), min_size=1, max_size=80))),
        ranks=tuple(ranks),
        D=draw(st.integers(1, 12)) * step,
        sizes=tuple(draw(st.lists(widths, min_size=1, max_size=3))),
        seed=draw(st.integers(0, 50)),
        spare_blocks=draw(st.integers(0, 2)),
        scattered=draw(st.booleans()),
    )


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@given(cases())
@example(Case(group_T=(0,), ranks=(1,), D=1, sizes=(1,)))
def test_matches_the_definition(case: Case) -> None:
    want = oracle(case)
    torch.testing.assert_close(run(case).double(), want, rtol=1e-5, atol=1e-5)


def test_zero_deltas_would_be_noticed() -> None:
    case = Case(group_T=(0, -1, 1), ranks=(4, 2))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(inputs(case)[0].double(), oracle(case), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("threads")
def test_no_other_token_changes_a_tokens_bits() -> None:
    """At one T: the others' number, order, groups, ranks and contents (NaN) do not matter, nor
    how many adapters are listed and where their rows lie."""

    @settings(max_examples=40)
    @given(cases(step=32), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        out, T = run(case), len(case.group_T)
        kept = data.draw(st.sets(st.integers(0, T - 1), min_size=1, max_size=3))
        fewer = replace(
            case, group_T=tuple(g if t in kept else -1 for t, g in enumerate(case.group_T))
        )
        _, x_TD = inputs(case)
        for t in set(range(T)) - kept:
            x_TD[t] = NAN
        alone = run(fewer, x_TD)
        more = replace(
            case,
            group_T=tuple(
                g if t in kept else data.draw(st.integers(-1, len(case.ranks) - 1))
                for t, g in enumerate(case.group_T)
            ),
        )
        crowded = run(more, x_TD)
        moved = run(replace(case, scattered=not case.scattered))
        for t in kept:
            assert torch.equal(bits(alone[t]), bits(out[t]))
            assert torch.equal(bits(crowded[t]), bits(out[t]))
            assert torch.equal(bits(moved[t]), bits(out[t]))

    check()


@given(cases(step=32), st.randoms(use_true_random=False))
def test_permuting_tokens_permutes_results(case: Case, random: object) -> None:
    """A token's place within a step changes the order of its sums, never its adapter."""
    T = len(case.group_T)
    order = random.sample(range(T), T)  # type: ignore[attr-defined]
    y_TO, x_TD = inputs(case)
    y_TO = y_TO[order].clone()
    moved = replace(case, group_T=tuple(case.group_T[t] for t in order))
    lora_add_(y_TO, x_TD[order], *tables(moved), case.sizes)
    torch.testing.assert_close(y_TO, run(case)[order], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("D", [32, 576, 1536])
@pytest.mark.parametrize("T", [1, 5, 16, 150])
def test_real_widths(T: int, D: int) -> None:
    """Bits are the same beside one adapter and beside many; with 8 rows in all they were not."""
    case = Case(
        group_T=tuple((0, 1, -1, 2, 3)[t % 5] for t in range(T)),
        ranks=(16, 1, 8, 30),
        D=D,
        sizes=(576, 192, 192),
    )
    out = run(case)
    torch.testing.assert_close(out.double(), oracle(case), rtol=1e-5, atol=2e-5)
    for t in {0, 1, 3, 64, 65, 149} & set(range(T)):
        own = tuple(g if i == t else -1 for i, g in enumerate(case.group_T))
        for others in (own, tuple(g if i == t else 3 for i, g in enumerate(case.group_T))):
            assert torch.equal(bits(run(replace(case, group_T=others))[t]), bits(out[t]))


def test_spans_are_what_a_chunk_needs() -> None:
    """Widened to 16 rows where there are so many, and empty for a chunk of base rows."""
    foreign_TR = torch.ones(4 * CHUNK + 1, 40, dtype=torch.bool)
    foreign_TR[3, 8:16] = foreign_TR[CHUNK, 32:] = foreign_TR[3 * CHUNK, :32] = False
    foreign_TR[4 * CHUNK, 16:24] = False
    assert chunk_spans(foreign_TR).tolist() == [[8, 24], [24, 40], [0, 0], [0, 32], [16, 32]]
    assert chunk_spans(foreign_TR[:CHUNK, 8:16]).tolist() == [[0, 8]]
    assert chunk_spans(foreign_TR[:CHUNK, :0]).tolist() == [[0, 0]]


def test_ranks_of_all_kinds_in_one_batch() -> None:
    """LK-03: a kernel that is right at rank 8 and wrong at others; also ranks above the width."""
    ranks = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 31, 32, 33, 64, 100, 128, 256, 300)
    case = Case(group_T=tuple(range(18)) * 2 + (-1,), ranks=ranks, D=256, sizes=(256, 64, 64))
    torch.testing.assert_close(run(case).double(), oracle(case), rtol=1e-5, atol=1e-5)


def test_interleaved_adapters() -> None:
    """LK-01: another user's adapter was applied when rows of one adapter were not neighbours."""
    pattern = "ABA.CAB.CCAB"
    case = Case(group_T=tuple("ABC".find(c) for c in pattern), ranks=(4, 8, 3))
    torch.testing.assert_close(run(case).double(), oracle(case), rtol=1e-5, atol=1e-5)


def test_a_huge_adapter_does_not_leak() -> None:
    """LK-05: seven base rows beside an adapter scaled by 1e3, then a step of base rows only."""
    case = Case(group_T=(-1, -1, -1, 0, -1, -1, -1, -1), ranks=(8,))
    y_TO, x_TD = inputs(case)
    y_TO[1, 0] = NAN
    before = y_TO.clone()
    a, b, *index = tables(case)
    lora_add_(y_TO, x_TD, a, b * 1e3, *index, case.sizes)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(bits(y_TO[others]), bits(before[others]))
    assert (y_TO[3] - before[3]).abs().max() > 100
    before = y_TO.clone()
    _, _, *index = tables(replace(case, group_T=(-1,) * 8))
    lora_add_(y_TO, x_TD, a, b * 1e3, *index, case.sizes)
    assert torch.equal(bits(y_TO), bits(before))


def test_an_infinite_shrink_stays_with_its_tokens() -> None:
    """Times zero it would be NaN in every row."""
    case = Case(group_T=(0, 1, -1), ranks=(8, 8), scattered=False)
    y_TO, x_TD = inputs(case)
    a, b, *index = tables(case)
    a[:, :8] = float("inf")
    lora_add_(y_TO, x_TD, a, b, *index, case.sizes)
    assert torch.equal(bits(y_TO[1:]), bits(run(case)[1:]))
    assert not torch.isfinite(y_TO[0]).any()


def owners(group_T: list[int], owner_R: list[int]) -> tuple[Tensor, ...]:
    """Index tensors of rows 0, 1, ...: the tokens' adapters and the rows'."""
    foreign_TR = torch.tensor(group_T)[:, None] != torch.tensor(owner_R)
    return torch.arange(len(owner_R)), foreign_TR, chunk_spans(foreign_TR)


def test_worked_examples() -> None:
    """multi_lora.md sections 2 (delta 40, 20), 8.2 and the groups that 7.2 should have."""
    y, x = torch.zeros(1, 2), torch.tensor([[1.0, 2.0, 3.0]])
    a, b = torch.tensor([[[1.0, -1.0, 2.0]]]), 4 * torch.tensor([[2.0, 1.0]])
    lora_add_(y, x, a, b, *owners([0], [0]), (2,))
    assert y.tolist() == [[40.0, 20.0]]

    y, x = torch.zeros(3, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    a = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]])
    b = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    lora_add_(y, x, a, b, *owners([1, -1, 0], [0, 0, 1, 1]), (2,))
    assert y.tolist() == [[0.0, 9.0], [0.0, 0.0], [10.0, 0.0]]

    y, x = torch.zeros(8, 1), torch.ones(8, 1)
    a, b = torch.ones(1, 2, 1), torch.tensor([[3.0], [7.0]])  # adapters 3 and 7
    lora_add_(y, x, a, b, *owners([7, 7, 7, -1, -1, 3, 7, -1], [3, 7]), (1,))
    assert y.flatten().tolist() == [7, 7, 7, 0, 0, 3, 7, 0]


def test_bfloat16_is_rounded_once() -> None:
    """LK-07: 1 + 2^-8 + 2^-17 rounds to 1 + 2^-7; a delta rounded first would tie down to 1."""
    y, x = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    a = torch.ones(1, 2, 1, dtype=torch.bfloat16)
    b = torch.tensor([[2.0**-8], [2.0**-17]], dtype=torch.bfloat16)
    lora_add_(y, x, a, b, *owners([0], [0, 0]), (1,))
    assert y.item() == 1 + 2**-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case(group_T=(0, 1, -1, 2, 0, 2, 1) * 5, ranks=(8, 16, 5), D=64)
    (y_TO, x_TD), (a, b, *index) = inputs(case), tables(case)
    y_TO, base = y_TO.to(dtype), y_TO.to(dtype)
    lora_add_(y_TO, x_TD.to(dtype), a.to(dtype), b.to(dtype), *index, case.sizes)
    torch.testing.assert_close(y_TO.double(), oracle(case), rtol=2e-2, atol=3e-2)
    assert torch.equal(y_TO[2::7], base[2::7])


@settings(max_examples=3)
@given(cases())
def test_opcheck(case: Case) -> None:
    y_TO, x_TD = inputs(case)
    a, b, *index = tables(case)
    args = (y_TO, x_TD, a.nan_to_num(0.0), b.nan_to_num(0.0), *index, list(case.sizes))
    torch.library.opcheck(torch.ops.purestep.lora_add_.default, args)


@pytest.mark.parametrize(
    ("position", "shape"),
    [(0, (2, 16)), (1, (3, 13)), (2, (2, 24, 12)), (3, (24, 17)), (5, (3, 7)), (6, (2, 2))],
    ids=["T", "D", "S", "O", "R", "C"],
)
def test_refuses_what_does_not_fit(position: int, shape: tuple[int, ...]) -> None:
    case = Case(group_T=(0, 0, -1), ranks=(6,))
    args = [*inputs(case), *tables(case)]
    args[position] = torch.zeros(shape, dtype=args[position].dtype)
    with pytest.raises(ValueError, match="lora_add_ wants"):
        lora_add_(*args, case.sizes)
    with pytest.raises(ValueError, match="lora_add_ wants"):
        lora_add_(*inputs(case), *tables(case), (8, 4, 3))
