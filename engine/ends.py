"""Which rows a step's tokens end, and why; and the text that people get to see.

S rows that drew a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from purestep.engine.config import Config
from purestep.state.engine import HostState, Rows, completed_record, completion
from purestep.state.plan import StepPlan, StepResult
from purestep.state.pytree import evolve
from purestep.state.request import Completion, FinishReason, RequestState
from purestep.state.text import decode, find_stop, tellable

_NOT_FINITE = "the model's logits are not finite (NaN or infinite weights or activations)"


@dataclass(frozen=True, slots=True)
class End:
    """How a row ends. `text` is the whole text where a stop string cut it."""

    reason: FinishReason
    stop: str | int | None = None
    text: bytes | None = None
    error: str | None = None


def failed_rows(result: StepResult, places: Sequence[int], rows: Sequence[int]) -> dict[int, End]:
    """The ends of rows that drew no token, by row; `places` are theirs among the sampled ones."""
    errors = dict(result.errors)
    return {
        row: End(FinishReason.ERROR, error=errors.get(place, _NOT_FINITE))
        for place, row in zip(places, rows, strict=True)
    }


def unsound_rows(plan: StepPlan, result: StepResult, at_R: np.ndarray) -> dict[int, End]:
    """The ends of rows whose prompt cannot be scored, as the logits are not finite. `at_R` are the
    places of the plan's rows among the running ones, -1 for those that left."""
    return {
        int(at_R[probe.row]): End(FinishReason.ERROR, error=_NOT_FINITE)
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
    grown: dict[int, bytes],
    at_S: np.ndarray,
    token_S: np.ndarray,
) -> dict[int, End]:
    """Which rows end with the token they drew. A stop wins over a limit reached at the same time.

    The texts of rows that watch theirs are put into `grown`, by row.
    """
    ends = {}
    num_tokens_S, watched_S = rows.num_tokens_R[at_S], rows.watched_R[at_S]
    full_S = num_tokens_S >= rows.limit_R[at_S]
    late_S = num_tokens_S >= rows.least_R[at_S]  # a processor may lift the ban of ends
    eos_S = rows.heeds_eos_R[at_S] & late_S
    if eos_S.any():
        eos_S &= np.isin(token_S, config.stop_ids)
    for s in np.flatnonzero(full_S | eos_S | watched_S).tolist():
        row, token = int(at_S[s]), int(token_S[s])
        own = None
        if watched_S[s]:
            record = host.requests[rows.ids[row]]
            if record.text is not None:
                grown[row] = record.text + config.tokens.piece(token)
            own = _own_stop(record, grown.get(row), token) if late_S[s] else None
        if own is not None:
            ends[row] = own
        elif eos_S[s]:
            ends[row] = End(FinishReason.STOP, stop=token)
        elif full_S[s]:
            ends[row] = End(FinishReason.LENGTH)
    return ends


def _own_stop(record: RequestState, text: bytes | None, token: int) -> End | None:
    """Whether the request's own stop strings or ids end it with this token; `text` includes it."""
    sampling = record.request.sampling
    if text is not None and (found := find_stop(text, len(record.text), sampling.stop)):
        at, stop = found
        end = at + len(stop.encode()) if sampling.include_stop else at
        return End(FinishReason.STOP, stop=stop, text=text[:end])
    if token in sampling.stop_ids:
        return End(FinishReason.STOP, stop=token)
    return None


def new_texts(
    config: Config,
    host: HostState,
    rows: Rows,
    changed: dict[str, RequestState],
    grown: dict[int, bytes],
    ends: dict[int, End],
) -> tuple[tuple[str, str], ...]:
    """What is new in the text of each row that streams it, whole characters only; all that is left
    where the row ends. `changed` gets the grown texts, and remembers what was told of them."""
    news = []
    for row, text in grown.items():
        key = rows.ids[row]
        record = changed.get(key) or host.requests[key]
        sampling, start = record.request.sampling, record.num_streamed
        told, end = b"", start
        if sampling.stream and row in ends:
            final = _final_text(config, completed_record(rows, row, record), ends[row])
            told, end = final[start:], len(final)
        elif sampling.stream:
            end = tellable(text, start, () if sampling.include_stop else sampling.stop)
            told = text[start:end]
        if told:
            news.append((key, decode(told)))
        changed[key] = evolve(record, text=text, num_streamed=end if told else start)
    return tuple(news)


def finish(config: Config, rows: Rows, row: int, record: RequestState, end: End) -> Completion:
    """The completion of a row that ends."""
    record = completed_record(rows, row, record)
    text = None if config.tokens is None else decode(_final_text(config, record, end))
    return completion(record, text=text, finish_reason=end.reason, stop=end.stop, error=end.error)


def _final_text(config: Config, record: RequestState, end: End) -> bytes:
    """The text of a complete record; without a stopping id's own bytes, unless they are wanted."""
    if end.text is not None:
        return end.text
    hides_last = isinstance(end.stop, int) and not record.request.sampling.include_stop
    return config.tokens.join(record.generated[:-1] if hides_last else record.generated)
