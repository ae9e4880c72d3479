"""Whether a user's sampling parameters can take effect, and their plain form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from purestep.state.errors import SamplingError
from purestep.state.sampling import (
    GREEDY_BELOW,
    LARGEST_INT,
    SamplingParams,
    is_int,
    is_list,
    is_unicode,
    shown,
)

LARGEST_TEMPERATURE = 1e6  # far beyond uniform, and any quotient is finite in float32
LARGEST_PENALTY = 1e6  # likewise for sums and products
LARGEST_N = 1024


def check_sampling(
    sampling: Any, who: str, *, vocab_size: int, has_text: bool, processors: tuple[str, ...]
) -> SamplingParams:
    """The sampling parameters in plain Python values; `who` names the request in messages.

    Raises SamplingError, naming field, value and limit, for what cannot take effect. `top_k` and
    `max_tokens` above what a column holds mean the same as the largest value it holds.
    """
    fields = _Fields(sampling, who, vocab_size)
    _check_draws(fields)
    _check_edits(fields, processors)
    _check_lengths(fields)
    _check_greedy(fields)
    _check_ends(fields, has_text)
    _check_scoring(fields)
    return _plain(sampling)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Sampling parameters under test."""

    s: Any
    who: str
    vocab_size: int

    def check(self, holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise SamplingError(f"{self.who}: {field}={shown(getattr(self.s, field))}, but {rule}")

    def counts(self, field: str, least: int, rule: str) -> None:
        value = getattr(self.s, field)
        self.check(is_int(value) and value >= least, field, rule)

    def numbers(self, field: str, low: float, high: float, rule: str) -> None:
        value = getattr(self.s, field)
        self.check(_is_number(value) and low <= value <= high, field, rule)

    def is_id(self, value: Any) -> bool:
        return is_int(value) and 0 <= value < self.vocab_size

    def ids(self, field: str) -> None:
        ids, rule = getattr(self.s, field), f"it must hold ids in 0..{self.vocab_size - 1}"
        self.check(is_list(ids), field, rule)
        bad = [t for t in ids if not self.is_id(t)][:1]
        self.check(not bad, field, f"{rule}, which {shown(bad)} is not")


def _check_draws(f: _Fields) -> None:
    s = f.s
    warm = f"it must be finite and at least 0, at most {LARGEST_TEMPERATURE}"
    f.numbers("temperature", 0, LARGEST_TEMPERATURE, warm)
    f.check(_is_number(s.top_p) and 0 < s.top_p <= 1, "top_p", "it must be above 0 and at most 1")
    f.numbers("min_p", 0, 1, "it must be at least 0 and at most 1")
    f.counts("top_k", 0, "it must be an integer, 0 for no limit or at least 1")


def _check_edits(f: _Fields, processors: tuple[str, ...]) -> None:
    s = f.s
    sound = _is_number(s.repetition_penalty) and 0 < s.repetition_penalty <= LARGEST_PENALTY
    f.check(sound, "repetition_penalty", f"it must be above 0 and at most {LARGEST_PENALTY}")
    for field in ("presence_penalty", "frequency_penalty"):
        range_ = f"it must be a number in -{LARGEST_PENALTY}..{LARGEST_PENALTY}"
        f.numbers(field, -LARGEST_PENALTY, LARGEST_PENALTY, range_)
    bias = _bias_pairs(s.logit_bias)
    rule = f"it must map ids in 0..{f.vocab_size - 1} to numbers, each once"
    f.check(bias is not None, "logit_bias", rule)
    odd = [t for t, _ in bias if not f.is_id(t)][:1]
    f.check(not odd, "logit_bias", f"{rule}, and {shown(odd)} is no such id")
    f.check(len({t for t, _ in bias}) == len(bias), "logit_bias", rule)
    limit = f"each must be -inf or a number in -{LARGEST_PENALTY}..{LARGEST_PENALTY}"
    heavy = [pair for pair in bias if not _is_bias(pair[1])][:1]
    f.check(not heavy, "logit_bias", f"{limit}, not {shown(heavy)}")
    if s.allowed_ids is not None:
        f.ids("allowed_ids")
        f.check(len(s.allowed_ids) > 0, "allowed_ids", "it must allow at least 1 id")
    f.ids("banned_ids")
    f.check(
        s.processor is None or s.processor in processors,
        "processor",
        f"the program has {list(processors)}; give functions as load_program(processors=...)",
    )
    plain = isinstance(s.processor_args, tuple) and all(map(_is_plain, s.processor_args))
    f.check(plain, "processor_args", "it must be a tuple of None, bool, int, float, str and bytes")
    f.check(s.processor is not None or not s.processor_args, "processor_args", "processor is None")


def _check_lengths(f: _Fields) -> None:
    s = f.s
    seeded = s.seed is None or (is_int(s.seed) and 0 <= s.seed < 2**64)
    f.check(seeded, "seed", "it must be None or an integer in 0..2**64-1")
    f.check(is_int(s.n) and 1 <= s.n <= LARGEST_N, "n", f"it must be in 1..{LARGEST_N}")
    f.counts("max_tokens", 0, "it must be at least 1, or 0 to score the prompt")
    f.check(s.n == 1 or s.max_tokens > 0, "n", "max_tokens=0 generates nothing")
    f.counts("min_tokens", 0, "it must be at least 0")
    f.check(s.min_tokens <= s.max_tokens, "min_tokens", f"max_tokens={s.max_tokens!r}")


def _check_greedy(f: _Fields) -> None:
    """What would have no effect beside a temperature of 0."""
    s = f.s
    if s.temperature >= GREEDY_BELOW:
        return
    greedy = f"temperature={s.temperature!r} is greedy, so it would have no effect"
    f.check(s.top_k <= 1, "top_k", greedy)
    f.check(s.top_p == 1, "top_p", greedy)
    f.check(s.min_p == 0, "min_p", greedy)
    equal = f"temperature={s.temperature!r} is greedy, so all samples would be equal"
    f.check(s.n == 1, "n", equal)


def _check_ends(f: _Fields, has_text: bool) -> None:
    s = f.s
    words = is_list(s.stop) and all(isinstance(w, str) and w and is_unicode(w) for w in s.stop)
    f.check(words, "stop", "it must hold non-empty strings")
    missing = "the program has no token table to find text with"
    f.check(has_text or not s.stop, "stop", f"{missing}; use stop_ids")
    f.ids("stop_ids")
    for field in ("ignore_eos", "include_stop", "stream"):
        f.check(isinstance(getattr(s, field), bool | np.bool_), field, "it must be True or False")
    f.check(has_text or not s.stream, "stream", missing)


def _check_scoring(f: _Fields) -> None:
    s = f.s
    for field in ("logprobs", "prompt_logprobs"):
        k = getattr(s, field)
        fits = k is None or (is_int(k) and 0 <= k <= f.vocab_size)
        f.check(fits, field, f"it must be None or in 0..{f.vocab_size}, the size of the vocabulary")
    if s.max_tokens > 0:
        return
    nothing = "max_tokens=0 generates nothing, so it would have no effect"
    f.check(s.logprobs is None, "logprobs", nothing)
    for field in ("stop", "stop_ids"):
        f.check(len(getattr(s, field)) == 0, field, nothing)
    for field in ("include_stop", "stream"):
        f.check(not getattr(s, field), field, nothing)


def _plain(s: Any) -> SamplingParams:
    """Parameters that passed every check, without numpy's types."""
    return SamplingParams(
        temperature=float(s.temperature),
        top_k=min(int(s.top_k), LARGEST_INT),
        top_p=float(s.top_p),
        min_p=float(s.min_p),
        repetition_penalty=float(s.repetition_penalty),
        presence_penalty=float(s.presence_penalty),
        frequency_penalty=float(s.frequency_penalty),
        logit_bias=tuple(sorted((int(t), float(b)) for t, b in _bias_pairs(s.logit_bias))),
        allowed_ids=None if s.allowed_ids is None else _ids(s.allowed_ids),
        banned_ids=_ids(s.banned_ids),
        processor=s.processor,
        processor_args=s.processor_args,
        seed=None if s.seed is None else int(s.seed),
        n=int(s.n),
        max_tokens=min(int(s.max_tokens), LARGEST_INT),
        min_tokens=min(int(s.min_tokens), LARGEST_INT),
        stop=tuple(s.stop),
        stop_ids=_ids(s.stop_ids),
        include_stop=bool(s.include_stop),
        ignore_eos=bool(s.ignore_eos),
        logprobs=None if s.logprobs is None else int(s.logprobs),
        prompt_logprobs=None if s.prompt_logprobs is None else int(s.prompt_logprobs),
        stream=bool(s.stream),
    )


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(sorted({int(t) for t in values}))


def _bias_pairs(bias: Any) -> list[tuple[Any, Any]] | None:
    pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
    if not is_list(pairs) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        return None
    return list(pairs)


def _is_bias(value: Any) -> bool:
    if not _is_number(value):
        return False
    return value == -np.inf or -LARGEST_PENALTY <= value <= LARGEST_PENALTY


def _is_plain(value: Any) -> bool:
    """Whether the canonical form of states can hold it, and no step can change it."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return is_unicode(value)
    return value is None or type(value) in (bool, int, float, bytes)


def _is_number(value: Any) -> bool:
    return isinstance(value, float | np.floating) or is_int(value)
