"""Draw the next token of each row, and tell logprobs. No generator, no state: noise is counted.

The noise of a candidate depends on (stream, position, vocabulary id) alone, so a row draws the same
token alone, in any batch, after a preemption and on any device. S sampled rows, N scored ones, V
vocabulary. D of the rows are not greedy, of these C are cut, by top-k (K of them), top-p or min-p.

Which rows need what is found out on the host (`draws_of`), so that nothing here waits for a device.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from purestep.ops import kernels, native
from purestep.state.sampling import GREEDY_BELOW

_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., 2011) on int64 tensors holding 32-bit words.

    `counter` gives the two low words, the two high ones are 0. Returns four words, broadcast.
    """
    c0, c1 = torch.broadcast_tensors(*counter)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps: bits 0 to 63 are right all the same
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0,
            high & _MASK,
            ((low >> 32) & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(stream_S: Tensor, position_S: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [S, V] float32; `stream_S` holds unsigned 64-bit keys as int64.

    One Philox block serves four neighbouring ids. 23 bits each: with 24 the largest uniform would
    round to 1 in float32 and its noise to infinity.
    """
    quads = torch.arange(-(-vocab_size // 4), device=stream_S.device)[None, :]
    key = (stream_S[:, None] & _MASK), (stream_S[:, None] >> 32) & _MASK
    words = philox((quads, position_S[:, None].long()), key)
    bits_SV = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    uniform_SV = ((bits_SV >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform_SV))


def keep_top_k(logits_SV: Tensor, top_k_S: Tensor, largest: int) -> Tensor:
    """Minus infinity below each row's k-th largest logit (ties with it stay); 0 keeps all, as does
    what is above V. `largest` is the most tokens, ties aside, that a row keeps."""
    V = logits_SV.shape[1]
    k_S = torch.where(top_k_S > 0, top_k_S, V).clamp(max=V).long()
    largest_SK = logits_SV.topk(largest, dim=-1).values
    kth_S1 = largest_SK.gather(1, k_S[:, None] - 1)
    return logits_SV.masked_fill(logits_SV < kth_S1, -torch.inf)


def keep_top_p(logits_SV: Tensor, top_p_S: Tensor) -> Tensor:
    """Minus infinity outside the smallest set of tokens whose probability reaches top_p.

    Ascending cumulative sums, as transformers' TopPLogitsWarper, with 1 - top_p rounded once, from
    float64; the most likely token always stays.
    """
    ascending_SV, order_SV = torch.sort(logits_SV, dim=-1)
    mass_SV = _sums(ascending_SV.softmax(-1))
    drop_SV = mass_SV <= (1 - top_p_S.double()).float()[:, None]
    drop_SV[:, -1] = False
    drop_SV = torch.zeros_like(drop_SV).scatter(1, order_SV, drop_SV)
    return logits_SV.masked_fill(drop_SV, -torch.inf)


def keep_min_p(logits_SV: Tensor, min_p_S: Tensor) -> Tensor:
    """Minus infinity for tokens less likely than min_p times the likeliest, which always stays."""
    probability_SV = logits_SV.softmax(-1)
    least_S1 = min_p_S[:, None] * probability_SV.amax(-1, keepdim=True)
    drop_SV = probability_SV < least_S1
    return logits_SV.masked_fill(drop_SV, -torch.inf)


def _sums(p_SV: Tensor) -> Tensor:
    """Cumulative sums of each row. Of one row alone a GPU adds them up in an order that varies."""
    if p_SV.is_cuda and len(p_SV) == 1:
        return p_SV.expand(2, -1).cumsum(-1)[:1]
    return p_SV.cumsum(-1)


class Draws(NamedTuple):
    """What `draw` reads beside logits: arrays of the host, or the same on a device."""

    temperature_S: Any  # float32; 0 of greedy rows, and 1 of those that are cut, divided before
    stream_S: Any  # int64, the bits of unsigned numbers
    position_S: Any  # int64
    drawn_D: Any  # int64, places among the rows
    cut_C: Any  # int64, likewise
    temperature_C: Any  # float32
    top_k_row: Any  # int64, places among the rows that are cut, as in the next two
    top_k: Any  # int64
    top_p_row: Any
    top_p: Any  # float64
    min_p_row: Any
    min_p: Any  # float32


def draws_of(
    temperature_S: np.ndarray,
    top_k_S: np.ndarray,
    top_p_S: np.ndarray,
    min_p_S: np.ndarray,
    stream_S: np.ndarray,
    position_S: np.ndarray,
) -> Draws:
    """The parameters of rows (`SamplingRows` has them), sorted by what they ask for."""
    drawn_S = temperature_S >= GREEDY_BELOW
    cut_S = drawn_S & ((top_k_S > 0) | (top_p_S < 1) | (min_p_S > 0))
    cut_C = np.flatnonzero(cut_S)
    wants = (top_k_S[cut_C] > 0, top_p_S[cut_C] < 1, min_p_S[cut_C] > 0)
    by_k, by_p, by_min = map(np.flatnonzero, wants)
    return Draws(
        temperature_S=np.where(cut_S, 1, np.where(drawn_S, temperature_S, 0)).astype(np.float32),
        stream_S=stream_S.view(np.int64),
        position_S=position_S.astype(np.int64),
        drawn_D=np.flatnonzero(drawn_S),
        cut_C=cut_C,
        temperature_C=temperature_S[cut_C].astype(np.float32),
        top_k_row=by_k,
        top_k=top_k_S[cut_C[by_k]].astype(np.int64),
        top_p_row=by_p,
        top_p=top_p_S[cut_C[by_p]].astype(np.float64),
        min_p_row=by_min,
        min_p=min_p_S[cut_C[by_min]].astype(np.float32),
    )


@kernels.named("draw")
def draw(logits_SV: Tensor, raw_SV: Tensor, draws: Draws, largest_k: int) -> Tensor:
    """int32 [2, S]: tokens from fp32 logits, some of which may be minus infinity, and the bits of
    their logprobs under `raw_SV`. Does not wait.

    Greedy, the lowest id among the largest logits, where the temperature is below 1e-5: quotients
    would lose the noise's digits there. Otherwise logits over temperature, then top-k, then top-p,
    then min-p, then the Gumbel maximum, which is a draw from their softmax. `draws` are on the
    device of the logits, `largest_k` is the largest of `draws.top_k`, at most V.
    """
    if torch.compiler.is_dynamo_compiling():
        edited_SV = None if logits_SV is raw_SV else logits_SV
        return torch.ops.purestep.draw(edited_SV, raw_SV, [*draws], largest_k)
    logits_SV = _cut(logits_SV, draws, largest_k)
    if logits_SV.is_cuda and kernels.usable():
        from purestep.ops.kernels.draw import launch

        return launch(logits_SV, raw_SV, draws.temperature_S, draws.stream_S, draws.position_S)
    token_S, drawn_D = logits_SV.argmax(-1), draws.drawn_D
    if len(drawn_D):
        picks_DV = logits_SV.index_select(0, drawn_D) / draws.temperature_S[drawn_D, None]
        stream_D, position_D = draws.stream_S[drawn_D], draws.position_S[drawn_D]
        picks_DV += gumbel_noise(stream_D, position_D, logits_SV.shape[1])
        token_S[drawn_D] = picks_DV.argmax(-1)
    return with_bits(token_S, score(raw_SV, token_S))


def _cut(logits_SV: Tensor, draws: Draws, largest_k: int) -> Tensor:
    """The logits, those of rows that are cut over their temperature and minus infinity where a
    token is out."""
    cut_C = draws.cut_C
    if not len(cut_C):
        return logits_SV
    cut_CV = logits_SV.index_select(0, cut_C) / draws.temperature_C[:, None]
    for keep, row_X, *parameters in (
        (keep_top_k, draws.top_k_row, draws.top_k, largest_k),
        (keep_top_p, draws.top_p_row, draws.top_p),
        (keep_min_p, draws.min_p_row, draws.min_p),
    ):
        if len(row_X) == len(cut_C):
            cut_CV = keep(cut_CV, *parameters)
        elif len(row_X):
            cut_CV[row_X] = keep(cut_CV[row_X], *parameters)
    return cut_CV if len(cut_C) == len(logits_SV) else logits_SV.index_copy(0, cut_C, cut_CV)


@kernels.named("greedy")
def greedy(logits_SV: Tensor) -> Tensor:
    """int32 [2, S]: `draw` at temperature 0, and the bits of its `score`. Does not wait."""
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.greedy(logits_SV)
    if not (logits_SV.is_cuda and kernels.usable()):
        if native.takes(logits_SV):
            return with_bits(*native.greedy(logits_SV))
        token_S = logits_SV.argmax(-1)
        return with_bits(token_S, score(logits_SV, token_S))
    from purestep.ops.kernels.greedy import launch

    return launch(logits_SV)


def with_bits(token_S: Tensor, logprob_S: Tensor) -> Tensor:
    """int32 [2, S]: tokens, and the bits of float32 logprobs."""
    return torch.stack((token_S.int(), logprob_S.view(torch.int32)))


def score(logits_NV: Tensor, token_N: Tensor) -> Tensor:
    """logprob_N float32 of tokens under the raw distribution, untouched by sampling parameters.

    NaN where the row has a NaN or an infinite logit, and where the token is negative.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.score(logits_NV, token_N)
    chosen_N = logits_NV.gather(1, token_N.clamp(min=0)[:, None]).squeeze(1)
    logprob_N = chosen_N - logits_NV.logsumexp(-1)
    sound_N = torch.isfinite(logits_NV.amax(-1)) & torch.isfinite(logits_NV.amin(-1))
    return torch.where(sound_N & (token_N >= 0), logprob_N, torch.nan)


def likeliest(logits_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids [N, K] int64, logprobs [N, K] float32) of the K likeliest tokens in falling order."""
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.likeliest(logits_NV, count)
    top = logits_NV.topk(count, dim=-1)
    return top.indices, top.values - logits_NV.logsumexp(-1, keepdim=True)


def _draw_traced(
    edited_SV: Tensor | None, raw_SV: Tensor, draws: list[Tensor], largest_k: int
) -> Tensor:
    return draw(raw_SV if edited_SV is None else edited_SV, raw_SV, Draws(*draws), largest_k)


def _likeliest_fake(logits_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    found_NK = logits_NV.new_empty(logits_NV.shape[0], count)
    return found_NK.new_empty(found_NK.shape, dtype=torch.int64), found_NK


# Whole ops, since a compiler's sums, logarithms and quotients have other bits, and its sorts order
# equal logits in another way. Which rows ask for what shows when they run, so one graph fits all.
torch.library.define("purestep::greedy", "(Tensor logits_SV) -> Tensor")
torch.library.impl("purestep::greedy", ("cpu", "cuda"), greedy)
torch.library.register_fake(
    "purestep::greedy",
    lambda logits_SV: logits_SV.new_empty((2, logits_SV.shape[0]), dtype=torch.int32),
)
torch.library.define(
    "purestep::draw",
    "(Tensor? edited_SV, Tensor raw_SV, Tensor[] draws, SymInt largest_k) -> Tensor",
)
torch.library.impl("purestep::draw", ("cpu", "cuda"), _draw_traced)
torch.library.register_fake(
    "purestep::draw",
    lambda _edited, raw_SV, *_: raw_SV.new_empty((2, raw_SV.shape[0]), dtype=torch.int32),
)
torch.library.define("purestep::score", "(Tensor logits_NV, Tensor token_N) -> Tensor")
torch.library.impl("purestep::score", ("cpu", "cuda"), score)
torch.library.register_fake(
    "purestep::score", lambda logits_NV, _: logits_NV.new_empty(logits_NV.shape[0])
)
torch.library.define("purestep::likeliest", "(Tensor logits_NV, SymInt count) -> (Tensor, Tensor)")
torch.library.impl("purestep::likeliest", ("cpu", "cuda"), likeliest)
torch.library.register_fake("purestep::likeliest", _likeliest_fake)
