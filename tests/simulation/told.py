"""What the caller of an engine knows of each request, and what it must therefore be told next."""

from dataclasses import dataclass, field, replace

import numpy as np

from purestep.engine.config import Config
from purestep.simulation.device import (
    CELL,
    adapter_reader,
    context_of,
    embedding_number,
    next_token,
    scores_of,
    state_of,
)
from purestep.simulation.media import content, filled, media_number, moved_number, positions_alone
from purestep.simulation.world import EOS, TABLE, TOWERS
from purestep.state.hashing import random_stream
from purestep.state.request import Completion, FinishReason, Request, RequestState, frozen


class Astray(AssertionError):
    """The output law is broken: a request was told something else than it would be told alone."""


def must(holds: object, what: str) -> None:
    """Raises Astray, naming what differs."""
    if not holds:
        raise Astray(what)


@dataclass
class Told:
    """The words of one request, and what came back so far."""

    request: Request
    version: str | None
    seed: int
    bound: bool
    index: int = 0
    path: tuple[int, ...] = ()
    branches: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    streamed: str = ""
    prompt: list[int] = field(default_factory=list)  # as `prompt_read` gives it
    ids: list[int] = field(default_factory=list)  # of the prompt, -1 where an embedding was given
    delta: int = 0  # what is added to a place behind the prompt to give its position
    cells: bytes = b""  # the KV of `prompt` and `tokens`, as far as it was needed
    read_by: tuple[str, str | None] = ("", None)  # the weights and version that `cells` are of
    reread: bool = False  # the weights became others, so what is collected is of either
    void: bool = False  # what it computed is worth nothing, so it ends with the step that lands
    ended_in: int = 0  # blocks of the pool it ended in, where the state has left that one since

    @property
    def scores(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    @property
    def sequence(self) -> list[int]:
        if not self.delta:
            return [*self.prompt, *self.tokens]
        numbers = []
        for place, token in enumerate(self.tokens, start=len(self.prompt)):
            numbers.append(moved_number(token, place, (place + self.delta,) * 3))
        return [*self.prompt, *numbers]

    @property
    def text(self) -> bytes:
        return TABLE.join(np.array(self.tokens, np.int32))

    def context(self, config: Config) -> bytes:
        """The request's KV as it would be alone, in a memory without end."""
        reader = (config.weights, self.version)
        if self.read_by != reader:
            self.cells, self.read_by = b"", reader
        rest = self.sequence[len(self.cells) // CELL :]
        self.cells = context_of(rest, *reader, self.cells)
        return self.cells


def told_of(
    config: Config, request: Request, version: str | None, seed: int, bound: bool, index: int
) -> Told:
    """A request that was just submitted."""
    told = Told(request, version, seed, bound, index=index)
    told.ids = list(request.tokens) or [-1] * len(request.prompt_embeds)
    told.prompt, told.delta = prompt_read(config, told)
    return told


def bind(config: Config, told: Told, version: str) -> None:
    """A request's adapter has come, and its media are seen through that."""
    told.version, told.bound = version, True
    told.prompt, told.delta = prompt_read(config, told)


def prompt_read(config: Config, told: Told) -> tuple[list[int], int]:
    """(what the toy reads of a prompt with the config's weights, `Told.delta`)."""
    request, tokens, embeds = told.request, told.ids, told.request.prompt_embeds
    reader = adapter_reader(told.version if told.version in TOWERS else None)
    rows = iter(() if embeds is None else embeds)
    prompt = [embedding_number(next(rows)) if t == -1 else int(t) for t in tokens]
    for feature in request.features:
        output = content(config.weights, feature.data, reader)
        for row, place in enumerate(filled(feature)):
            prompt[place] = media_number(output, row)
    if not (config.mrope_merge and request.features):
        return prompt, 0
    positions, delta = positions_alone(request, config.mrope_merge)
    places = zip(prompt, range(len(prompt)), positions, strict=True)
    return [moved_number(token, place, position) for token, place, position in places], delta


def branched(parent: Told, new_id: str) -> Told:
    """What is known of a branch from its beginning on."""
    parent.branches += 1
    return replace(
        parent,
        request=replace(parent.request, id=new_id),
        path=(*parent.path, parent.branches),
        branches=0,
        tokens=list(parent.tokens),
        logprobs=list(parent.logprobs),
    )


def expected_token(config: Config, told: Told, record: RequestState) -> tuple[int, float]:
    """`record` is the engine's, for the checked form of the parameters alone."""
    stream = random_stream(told.seed, told.index, told.path)
    alone = replace(record, generated=frozen(told.tokens), stream=stream)
    return next_token(config, told.context(config), alone)


def expected_end(told: Told, max_context: int) -> tuple[FinishReason, str | int | None] | None:
    """Why the request must end with its newest token; None while it must go on."""
    sampling, token = told.request.sampling, told.tokens[-1]
    if len(told.tokens) >= sampling.min_tokens and (found := newest_stop(told)):
        return FinishReason.STOP, found[2]
    ends = token in sampling.stop_ids or (token == EOS and not sampling.ignore_eos)
    if ends and len(told.tokens) >= sampling.min_tokens:
        return FinishReason.STOP, token
    full = len(told.tokens) == sampling.max_tokens
    full |= len(told.prompt) + len(told.tokens) == max_context
    return (FinishReason.LENGTH, None) if full else None


def newest_stop(told: Told) -> tuple[int, int, str] | None:
    """(where it begins, ...) of the first stop string that ends within the newest token."""
    if not told.request.sampling.stop:
        return None
    text, before = told.text, len(TABLE.join(np.array(told.tokens[:-1], np.int32)))
    found = [
        (at, -len(stop.encode()), stop)
        for stop in told.request.sampling.stop
        for at in range(len(text))
        if text.startswith(stop.encode(), at) and at + len(stop.encode()) > before
    ]
    return min(found, default=None)


def expected_text(told: Told, completion: Completion) -> str:
    """All of it, but for what a stop cuts off."""
    text, keeps = told.text, told.request.sampling.include_stop
    if isinstance(completion.stop, str):
        at, _, stop = newest_stop(told)
        text = text[: at + len(stop.encode()) * keeps]
    elif isinstance(completion.stop, int) and not keeps:
        text = TABLE.join(np.array(told.tokens[:-1], np.int32))
    return text.decode(errors="replace")


def judge_completion(config: Config, completion: Completion, told: Told, has_news: bool) -> None:
    """Everything a finished request is told. Raises Astray.

    A request ends when a step is planned, and is told by the next step that lands. Where the plan
    in between dies and the state goes on in a larger pool, it ended by the smaller one all the
    same: what it held is gone, and nothing of it waits any more.
    """
    who = f"{completion.key}: "
    must(completion.tokens.tolist() == told.tokens, who + "other tokens than it was told")
    must(completion.logprobs.tolist() == told.logprobs, who + "other logprobs than it was told")
    must(completion.num_prompt_tokens == len(told.prompt), who + "another prompt")
    must(
        completion.num_cached_tokens < len(told.prompt) or told.tokens,
        who + "a hit includes the last token",
    )
    reason = completion.finish_reason
    if told.void:
        must(reason == FinishReason.ERROR and completion.error, who + f"ended by {reason}")
    elif has_news:
        due = expected_end(told, config.max_context)
        must((reason, completion.stop) == due, who + f"ended by {reason}, due was {due}")
        must(completion.text == expected_text(told, completion), who + "another text")
    elif reason == FinishReason.LENGTH:
        must(told.request.sampling.max_tokens == 0, who + "ended without its last token")
    elif reason == FinishReason.CAPACITY:
        needed = -(-len(told.sequence) // config.block_size)
        must(needed > (told.ended_in or config.num_blocks), who + "the pool could have held it")
    else:
        failed = reason == FinishReason.ERROR and completion.error
        must(failed and told.request.adapter is not None, who + f"ended by {reason}")
    _judge_extras(config, completion, told, who)


def _judge_extras(config: Config, completion: Completion, told: Told, who: str) -> None:
    """Texts, scores and hidden states, whatever happened on the way."""
    sampling, prompt = told.request.sampling, told.prompt
    if sampling.stream and completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        must(told.streamed == completion.text, who + "streamed another text")
    must(completion.text.startswith(told.streamed), who + "streamed another beginning")
    if sampling.logprobs is None:
        must(completion.top_ids is None, who + "likeliest tokens that nobody asked for")
    else:
        wanted = [[t + k for k in range(sampling.logprobs)] for t in told.tokens]
        must(completion.top_ids.tolist() == wanted, who + "likeliest tokens of other draws")
    if told.reread or completion.finish_reason in (FinishReason.CAPACITY, FinishReason.ERROR):
        return
    context = told.context(config)
    if sampling.prompt_logprobs is not None and told.index == 0:
        scores = [
            scores_of(context[: end * CELL], token, sampling.prompt_logprobs)
            for end, token in enumerate(told.ids[1:], start=1)
        ]
        logprobs, ids = completion.prompt_logprobs, completion.prompt_top_ids
        must(logprobs.tolist()[1:] == [x for x, _ in scores], who + "other prompt logprobs")
        must(ids.tolist()[1:] == [found for _, found in scores], who + "other prompt tokens")
    num_read = len(prompt) + max(len(told.tokens) - 1, 0)
    for layer in told.request.hidden_layers:
        wanted = [[state_of(context[: end * CELL], layer)] for end in range(1, num_read + 1)]
        must(completion.hidden_states[layer].tolist() == wanted, who + f"hidden states {layer}")
