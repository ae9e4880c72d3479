"""The C forms against plain torch, and what torch does not promise: bits that no neighbour, no
number of threads and nothing in unused memory changes.

T token rows, D width, O output width, N query heads, K key/value heads, H head size, S slices, P
adapter rows, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import Tensor

from purestep.ops import native
from purestep.ops.add_rms_norm import add_rms_norm, add_rms_norm_ref
from purestep.ops.gated_linear import gated_mul, gated_mul_ref
from purestep.ops.linear import SKINNY
from purestep.ops.lora_linear import CHUNK, Deltas, lora_linear_ref, shrunk_linear
from purestep.ops.rope_write import rope_write_, rope_write_ref_
from purestep.ops.sample import greedy, score
from tests.ops.forms import form

NAN, INF = math.nan, math.inf
WIDTHS = st.sampled_from([1, 3, 7, 8, 9, 16, 31, 48, 100])


@pytest.fixture(autouse=True, scope="module")
def in_c() -> Iterator[None]:
    with form("C"):
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=2e-5)


def with_threads(count: int, call: Callable[[], Any]) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def deltas(
    slot_T: list[int], D: int, sizes: tuple[int, ...], ranks: list[int], tile: int
) -> Deltas:
    """Adapter i has `ranks[i]` rows in blocks of 8, laid in falling order of i with a block of
    nobody's, which is NaN, before each."""
    owner: list[int] = []
    for slot in reversed(range(len(ranks))):
        owner += [-1] * 8 + [slot] * (-(-ranks[slot] // 8) * 8)
    P = len(owner)
    owner_P = torch.tensor(owner, dtype=torch.int32)
    a_SPD, b_PO = random(len(sizes), P, D) * D**-0.5, random(P, sum(sizes), seed=1)
    a_SPD[:, owner_P < 0], b_PO[owner_P < 0] = NAN, NAN
    places = [(owner_P == slot).nonzero().flatten() for slot in range(len(ranks))]
    chunks = [torch.nn.functional.pad(p, (0, -len(p) % CHUNK), value=-1) for p in places]
    ends = [0, *itertools.accumulate(len(c) // CHUNK for c in chunks)]
    slots, spans, tokens = torch.tensor(slot_T), [(0, ends[-1])], []
    for slot in range(-1, len(ranks)):
        for part in (slots == slot).nonzero().flatten().split(tile):
            if len(part):
                spans.append((ends[slot], ends[slot + 1]) if slot >= 0 else (0, 0))
                tokens.append(torch.nn.functional.pad(part, (0, tile - len(part)), value=-1))
    spans.append((0, 0))  # a tile that is not needed
    tokens.append(torch.full((tile,), -1))
    parts = torch.cat(chunks), torch.tensor(spans), torch.stack(tokens)
    return Deltas(a_SPD, b_PO, *(part.int() for part in parts))


@given(
    st.lists(st.integers(-1, 2), min_size=1, max_size=12),
    WIDTHS,
    st.sampled_from([(5,), (32,), (8, 9, 24), (40, 40)]),
    st.lists(st.integers(1, 40), min_size=3, max_size=3),
    st.sampled_from([16, 32, 64]),
)
@example([0] * 150 + [-1, 2], 33, (16, 8), [20, 1, 8], 64)  # many for a tile, or a skinny batch
@example([1], 16, (8,), [1, 64, 1], 16)
def test_lora_linear(
    slot_T: list[int], D: int, sizes: tuple[int, ...], ranks: list[int], tile: int
) -> None:
    T, O = len(slot_T), sum(sizes)  # noqa: E741
    x_TD, w_OD, bias_O = random(T, D), random(O, D) * D**-0.5, random(O)
    lora = deltas(slot_T, D, sizes, ranks, tile)
    clean = Deltas(lora.a_SPD.nan_to_num(), lora.b_PO.nan_to_num(), *lora[2:])
    got, _ = shrunk_linear(x_TD, w_OD, bias_O, lora, sizes)
    close(got, lora_linear_ref(x_TD, w_OD, bias_O, clean, sizes))
    base = torch.tensor(slot_T) < 0
    assert torch.equal(got[base], shrunk_linear(x_TD, w_OD, bias_O, None, sizes)[0][base])
    if not base.all():
        with pytest.raises(AssertionError):
            close(got, lora_linear_ref(x_TD, w_OD, bias_O, None, sizes))
    threaded = with_threads(2, lambda: native.linear(x_TD, w_OD, bias_O))
    assert torch.equal(threaded, native.linear(x_TD, w_OD, bias_O))
    for t in range(min(T, 3)):  # alone: other tiles, the same bits
        alone = native.linear(x_TD[t : t + 1], w_OD, bias_O)
        native.add_deltas_(
            alone, x_TD[t : t + 1], *deltas([slot_T[t]], D, sizes, ranks, tile), sizes
        )
        if T <= SKINNY:
            assert torch.equal(alone[0], got[t])


@given(st.integers(1, 9), st.sampled_from([1, 7, 8, 64, 100, 769, 1600]), WIDTHS)
def test_wide_and_deep_products(T: int, D: int, O: int) -> None:  # noqa: E741
    x_TD, w_OD = random(T, D), random(O, D) * D**-0.5
    close(native.linear(x_TD, w_OD, None), x_TD.double() @ w_OD.double().T)


@given(st.integers(1, 5), WIDTHS, st.booleans(), st.booleans())
@example(40, 600, True, False)  # enough for a second thread
@example(40, 600, True, True)
def test_add_rms_norm(T: int, D: int, has_y: bool, has_inner: bool) -> None:
    h_TD, y_TD, w_D = random(T, D), random(T, D, seed=1) if has_y else None, random(D)
    given_ = h_TD, y_TD, w_D, 1e-5, random(D, seed=2) if has_inner else None
    before = [x.clone() for x in given_ if isinstance(x, Tensor)]
    got = with_threads(2, lambda: add_rms_norm(*given_))
    for mine, want in zip(got, add_rms_norm_ref(*given_), strict=True):
        close(mine, want)
    after = [x for x in given_ if isinstance(x, Tensor)]
    assert all(map(torch.equal, after, before))
    if has_inner and has_y and D > 1:
        assert not torch.allclose(got[0], add_rms_norm(*given_[:4])[0])


@given(
    st.integers(1, 6),
    st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    st.sampled_from([(2, 2), (8, 8), (10, 6), (64, 64), (40, 16)]),
    st.booleans(),
)
def test_rope_write(T: int, heads: tuple[int, int], sizes: tuple[int, int], normed: bool) -> None:
    (N, K), (H, C) = heads, sizes
    qkv_TO, angle_TC = random(T, (N + 2 * K) * H), random(T, C // 2).repeat(1, 2)
    norm_NH = random(N + K, H) if normed else None
    index_T = torch.randperm(12, generator=torch.Generator().manual_seed(T))[:T]
    index_T[T // 2] = -1  # padding
    pages, want_pages = (torch.full((2, 3, 4, K, H), NAN) for _ in range(2))
    rest = angle_TC.cos(), angle_TC.sin(), norm_NH, index_T, 1e-6
    got = rope_write_(pages, qkv_TO, *rest)
    close(got, rope_write_ref_(want_pages, qkv_TO, *rest))
    torch.testing.assert_close(pages, want_pages, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_mul_everywhere(activation: str) -> None:
    """Also where exp has no more digits, and for what is no number."""
    gate = torch.cat([torch.linspace(-110, 110, 4001), torch.tensor([0.0, -0.0, INF, -INF, NAN])])
    up = random(len(gate), seed=3)
    got = gated_mul(torch.cat([gate, up])[None], torch.float32, activation)[0].double()
    want = gated_mul_ref(torch.cat([gate, up])[None].double(), torch.float64, activation)[0]
    if activation == "silu":
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-35, equal_nan=True)
    else:  # by tanh there are no small numbers
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-12, equal_nan=True)


@given(st.integers(1, 5), st.integers(1, 70))
@example(32, 600)
def test_gated_mul(T: int, F: int) -> None:
    y = random(T, 2 * F)
    for activation in ("silu", "gelu_pytorch_tanh"):
        mul = partial(gated_mul, dtype=torch.float32, activation=activation)
        got = with_threads(2, partial(mul, y))
        close(got, gated_mul_ref(y, torch.float32, activation))
        assert torch.equal(mul(y[:1])[0], got[0])


ODD = st.sampled_from([0.0, -0.0, 3.0, 3.0, -90.0, 200.0, INF, -INF, NAN])


@given(st.lists(st.lists(ODD, min_size=19, max_size=19), min_size=1, max_size=4))
@example([[3.0] * 19, [-INF] * 19, [1.0] * 18 + [NAN], [-5.0] * 18 + [2.0]])
def test_greedy_on_ties_and_what_is_no_number(rows: list[list[float]]) -> None:
    logits_SV = torch.tensor(rows)
    token_S, bits_S = greedy(logits_SV)
    assert token_S.tolist() == logits_SV.argmax(-1).tolist()
    want_S = score(logits_SV, token_S.long())
    torch.testing.assert_close(bits_S.view(torch.float32), want_S, equal_nan=True)


@given(st.integers(1, 4), st.sampled_from([1, 5, 8, 127, 5000]))
def test_greedy(S: int, V: int) -> None:
    logits_SV = random(S, V) * 5
    token_S, bits_S = with_threads(2, lambda: greedy(logits_SV))
    assert token_S.tolist() == logits_SV.argmax(-1).tolist()
    close(bits_S.view(torch.float32), logits_SV.double().log_softmax(-1).amax(-1))


def test_other_formats_and_strides_are_not_taken() -> None:
    x = random(4, 4)
    assert native.takes(x)
    for other in (x.double(), x.bfloat16(), x.T, x.to("meta")):
        assert not native.takes(x, other)
