"""How tokens are chosen: the user's words, checked and in one plain form."""

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from purestep.state.errors import SamplingError
from purestep.state.pytree import tree


@tree
class SamplingParams:
    """How tokens are chosen, and when to stop.

    On fp32 logits, in this order: `logit_bias`, `repetition_penalty` (ids of prompt and generated
    tokens), `presence_penalty` and `frequency_penalty` (of generated ones), `banned_ids`,
    `allowed_ids` and end tokens while `min_tokens` are not reached, the program's logits processor
    called `processor`; then `temperature`, `top_k`, `top_p`, `min_p`. Each does what the processor
    of that name in transformers does (presence and frequency: what OpenAI documents).

    A `temperature` below 1e-5 is greedy, as 0: the lowest id among the largest logits. `top_k` 0,
    `top_p` 1 and `min_p` 0 are off; `top_k=1` draws among the ids that share the largest logit.
    `logit_bias` maps ids to numbers (-inf bans). `seed` None derives the noise from the engine's
    seed and the request's id. `n` samples of one prompt differ in their noise; the first is called
    as the request, the others `id#1`, `id#2`, ...

    `stop` strings end the text just before their first occurrence, also across token borders, or
    behind it with `include_stop`; `stop_ids` come on top of the model's own end tokens, which
    `ignore_eos` switches off. The stopping token is kept in `Completion.tokens`. No stop counts
    before `min_tokens` are generated. `max_tokens` 0 scores the prompt and generates nothing; how
    tokens are chosen then does not matter, and to ask for anything of generated ones is refused.

    `logprobs` k returns the k likeliest tokens of each position beside the chosen one,
    `prompt_logprobs` k the same for the prompt (k = 0: only the tokens themselves). All logprobs
    are of the model's own distribution: the log-softmax of the raw fp32 logits, whatever the other
    parameters say. `stream` puts new text into `Outputs.texts`, all of it where the request ends
    by a stop or by length; else what was held back is in `Completion.text` alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # pairs once submitted
    allowed_ids: tuple[int, ...] | None = None
    banned_ids: tuple[int, ...] = ()
    processor: str | None = None
    processor_args: tuple[Any, ...] = ()  # None, bool, int, float, str, bytes, and tuples of them
    seed: int | None = None
    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream: bool = False


@tree
class LogitEdits:
    """What changes the logits of one sampled row, in this order; E ids of each kind.

    What depends on the tokens so far is empty in the form that a request keeps.
    """

    bias_id_E: np.ndarray  # int32
    bias_E: np.ndarray  # float32
    repetition_penalty: float
    seen_E: np.ndarray  # int32, the ids of prompt and generated tokens; some more than once
    presence_penalty: float
    frequency_penalty: float
    drawn_E: np.ndarray  # int32, the ids of generated tokens, each once
    count_E: np.ndarray  # int32, how often
    banned_E: np.ndarray  # int32, end tokens included while they are not allowed yet
    allowed_E: np.ndarray | None  # int32
    processor: str | None
    processor_args: tuple[Any, ...]
    context: np.ndarray  # int32, all ids of the row, for the processor; -1 = an embedding

    @property
    def looks_back(self) -> bool:
        """Whether the tokens so far matter."""
        counts = self.presence_penalty or self.frequency_penalty
        return bool(counts or self.repetition_penalty != 1 or self.processor)


GREEDY_BELOW = 1e-5  # of temperatures: quotients would lose the noise's digits there
LARGEST_INT = 2**31 - 1  # what a column of the running rows holds
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
    s, V = sampling, vocab_size

    def check(holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise SamplingError(f"{who}: {field}={shown(getattr(s, field))}, but {rule}")

    def counts(field: str, least: int, rule: str) -> None:
        check(is_int(getattr(s, field)) and getattr(s, field) >= least, field, rule)

    def numbers(field: str, low: float, high: float, rule: str) -> None:
        value = getattr(s, field)
        check(_is_number(value) and low <= value <= high, field, rule)

    def id_tuple(field: str) -> None:
        ids, rule = getattr(s, field), f"it must hold ids in 0..{V - 1}"
        check(is_list(ids), field, rule)
        bad = [t for t in ids if not (is_int(t) and 0 <= t < V)][:1]
        check(not bad, field, f"{rule}, which {shown(bad)} is not")

    warm = f"it must be finite and at least 0, at most {LARGEST_TEMPERATURE}"
    numbers("temperature", 0, LARGEST_TEMPERATURE, warm)
    check(_is_number(s.top_p) and 0 < s.top_p <= 1, "top_p", "it must be above 0 and at most 1")
    numbers("min_p", 0, 1, "it must be at least 0 and at most 1")
    counts("top_k", 0, "it must be an integer, 0 for no limit or at least 1")
    sound = _is_number(s.repetition_penalty) and 0 < s.repetition_penalty <= LARGEST_PENALTY
    check(sound, "repetition_penalty", f"it must be above 0 and at most {LARGEST_PENALTY}")
    for field in ("presence_penalty", "frequency_penalty"):
        range_ = f"it must be a number in -{LARGEST_PENALTY}..{LARGEST_PENALTY}"
        numbers(field, -LARGEST_PENALTY, LARGEST_PENALTY, range_)
    bias = _bias_pairs(s.logit_bias)
    rule = f"it must map ids in 0..{V - 1} to numbers, each once"
    check(bias is not None, "logit_bias", rule)
    odd = [t for t, _ in bias if not (is_int(t) and 0 <= t < V)][:1]
    check(not odd, "logit_bias", f"{rule}, and {shown(odd)} is no such id")
    check(len({t for t, _ in bias}) == len(bias), "logit_bias", rule)
    limit = f"each must be -inf or a number in -{LARGEST_PENALTY}..{LARGEST_PENALTY}"
    heavy = [
        pair
        for pair in bias
        if not _is_number(pair[1])
        or not (pair[1] == -np.inf or -LARGEST_PENALTY <= pair[1] <= LARGEST_PENALTY)
    ][:1]
    check(not heavy, "logit_bias", f"{limit}, not {shown(heavy)}")
    if s.allowed_ids is not None:
        id_tuple("allowed_ids")
        check(len(s.allowed_ids) > 0, "allowed_ids", "it must allow at least 1 id")
    id_tuple("banned_ids")
    check(
        s.processor is None or s.processor in processors,
        "processor",
        f"the program has {list(processors)}; give functions as load_program(processors=...)",
    )
    plain = isinstance(s.processor_args, tuple) and all(map(_is_plain, s.processor_args))
    check(plain, "processor_args", "it must be a tuple of None, bool, int, float, str and bytes")
    check(s.processor is not None or not s.processor_args, "processor_args", "processor is None")
    seeded = s.seed is None or (is_int(s.seed) and 0 <= s.seed < 2**64)
    check(seeded, "seed", "it must be None or an integer in 0..2**64-1")
    check(is_int(s.n) and 1 <= s.n <= LARGEST_N, "n", f"it must be in 1..{LARGEST_N}")
    counts("max_tokens", 0, "it must be at least 1, or 0 to score the prompt")
    check(s.n == 1 or s.max_tokens > 0, "n", "max_tokens=0 generates nothing")
    counts("min_tokens", 0, "it must be at least 0")
    check(s.min_tokens <= s.max_tokens, "min_tokens", f"max_tokens={s.max_tokens!r}")
    if s.temperature < GREEDY_BELOW:
        greedy = f"temperature={s.temperature!r} is greedy, so it would have no effect"
        check(s.top_k <= 1, "top_k", greedy)
        check(s.top_p == 1, "top_p", greedy)
        check(s.min_p == 0, "min_p", greedy)
        equal = f"temperature={s.temperature!r} is greedy, so all samples would be equal"
        check(s.n == 1, "n", equal)
    words = is_list(s.stop) and all(isinstance(w, str) and w and is_unicode(w) for w in s.stop)
    check(words, "stop", "it must hold non-empty strings")
    missing = "the program has no token table to find text with"
    check(has_text or not s.stop, "stop", f"{missing}; use stop_ids")
    id_tuple("stop_ids")
    for field in ("ignore_eos", "include_stop", "stream"):
        check(isinstance(getattr(s, field), bool | np.bool_), field, "it must be True or False")
    check(has_text or not s.stream, "stream", missing)
    for field in ("logprobs", "prompt_logprobs"):
        k = getattr(s, field)
        fits = k is None or (is_int(k) and 0 <= k <= V)
        check(fits, field, f"it must be None or in 0..{V}, the size of the vocabulary")
    if s.max_tokens == 0:
        nothing = "max_tokens=0 generates nothing, so it would have no effect"
        check(s.logprobs is None, "logprobs", nothing)
        for field in ("stop", "stop_ids", "include_stop", "stream"):
            check(
                len(getattr(s, field)) == 0
                if is_list(getattr(s, field))
                else not getattr(s, field),
                field,
                nothing,
            )
    return SamplingParams(
        temperature=float(s.temperature),
        top_k=min(int(s.top_k), LARGEST_INT),
        top_p=float(s.top_p),
        min_p=float(s.min_p),
        repetition_penalty=float(s.repetition_penalty),
        presence_penalty=float(s.presence_penalty),
        frequency_penalty=float(s.frequency_penalty),
        logit_bias=tuple(sorted((int(t), float(b)) for t, b in bias)),
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


def _is_plain(value: Any) -> bool:
    """Whether the canonical form of states can hold it, and no step can change it."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return is_unicode(value)
    return value is None or type(value) in (bool, int, float, bytes)


def is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float | np.floating) or is_int(value)


def shown(value: Any) -> str:
    """A value in a message: of a long one, the beginning."""
    return reprlib.repr(value) if is_list(value) or isinstance(value, Mapping) else repr(value)


def is_list(value: Any) -> bool:
    flat = isinstance(value, np.ndarray) and value.ndim == 1
    return flat or isinstance(value, tuple | list)


def is_unicode(text: str) -> bool:
    """Whether it can be written as bytes: JSON can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
