"""Which rows a step's tokens end, and why; and the text that people get to see.

S rows that drew a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from purestep.engine.config import Config
from purestep.state.engine import HostState
from purestep.state.plan import StepPlan, StepResult
from purestep.state.pytree import evolve
from purestep.state.request import Completion, FinishReason, RequestState, completion
from purestep.state.rows import Rows, completed_record
from purestep.state.scores import locked
from purestep.state.text import decode, find_stop, overlap, tellable

_NOT_FINITE = "the model's logits are not finite (NaN or infinite weights or activations)"


@dataclass(frozen=True, slots=True)
class End:
    """How a row ends. `num_text` are the bytes of its text that a stop string leaves."""

    reason: FinishReason
    stop: str | int | None = None
    num_text: int | None = None
    error: str | None = None
    void: bool = False  # what it computed is not to be trusted


def failed_rows(result: StepResult, places: Sequence[int], rows: Sequence[int]) -> dict[int, End]:
    """The ends of rows that drew no token, by row; `places` are theirs among the sampled ones."""
    errors, ends = dict(result.errors), {}
    for place, row in zip(places, rows, strict=True):
        why = errors.get(place, _NOT_FINITE)
        ends[row] = End(FinishReason.ERROR, error=why, void=why == _NOT_FINITE)
    return ends


def faulty_rows(host: HostState, result: StepResult) -> dict[int, End]:
    """The ends of rows with an item whose output is not what their requests say of it, whether they
    took rows of it in this step or found keys and values of others that did, in this step or in the
    one behind it."""
    wrong, ends = {(name, said): why for name, said, why in result.faults}, {}
    for row, key in enumerate(host.rows.ids if wrong else ()):
        for i, feature in enumerate(host.requests[key].features):
            if why := wrong.get((feature.identifier, feature.num_embeds)):
                error = f"item {i} ({feature.modality}): {why}"
                ends[row] = End(FinishReason.ERROR, error=error, void=True)
    return ends


def in_doubt(result: StepResult) -> bool:
    """Whether something in a step was not finite, or not what requests say of it."""
    scores = (scores.logprob_N for scores in result.scored)
    return bool(result.faults) or not (
        np.isfinite(result.logprob_S).all() and all(np.isfinite(s).all() for s in scores)
    )


def untrusted_rows(ends: Mapping[int, End]) -> list[int]:
    """Rows whose KV must serve nobody else: what is not finite at one token reaches the tokens
    before it in the same step, through weights of zero, and so blocks that are named by these; and
    what stands for an item's rows is not that item's."""
    return [row for row, end in ends.items() if end.void]


def unsound_rows(plan: StepPlan, result: StepResult, at_R: np.ndarray) -> dict[int, End]:
    """The ends of rows whose prompt cannot be scored, as the logits are not finite. `at_R` are the
    places of the plan's rows among the running ones, -1 for those that left."""
    return {
        int(at_R[probe.row]): End(FinishReason.ERROR, error=_NOT_FINITE, void=True)
        for probe, scores in zip(plan.scored, result.scored, strict=True)
        if at_R[probe.row] >= 0
        and not (
            np.isfinite(scores.logprob_N[probe.target_N >= 0]).all()
            and np.isfinite(scores.top_logprob_NK).all()
        )
    }


def sampled_ends(
    config: Config,
    host: HostState,
    rows: Rows,
    at_S: np.ndarray,
    of_S: np.ndarray | slice,
    token_S: np.ndarray,
) -> dict[int, End]:
    """Which rows end with the token they drew. A stop wins over a limit reached at the same time.
    `rows` have the tokens, and the texts as they were before; `of_S` picks the rows at `at_S`."""
    num_tokens_S = rows.num_tokens_R[of_S]
    full_S = num_tokens_S >= rows.limit_R[of_S]
    if "watched" not in rows.traits and "heeds_eos" not in rows.traits:
        return {row: End(FinishReason.LENGTH) for row in at_S[full_S].tolist()}
    late_S = num_tokens_S >= rows.least_R[of_S]  # a processor may lift the ban of ends
    eos_S = np.zeros(len(at_S), bool)
    for stop_id in config.stop_ids:  # a few
        eos_S |= token_S == stop_id
    eos_S &= rows.heeds_eos_R[of_S] & late_S
    watched_S = rows.watched_R[of_S] & late_S
    ends = {}
    for s in (full_S | eos_S | watched_S).nonzero()[0].tolist():
        row, token = int(at_S[s]), int(token_S[s])
        own = _own_stop(config, host, rows, row, token) if watched_S[s] else None
        if own is not None:
            ends[row] = own
        elif eos_S[s]:
            ends[row] = End(FinishReason.STOP, stop=token)
        elif full_S[s]:
            ends[row] = End(FinishReason.LENGTH)
    return ends


def _own_stop(config: Config, host: HostState, rows: Rows, row: int, token: int) -> End | None:
    """Whether the request's own stop strings or ids end it with this token."""
    sampling, before = host.requests[rows.ids[row]].request.sampling, rows.texts[row]
    if sampling.stop:
        text = before + config.tokens.piece(token)
        if found := find_stop(text, len(before), sampling.stop):
            at, stop = found
            end = at + len(stop.encode()) if sampling.include_stop else at
            num_text = int(rows.num_text_R[row]) - len(before) + end
            return End(FinishReason.STOP, stop=stop, num_text=num_text)
    if token in sampling.stop_ids:
        return End(FinishReason.STOP, stop=token)
    return None


def new_texts(
    config: Config,
    host: HostState,
    rows: Rows,
    changed: dict[str, RequestState],
    ends: dict[int, End],
    at_S: np.ndarray,
    of_S: np.ndarray | slice,
    ids_S: tuple[str, ...],
    token_S: np.ndarray,
) -> tuple[Rows, tuple[tuple[str, str], ...]]:
    """The rows with the grown texts; and what is new in the text of each row that streams it, whole
    characters only; all that is left where the row ends. `changed` are records that this step has
    changed; `of_S` and `ids_S` pick and name the rows at `at_S`.

    Nearly every token is whole characters, and nothing in front of it was held back: then its own
    text is the news, and of the row's nothing has to be kept.
    """
    if "has_text" not in rows.traits:
        return rows, ()
    tokens, texts = config.tokens, rows.texts
    simple_R = rows.streams_R & ~rows.watched_R & (rows.num_text_R == rows.num_streamed_R)
    simple_R[list(ends)] = False
    told_S = tokens.wholes(token_S)
    simple_S, length_S = simple_R[of_S], tokens.lengths(token_S)
    if None in told_S:
        simple_S = simple_S & [told is not None for told in told_S]
    num_text_R, num_streamed_R = rows.num_text_R.copy(), rows.num_streamed_R.copy()
    num_text_R[of_S] += length_S * simple_S
    num_streamed_R[of_S] += length_S * simple_S
    others = (~simple_S).nonzero()[0].tolist()
    if others:
        texts = list(texts)
    for s in others:
        row, key = int(at_S[s]), ids_S[s]
        if texts[row] is None:
            told_S[s] = ""
            continue
        record = changed.get(key) or host.requests[key]
        num_text_R[row] += length_S[s]
        told_S[s], texts[row], num_streamed_R[row] = _grown(
            config, rows, row, record, int(token_S[s]), ends
        )
    grown = evolve(
        rows,
        texts=tuple(texts),
        num_text_R=locked(num_text_R),
        num_streamed_R=locked(num_streamed_R),
    )
    return grown, tuple(new for new in zip(ids_S, told_S, strict=True) if new[1])


def _grown(
    config: Config,
    rows: Rows,
    row: int,
    record: RequestState,
    token: int,
    ends: dict[int, End],
) -> tuple[str, bytes, int]:
    """What is told of a row's text, what is kept of it, and how many of its bytes have been told.
    `rows` have the token, and the text as it was before."""
    sampling, told = record.request.sampling, int(rows.num_streamed_R[row])
    if row in ends and sampling.stream:
        final = _final_text(config, completed_record(rows, row, record), ends[row])
        return decode(final[told:]), b"", max(told, len(final))
    text = rows.texts[row] + config.tokens.piece(token)
    begin = int(rows.num_text_R[row]) - len(rows.texts[row])  # where it stands in the whole text
    keep = len(text) - overlap(text, sampling.stop)
    if not sampling.stream:
        return "", text[keep:], told
    end = tellable(text, told - begin, () if sampling.include_stop else sampling.stop)
    return decode(text[told - begin : end]), text[min(keep, end) :], begin + end


def finish(config: Config, rows: Rows, row: int, record: RequestState, end: End) -> Completion:
    """The completion of a row that ends."""
    record = completed_record(rows, row, record)
    text = None if config.tokens is None else decode(_final_text(config, record, end))
    return completion(record, text=text, finish_reason=end.reason, stop=end.stop, error=end.error)


def _final_text(config: Config, record: RequestState, end: End) -> bytes:
    """The text of a complete record; without a stopping id's own bytes, unless they are wanted."""
    if end.num_text is not None:
        return config.tokens.join(record.generated)[: end.num_text]
    hides_last = isinstance(end.stop, int) and not record.request.sampling.include_stop
    return config.tokens.join(record.generated[:-1] if hides_last else record.generated)


def ended_request(
    config: Config, record: RequestState, reason: FinishReason, error: str | None = None
) -> Completion:
    """The end of a request that gets no further token; its record is complete."""
    text = None if config.tokens is None else config.tokens.text(record.generated)
    return completion(record, text=text, finish_reason=reason, error=error)
