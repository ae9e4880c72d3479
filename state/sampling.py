"""How tokens are chosen: the user's words, and what a plan makes of them."""

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

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


def is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


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
