"""Logprobs of neighbouring tokens, as a step returns them and as a request collects them."""

from collections.abc import Sequence

import numpy as np

from purestep.state.pytree import tree


@tree
class Scores:
    """N neighbouring tokens and the K likeliest in place of each, of the raw distribution."""

    logprob_N: np.ndarray  # float32, NaN where there is no id to score
    top_id_NK: np.ndarray  # int32, the likeliest first
    top_logprob_NK: np.ndarray  # float32


def joined(chunks: Sequence[Scores], width: int) -> Scores:
    """The chunks of one request in a row; `width` is K, where there are none."""
    parts = [nothing(0, width), *chunks]
    return Scores(
        logprob_N=locked(np.concatenate([p.logprob_N for p in parts])),
        top_id_NK=locked(np.concatenate([p.top_id_NK for p in parts])),
        top_logprob_NK=locked(np.concatenate([p.top_logprob_NK for p in parts])),
    )


def nothing(count: int, width: int) -> Scores:
    """Zeros for so many tokens, of so many likeliest."""
    return Scores(
        logprob_N=np.zeros(count, np.float32),
        top_id_NK=np.zeros((count, width), np.int32),
        top_logprob_NK=np.zeros((count, width), np.float32),
    )


def behind_the_first(scores: Scores) -> Scores:
    """With an entry in front for the first token of a prompt, which nothing stands before."""
    K = scores.top_id_NK.shape[1]
    first = Scores(
        logprob_N=np.full(1, np.nan, np.float32),
        top_id_NK=np.full((1, K), -1, np.int32),
        top_logprob_NK=np.full((1, K), np.nan, np.float32),
    )
    return joined((first, scores), K)


def locked(array: np.ndarray) -> np.ndarray:
    """The array itself, which nobody else holds, read-only from now on."""
    array.setflags(write=False)
    return array
