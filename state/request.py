"""What the caller asked for, and how far it has come."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np

from purestep.state.errors import RequestError, SamplingError
from purestep.state.pytree import tree


@tree
class SamplingParams:
    """How tokens are chosen; applied as temperature, then top-k, then top-p, on fp32 logits.

    `temperature` 0 is greedy: the lowest id among the largest logits. `top_k` 0 and `top_p` 1.0
    are off. `seed` None derives the noise from the engine's seed and the request's id.
    `stop` strings end the text just before their first occurrence, also across token borders;
    `stop_ids` come on top of the model's own end tokens, which `ignore_eos` switches off.
    The stopping token is kept in `Completion.tokens`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@tree
class Request:
    """The user's words. `adapter` None is the base model; requests share cached prefixes only
    with requests of the same `salt`."""

    id: str
    tokens: Sequence[int] | np.ndarray
    adapter: str | None = None
    salt: str | None = None
    sampling: SamplingParams = SamplingParams()


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id or stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CAPACITY = "capacity"  # the whole KV pool could not hold one token more
    ERROR = "error"  # `Completion.error` tells


@tree
class Completion:
    """A finished request. `logprobs` are of the model's own distribution (log-softmax of the raw
    fp32 logits, whatever the sampling parameters), one for each token."""

    id: str
    adapter: str | None
    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    text: str | None  # None where the program has no token table
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache on first admission
    num_preemptions: int = 0
    stop: str | int | None = None  # the stop string or stop id that ended it
    error: str | None = None


@tree
class RequestState:
    """Progress of one live request.

    While it runs, the newest tokens live in the columns of `Rows`; `generated` is then complete up
    to the last block boundary. While it waits, `generated` is complete and nothing is computed.
    """

    request: Request  # `tokens` is a read-only int32 array here
    arrival: int
    version: str | None  # adapter version, bound when the adapter is there; None for base
    loading: bool  # waits for its adapter; has no version and no digests
    seed: int  # the request's own, or one derived from the engine's seed and the request's id
    stream: int  # of its noise; unsigned 64 bit
    branch_path: tuple[int, ...]
    num_branches: int
    root: bytes  # what stands before the first block in the digest chain
    prompt_digests: tuple[bytes, ...]  # of the prompt's full blocks
    generated_digests: tuple[bytes, ...]  # of the full blocks after those
    generated: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    num_cached: int
    num_preemptions: int
    text: bytes | None  # generated text so far; None where no stop string asks for it

    @property
    def digests(self) -> tuple[bytes, ...]:
        return self.prompt_digests + self.generated_digests


def frozen(values: Any, dtype: Any = np.int32) -> np.ndarray:
    """A read-only one-dimensional array holding a copy of `values`."""
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def checked_request(
    request: Request, *, vocab_size: int, max_context: int, has_text: bool
) -> Request:
    """The request in plain Python values and a read-only int32 prompt.

    Raises RequestError or SamplingError naming the request, the field, its value and the limit.
    """
    if not isinstance(request.id, str) or not request.id or not _is_unicode(request.id):
        raise RequestError(f"request id {request.id!r} must be a non-empty string of Unicode")
    salt = request.salt
    if salt is not None and not (isinstance(salt, str) and _is_unicode(salt)):
        raise RequestError(f"request {request.id!r}: salt={salt!r} must be None or a string")
    if not isinstance(request.sampling, SamplingParams):
        raise RequestError(
            f"request {request.id!r}: sampling={request.sampling!r} must be SamplingParams"
        )
    return replace(
        request,
        tokens=checked_tokens(request, vocab_size, max_context),
        sampling=check_sampling(request, vocab_size, has_text),
    )


def checked_tokens(request: Request, vocab_size: int, max_context: int) -> np.ndarray:
    """The prompt as a read-only int32 array.

    Raises RequestError for an empty prompt, ids outside the vocabulary, or a prompt that leaves no
    room for one generated token in the context.
    """
    who = f"request {request.id!r}"
    try:
        wide = np.asarray(request.tokens)
    except ValueError:  # a ragged list
        wide = np.array(None)
    if wide.ndim != 1 or (wide.size and wide.dtype.kind not in "iu"):
        raise RequestError(
            f"{who}: tokens must be a flat sequence of integers, "
            f"got shape {wide.shape} of {wide.dtype}"
        )
    if wide.size == 0:
        raise RequestError(f"{who}: the prompt is empty; at least 1 token is needed")
    bad = np.flatnonzero((wide < 0) | (wide >= vocab_size))
    if bad.size:
        raise RequestError(
            f"{who}: token id {wide[bad[0]]} at position {bad[0]} is outside 0..{vocab_size - 1}"
        )
    if wide.size + 1 > max_context:
        raise RequestError(
            f"{who}: a prompt of {wide.size} tokens and one generated token exceed "
            f"max_context={max_context}"
        )
    return frozen(wide)


LARGEST_INT = 2**31 - 1  # what a column of the running rows holds
LARGEST_TEMPERATURE = 1e6  # far beyond uniform, and any quotient is finite in float32


def check_sampling(request: Request, vocab_size: int, has_text: bool) -> SamplingParams:
    """The sampling parameters in plain Python values.

    Raises SamplingError, naming field, value and limit, for what cannot take effect. `top_k` and
    `max_tokens` above what a column holds mean the same as the largest value it holds.
    """
    s, who = request.sampling, f"request {request.id!r}"

    def check(holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise SamplingError(f"{who}: {field}={getattr(s, field)!r}, but {rule}")

    warm = _is_number(s.temperature) and 0 <= s.temperature <= LARGEST_TEMPERATURE
    check(warm, "temperature", f"it must be finite and at least 0, at most {LARGEST_TEMPERATURE}")
    check(_is_number(s.top_p) and 0 < s.top_p <= 1, "top_p", "it must be above 0 and at most 1")
    whole = _is_int(s.top_k) and s.top_k >= 0
    check(whole, "top_k", "it must be an integer, 0 for no limit or at least 1")
    check(_is_int(s.max_tokens) and s.max_tokens >= 1, "max_tokens", "it must be at least 1")
    seeded = s.seed is None or (_is_int(s.seed) and 0 <= s.seed < 2**64)
    check(seeded, "seed", "it must be None or an integer in 0..2**64-1")
    drawn = s.temperature > 0
    check(drawn or s.top_k <= 1, "top_k", "temperature=0 is greedy, so it would have no effect")
    check(drawn or s.top_p == 1, "top_p", "temperature=0 is greedy, so it would have no effect")
    words = _is_list(s.stop) and all(isinstance(w, str) and w and _is_unicode(w) for w in s.stop)
    check(words, "stop", "it must be a tuple of non-empty strings")
    missing = "the program has no token table to find text with; use stop_ids"
    check(has_text or not s.stop, "stop", missing)
    ids = _is_list(s.stop_ids) and all(_is_int(t) and 0 <= t < vocab_size for t in s.stop_ids)
    check(ids, "stop_ids", f"it must be a tuple of ids in 0..{vocab_size - 1}")
    check(isinstance(s.ignore_eos, bool), "ignore_eos", "it must be True or False")
    return SamplingParams(
        temperature=float(s.temperature),
        top_k=min(int(s.top_k), LARGEST_INT),
        top_p=float(s.top_p),
        seed=None if s.seed is None else int(s.seed),
        max_tokens=min(int(s.max_tokens), LARGEST_INT),
        stop=tuple(s.stop),
        stop_ids=tuple(int(t) for t in s.stop_ids),
        ignore_eos=s.ignore_eos,
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float | np.floating) or _is_int(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list | np.ndarray)


def _is_unicode(text: str) -> bool:
    """Whether it can be written as bytes: JSON can hold half of a surrogate pair."""
    return not any("\ud800" <= c <= "\udfff" for c in text)
