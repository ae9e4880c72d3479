"""The sampler: counter-based noise, filters, logprobs (SL-05, SL-06, SL-08, SL-11, DT-01)."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from purestep.ops.sample import (
    Draws,
    draw,
    draws_of,
    gumbel_noise,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    likeliest,
    philox,
    score,
)

NAN, INF = float("nan"), float("inf")


def sample(
    logits: Tensor,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    stream: int | list[int] = 7,
    position: int | list[int] = 3,
) -> tuple[Tensor, Tensor]:
    """`draw` and `score`, single values standing for every row."""
    S = len(logits)

    def column(value: object, dtype: type) -> np.ndarray:
        return np.array(value if isinstance(value, list) else [value] * S, dtype)

    draws = draws_of(
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float64),
        column(min_p, np.float32),
        column(stream, np.uint64),
        column(position, np.int32),
    )
    largest = min(draws.top_k.max(initial=1), logits.shape[1])
    tensors = Draws(*map(torch.from_numpy, draws))
    token_S, bits_S = draw(logits, logits, tensors, int(largest))
    return token_S.long(), bits_S.view(torch.float32)


def logits_of(seed: int, S: int, V: int, scale: float = 3.0) -> Tensor:
    return torch.randn(S, V, generator=torch.Generator().manual_seed(seed)) * scale


def words(c0: int, c1: int, k0: int, k1: int) -> list[int]:
    counter = torch.tensor([c0]), torch.tensor([c1])
    return [int(w) for w in philox(counter, (torch.tensor([k0]), torch.tensor([k1])))]


def philox_in_integers(c0: int, c1: int, k0: int, k1: int) -> list[int]:
    """Philox4x32-10, written from the paper in Python's own integers."""
    c, k, mask = [c0, c1, 0, 0], [k0, k1], 2**32 - 1
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_philox_known_answer() -> None:
    """Random123's kat_vectors: counter 0, key 0."""
    assert words(0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


word = st.integers(0, 2**32 - 1)


@given(word, word, word, word)
@example(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1)
@example(2**31, 2**31, 2**31, 2**31)
def test_philox_is_the_papers(c0: int, c1: int, k0: int, k1: int) -> None:
    """Products wrap in int64; the bits that count must not."""
    assert words(c0, c1, k0, k1) == philox_in_integers(c0, c1, k0, k1)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(1, 9))
@example(2**64 - 1, 0, 5)
@example(2**63, 1, 4)
def test_noise_is_the_counters(stream: int, position: int, vocab: int) -> None:
    """Id v gets word v % 4 of counter (v // 4, position) under the stream as key."""
    key = torch.from_numpy(np.array([stream], np.uint64).view(np.int64).copy())
    noise = gumbel_noise(key, torch.tensor([position], dtype=torch.int32), vocab)
    for v in range(vocab):
        bits = philox_in_integers(v // 4, position, stream & 0xFFFFFFFF, stream >> 32)[v % 4]
        uniform = ((bits >> 9) + 0.5) * 2.0**-23
        assert noise[0, v] == pytest.approx(-np.log(-np.log(uniform)), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_noise_is_finite_at_both_ends(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [torch.full((1, 1), bits)] * 4
    monkeypatch.setattr("purestep.ops.sample.philox", lambda *_: ends)
    assert gumbel_noise(torch.tensor([0]), torch.tensor([0]), 4).isfinite().all()


def test_larger_vocabularies_extend_the_noise() -> None:
    stream, position = torch.tensor([5]), torch.tensor([9])
    small, large = gumbel_noise(stream, position, 10), gumbel_noise(stream, position, 1003)
    assert torch.equal(small, large[:, :10])
    assert len(large.unique()) > 990


def chi_square(counts: Tensor, probability: Tensor) -> float:
    expected = probability * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.5, 4, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.3, 7, 0.95, 0.15),
    ],
)
@pytest.mark.parametrize("vary", ["stream", "position"])
def test_draws_follow_the_filtered_softmax(
    vary: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Chi-square on pinned seeds, 20000 draws; 30 is beyond 0.9999 for 8 degrees of freedom."""
    S = 20_000
    logits = torch.tensor([0.3, -1.0, 2.0, 1.1, 0.0, -0.2, 0.9, 1.9, -2.0])
    numbers = {vary: list(range(S))}
    token_S, _ = sample(logits.repeat(S, 1), temperature, top_k, top_p, min_p, **numbers)
    scaled = (logits / temperature)[None]
    if top_k:
        scaled = TopKLogitsWarper(top_k)(None, scaled)
    if top_p < 1:
        scaled = TopPLogitsWarper(top_p)(None, scaled)
    if min_p:
        scaled = MinPLogitsWarper(min_p)(None, scaled)
    probability = scaled[0].softmax(-1)
    counts = torch.bincount(token_S, minlength=len(logits)).float()
    kept = probability > 0
    assert counts[~kept].sum() == 0
    assert chi_square(counts[kept], probability[kept]) < 30


def test_streams_and_positions_are_independent() -> None:
    """Neighbouring streams and positions agree as often as chance lets them."""
    logits = torch.zeros(4000, 16)
    base, _ = sample(logits, stream=list(range(4000)))
    for other in (
        sample(logits, stream=list(range(1, 4001)))[0],
        sample(logits, stream=list(range(4000)), position=4)[0],
        sample(logits, stream=[s + 2**32 for s in range(4000)])[0],
    ):
        assert abs((base == other).float().mean() - 1 / 16) < 0.015


rows_of = st.lists(
    st.tuples(
        st.sampled_from((0.0, 1e-12, 0.7, 1.0, 3.0)),
        st.sampled_from((0, 1, 3, 50)),
        st.sampled_from((1.0, 0.9, 0.3)),
        st.sampled_from((0.0, 0.0, 0.1, 0.9)),
        st.integers(0, 2**64 - 1),
        st.integers(0, 4000),
    ),
    min_size=1,
    max_size=6,
)


@given(rows_of, st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_a_row_draws_the_same_alone_permuted_and_in_any_batch(
    rows: list[tuple[float, int, float, float, int, int]], seed: int, random: object
) -> None:
    """SL-06, DT-01: noise depends on (stream, position, id) only."""
    logits = logits_of(seed, len(rows), 29)
    token_S, logprob_S = sample(logits, *map(list, zip(*rows, strict=True)))
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled, logprobs = sample(
        logits[order], *map(list, zip(*[rows[i] for i in order], strict=True))
    )
    assert shuffled.tolist() == token_S[order].tolist()
    assert torch.allclose(logprobs, logprob_S[order], rtol=0, atol=1e-6)
    for i, row in enumerate(rows):
        alone, logprob = sample(logits[i : i + 1], *row)
        assert alone.item() == token_S[i]
        assert abs(logprob.item() - logprob_S[i]) <= 1e-6


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=40))
def test_greedy_takes_the_lowest_id_among_the_largest(values: list[int]) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    assert sample(logits, temperature=0.0)[0].item() == values.index(max(values))


@pytest.mark.parametrize("temperature", [1e-12, 1e-30, 1e-6, 1e-45])
def test_tiny_temperatures_are_finite_and_take_the_best(temperature: float) -> None:
    """SL-11."""
    logits = logits_of(0, 8, 50, scale=50.0)
    token_S, logprob_S = sample(logits, temperature=temperature)
    assert torch.equal(token_S, logits.argmax(-1))
    assert logprob_S.isfinite().all()


@pytest.mark.parametrize("temperature", [1.1e-5, 0.01, 1.0, 100.0])
def test_top_k_of_one_is_greedy(temperature: float) -> None:
    """SL-11."""
    logits = logits_of(1, 8, 50)
    assert torch.equal(sample(logits, temperature, top_k=1)[0], logits.argmax(-1))


@given(st.integers(0, 10**6), st.integers(1, 40), st.booleans())
def test_top_k_is_transformers(seed: int, k: int, ties: bool) -> None:
    """SL-05: ties with the k-th stay; a k above the vocabulary keeps all."""
    logits = logits_of(seed, 3, 23)
    logits = logits.round() if ties else logits
    mine = keep_top_k(logits, torch.full((3,), k, dtype=torch.int32), min(k, 23))
    assert torch.equal(mine, TopKLogitsWarper(k)(None, logits))


@given(st.integers(0, 10**6), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_each_row_has_its_own_top_k(seed: int, ks: list[int]) -> None:
    logits = logits_of(seed, len(ks), 23)
    mine = keep_top_k(
        logits, torch.tensor(ks, dtype=torch.int32), min(max(k or 23 for k in ks), 23)
    )
    for row, k in enumerate(ks):
        alone = logits[row : row + 1]
        want = TopKLogitsWarper(k)(None, alone) if k else alone
        assert torch.equal(mine[row : row + 1], want)


@given(
    st.integers(0, 10**6),
    st.lists(st.floats(0.01, 0.99) | st.sampled_from((0.1, 0.5, 0.9)), min_size=1, max_size=4),
)
def test_top_p_is_transformers(seed: int, ps: list[float]) -> None:
    logits = logits_of(seed, len(ps), 23)
    mine = keep_top_p(logits, torch.tensor(ps, dtype=torch.float64))
    for row, p in enumerate(ps):
        want = TopPLogitsWarper(p)(None, logits[row : row + 1])
        assert torch.equal(mine[row : row + 1], want)


@pytest.mark.parametrize("top_p", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_top_p_among_equals_is_transformers(top_p: float) -> None:
    """Ten equal logits: the sums lie on the border, and 1 - p must round as transformers rounds."""
    logits = torch.zeros(1, 10)
    mine = keep_top_p(logits, torch.tensor([top_p], dtype=torch.float64))
    assert torch.equal(mine, TopPLogitsWarper(top_p)(None, logits))


@pytest.mark.parametrize("top_p", [1e-45, 1e-12, 1e-3])
def test_the_most_likely_token_always_stays(top_p: float) -> None:
    logits = logits_of(2, 8, 50)
    assert torch.equal(sample(logits, 1.0, top_p=top_p)[0], logits.argmax(-1))


@given(rows_of, st.integers(0, 10**6))
def test_logprobs_are_of_the_raw_distribution(
    rows: list[tuple[float, int, float, float, int, int]], seed: int
) -> None:
    """SL-08: whatever temperature, top-k and top-p."""
    logits = logits_of(seed, len(rows), 29)
    token_S, logprob_S = sample(logits, *map(list, zip(*rows, strict=True)))
    want = logits.double().log_softmax(-1).gather(1, token_S[:, None]).squeeze(1)
    assert torch.allclose(logprob_S.double(), want, rtol=0, atol=2e-6)
    assert (logprob_S <= 0).all()


@given(rows_of.filter(lambda rows: len(rows) > 1), st.integers(0, 10**6), st.data())
def test_a_row_that_is_not_finite_says_so_and_hurts_nobody(
    rows: list[tuple[float, int, float, float, int, int]], seed: int, data: st.DataObject
) -> None:
    columns = list(map(list, zip(*rows, strict=True)))
    logits = logits_of(seed, len(rows), 29)
    token_S, logprob_S = sample(logits, *columns)
    ill = data.draw(st.integers(0, len(rows) - 1))
    hurt = logits.clone()
    places = data.draw(st.sets(st.integers(0, 28), min_size=1))
    hurt[ill, list(places)] = data.draw(st.sampled_from((NAN, INF, -INF)))
    again, logprobs = sample(hurt, *columns)
    others = [i for i in range(len(rows)) if i != ill]
    assert logprobs[ill].isnan()
    assert 0 <= again[ill] < 29
    assert torch.equal(again[others], token_S[others])
    assert torch.equal(logprobs[others], logprob_S[others])


def test_arguments_are_left_alone() -> None:
    """A pure function: the logits are the graph's, and may be read again."""
    logits = logits_of(3, 4, 20)
    kept = logits.clone()
    sample(logits, 0.5, top_k=5, top_p=0.5)
    assert torch.equal(logits, kept)


@given(
    st.integers(0, 10**6),
    st.lists(st.floats(0.0, 1.0) | st.sampled_from((0.1, 0.5, 1.0)), min_size=1, max_size=4),
)
def test_min_p_is_transformers(seed: int, ps: list[float]) -> None:
    """Behind a top-k too, where most tokens are gone; 1.0 leaves the likeliest alone (SL-09)."""
    logits = keep_top_k(logits_of(seed, len(ps), 23), torch.full((len(ps),), 9), 9)
    mine = keep_min_p(logits, torch.tensor(ps, dtype=torch.float32))
    for row, p in enumerate(ps):
        want = MinPLogitsWarper(float(np.float32(p)))(None, logits[row : row + 1])
        assert torch.equal(mine[row : row + 1], want)


def test_the_likeliest_tokens_and_their_logprobs() -> None:
    """SL-08: over the whole vocabulary probabilities sum to 1; the first k are the k largest."""
    logits = logits_of(5, 6, 50)
    ids, logprobs = likeliest(logits, 50)
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(6), rtol=0, atol=1e-5)
    assert torch.equal(ids.sort(-1).values, torch.arange(50).expand(6, 50))
    few, first = likeliest(logits, 3)
    assert torch.equal(first, logprobs[:, :3])
    assert torch.equal(few, logits.argsort(-1, descending=True)[:, :3])
    assert likeliest(logits, 0)[0].shape == (6, 0)


def test_a_place_without_an_id_has_no_score() -> None:
    logits = logits_of(6, 2, 9)
    assert score(logits, torch.tensor([-1, 3])).isnan().tolist() == [True, False]


def test_top_p_cuts_before_min_p_as_in_transformers() -> None:
    """The orders differ: min-p first would leave less mass for top-p to cut from."""
    logits = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]).log()
    theirs = TopPLogitsWarper(0.72)(None, logits)
    theirs = MinPLogitsWarper(0.3)(None, theirs)
    swapped = TopPLogitsWarper(0.72)(None, MinPLogitsWarper(0.3)(None, logits))
    kept = set(torch.nonzero(theirs[0].isfinite()).flatten().tolist())
    assert kept != set(torch.nonzero(swapped[0].isfinite()).flatten().tolist())
    count = 400
    tokens, _ = sample(logits.repeat(count, 1), top_p=0.72, min_p=0.3, stream=list(range(count)))
    assert set(tokens.tolist()) == kept
