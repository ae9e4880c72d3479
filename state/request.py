"""What the caller asked for, how far it has come, and how it ended."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
from immutables import Map

from purestep.state.errors import RequestError
from purestep.state.identity import identifier
from purestep.state.media import Feature
from purestep.state.pytree import tree
from purestep.state.sampling import (
    LogitEdits,
    SamplingParams,
)
from purestep.state.scores import Scores, behind_the_first, joined, locked


@tree
class Request:
    """The user's words. `adapter` None is the base model; requests share cached prefixes only
    with requests of the same `salt`. `priority` matters under a policy that heeds it: smaller
    numbers are served first.

    `prompt_embeds` [n, hidden size] stands in the prompt in place of ids: a token of -1 takes its
    next row, and an empty `tokens` takes all of them. The rows enter the model as they are, with no
    embedding adapter's delta.

    `features` are its media: `tokens` hold a placeholder for each, whose ids are never looked up
    where an embedding takes their place, so that there they need not be in the vocabulary.

    `hidden_layers` asks for hidden states at every position, numbered as transformers numbers its
    `output_hidden_states`: 0 is the embeddings, i the output of layer i, the last one normed;
    negative numbers count from the end. With `n` > 1 each sample returns them, so each computes
    the prompt for itself.
    """

    id: str
    tokens: Sequence[int] | np.ndarray = ()
    adapter: str | None = None
    salt: str | None = None
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    hidden_layers: tuple[int, ...] = ()
    prompt_embeds: Any = None  # a tensor or array; the digest of its blob once submitted
    features: tuple[Feature, ...] = ()  # by offset once submitted, their tensors in blobs


def for_adapters(request: Request, adapters: Sequence[str | None]) -> list[Request]:
    """One prompt for many adapters: the request once for each, called `id/adapter` (`id/` for the
    base model). What was prepared for it (tokens, media) is shared and not prepared again. Raises
    nothing: an adapter that nobody knows is refused by `submit`."""
    return [replace(request, id=f"{request.id}/{a or ''}", adapter=a) for a in adapters]


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id or stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CAPACITY = "capacity"  # the whole KV pool could not hold one token more
    ERROR = "error"  # `Completion.error` tells


@tree
class Completion:
    """A finished request, or one of its `n` samples. P prompt tokens, G generated ones.

    Logprobs are of the model's own distribution (log-softmax of the raw fp32 logits, whatever the
    sampling parameters). Those of the prompt are carried by sample 0 and start with NaN, as nothing
    stands before the first token; there are none where the request ended before its whole prompt
    was read. `logprob_dicts` and `prompt_logprob_dicts` give them as JSON can hold them. Hidden
    states cover every position the model has read: prompt and generated tokens but the last drawn,
    the prompt alone for max_tokens=0, less where the request ended before that.
    """

    id: str
    key: str  # as in `Outputs.ids`: the id, or `id#1` of a second sample
    adapter: str | None
    tokens: np.ndarray  # int32 [G]
    logprobs: np.ndarray  # float32 [G]
    text: str | None  # None where the program has no token table
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache on first admission
    num_preemptions: int = 0
    stop: str | int | None = None  # the stop string or stop id that ended it
    error: str | None = None
    index: int = 0  # which of the `n` samples
    top_ids: np.ndarray | None = None  # int32 [G, k], the likeliest first; None if not asked for
    top_logprobs: np.ndarray | None = None  # float32 [G, k]
    prompt_logprobs: np.ndarray | None = None  # float32 [P], NaN where there is no id to score
    prompt_top_ids: np.ndarray | None = None  # int32 [P, k], first row -1
    prompt_top_logprobs: np.ndarray | None = None  # float32 [P, k], first row NaN
    hidden_states: Map[int, np.ndarray] | None = None  # layer as asked -> float32 [positions, D]


def logprob_dicts(completion: Completion) -> list[dict[int, float]]:
    """id -> logprob for each generated token: the chosen one first, then the k likeliest. Raises
    nothing."""
    G = len(completion.tokens)
    tops = completion.top_ids, completion.top_logprobs
    ids_GK, logprobs_GK = tops if completion.top_ids is not None else _no_tops(G)
    return _dicts(completion.tokens, completion.logprobs, ids_GK, logprobs_GK)


def prompt_logprob_dicts(
    completion: Completion, tokens: Sequence[int] | np.ndarray
) -> list[dict[int, float] | None]:
    """id -> logprob for each token of the prompt, which the caller gives; None for the first.

    Where an embedding stands in place of an id (-1) the likeliest tokens are there alone. Raises
    RequestError when the completion has no prompt logprobs, and for another prompt's length.
    """
    who = f"request {completion.id!r}"
    if completion.prompt_logprobs is None:
        if completion.index > 0:
            why = f"sample {completion.index} carries none, sample 0 does if they were asked for"
        elif completion.finish_reason in (FinishReason.ERROR, FinishReason.CAPACITY):
            cause = completion.error or completion.finish_reason.value
            why = f"it ended before its prompt was scored, if that was asked for: {cause}"
        else:
            why = "they were not asked for"
        raise RequestError(f"{who} has no prompt_logprobs: {why}")
    if len(tokens) != completion.num_prompt_tokens:
        raise RequestError(
            f"{who}: {len(tokens)} tokens given, but the prompt has "
            f"{completion.num_prompt_tokens} (-1 for each embedding)"
        )
    columns = completion.prompt_logprobs, completion.prompt_top_ids, completion.prompt_top_logprobs
    return [None, *_dicts(np.asarray(tokens)[1:], *(column[1:] for column in columns))]


def _no_tops(length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((length, 0), np.int32), np.zeros((length, 0), np.float32)


def _dicts(
    token_N: np.ndarray, logprob_N: np.ndarray, id_NK: np.ndarray, top_NK: np.ndarray
) -> list[dict[int, float]]:
    columns = (column.tolist() for column in (token_N, logprob_N, id_NK, top_NK))
    return [
        ({token: logprob} if token >= 0 else {}) | dict(zip(ids, tops, strict=True))
        for token, logprob, ids, tops in zip(*columns, strict=True)
    ]


@tree
class RequestState:
    """Progress of one live request.

    While it runs, all tokens since it became a row, and what was found out about them, live in the
    columns of `Rows`: the record stands still, and `progress` puts the two together. While it
    waits, `generated` is complete and nothing is computed.
    """

    request: Request  # `tokens` is a read-only int32 array here, -1 where an embedding stands
    key: str  # the name it lives under: the request's id, or `id#1` of a second sample
    index: int  # which of the request's `n` samples
    arrival: int
    queued_at: int  # the step before which it came into the queue, at first or once more
    version: str | None  # adapter version, bound when the adapter is there; None for base
    encoder_version: str | None  # the same, if the adapter changes encoders; else None
    loading: bool  # waits for its adapter; has no version and no digests
    seed: int  # the request's own, or one derived from the engine's seed and the request's id
    stream: int  # of its noise; unsigned 64 bit
    branch_path: tuple[int, ...]
    num_branches: int
    root: bytes  # what stands before the first block in the digest chain
    block_extras: tuple[bytes, ...]  # what a prompt block holds beside ids; () if no block does
    position_3P: np.ndarray | None  # int32, of the prompt, where media are placed by their grids
    position_delta: int  # what is added to a place behind the prompt to give its position
    prompt_digests: tuple[bytes, ...]  # of the prompt's full blocks
    generated_digests: tuple[bytes, ...]  # of the full blocks after those
    generated: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    num_cached: int
    num_preemptions: int
    # The end of the generated text, what is still to be told and where a stop string may begin;
    # None where no stop string or stream asks for it.
    text: bytes | None
    num_text: int  # bytes of the whole text
    num_streamed: int  # bytes of it that `Outputs.texts` has told
    early_edits: LogitEdits | None  # what changes the logits until `min_tokens` are generated
    edits: LogitEdits | None  # and from then on; None where nothing does
    tops: tuple[Scores, ...]  # of `generated`, where asked for
    prompt_scores: tuple[Scores, ...]  # of prompt tokens 1 onwards, as far as they are known
    hidden: tuple[np.ndarray, ...]  # float32 [layers asked for, n, D] of positions 0 onwards

    @property
    def features(self) -> tuple[Feature, ...]:
        """The request's, with the names of the encoder outputs that it gets."""
        if self.encoder_version is None:
            return self.request.features
        return tuple(
            replace(f, identifier=identifier(f.digest, self.encoder_version))
            for f in self.request.features
        )

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of the record's full blocks."""
        return self.prompt_digests + self.generated_digests

    @property
    def scores_prompt(self) -> bool:
        """Whether this sample is the one that tells the prompt's logprobs."""
        return self.request.sampling.prompt_logprobs is not None and self.index == 0

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose scores are known, from token 1 on."""
        return sum(len(scores.logprob_N) for scores in self.prompt_scores)

    @property
    def num_hidden(self) -> int:
        """Positions whose hidden states are known, from position 0 on."""
        return sum(chunk.shape[1] for chunk in self.hidden)

    @property
    def num_told(self) -> int | None:
        """Positions whose outputs are not wanted (again), so that cached KV may stand for them;
        None when that holds for all."""
        wants = [self.num_hidden] if self.request.hidden_layers else []
        if self.scores_prompt and self.num_scored < len(self.request.tokens) - 1:
            wants.append(self.num_scored)  # position p scores token p + 1
        return min(wants, default=None)


def frozen(values: Any, dtype: Any = np.int32) -> np.ndarray:
    """A read-only array holding a copy of `values`."""
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def all_tokens(record: RequestState) -> np.ndarray:
    """Prompt and generated tokens of a record whose `generated` is complete."""
    return np.concatenate([record.request.tokens, record.generated])


def completion(record: RequestState, **how: Any) -> Completion:
    """The end of a request whose record is complete."""
    request = record.request
    return Completion(
        id=request.id,
        key=record.key,
        adapter=request.adapter,
        tokens=record.generated,
        logprobs=record.logprobs,
        num_prompt_tokens=len(request.tokens),
        num_cached_tokens=max(record.num_cached, 0),
        num_preemptions=record.num_preemptions,
        index=record.index,
        **_collected(record),
        **how,
    )


def _collected(record: RequestState) -> dict[str, Any]:
    """The columns of a completion that only some requests ask for."""
    sampling, layers = record.request.sampling, record.request.hidden_layers
    found: dict[str, Any] = {}
    if sampling.logprobs is not None:
        tops = joined(record.tops, sampling.logprobs)
        found |= {"top_ids": tops.top_id_NK, "top_logprobs": tops.top_logprob_NK}
    if record.scores_prompt and record.num_scored == len(record.request.tokens) - 1:
        scores = behind_the_first(joined(record.prompt_scores, sampling.prompt_logprobs))
        found |= {
            "prompt_logprobs": scores.logprob_N,
            "prompt_top_ids": scores.top_id_NK,
            "prompt_top_logprobs": scores.top_logprob_NK,
        }
    if layers and record.hidden:
        states = locked(np.concatenate(record.hidden, axis=1))
        found["hidden_states"] = Map(zip(layers, states, strict=True))
    return found
