"""The parts of a plan that only some rows need: edited logits, scores, hidden states, embeddings.

A batch in which nobody asks for them pays for one look at a column of flags.
"""

import numpy as np
from immutables import Map

from purestep.engine.config import Config
from purestep.state.engine import Rows, all_tokens
from purestep.state.plan import EmbeddedSpan, HiddenRow, LogitEdits, ScoredRow
from purestep.state.request import RequestState, frozen

_NONE = frozen(())


def edits_of(config: Config, record: RequestState, place: int) -> LogitEdits | None:
    """What changes the logits of a row whose record is complete; None where nothing does."""
    s, drawn = record.request.sampling, record.generated
    banned = s.banned_ids
    if len(drawn) < s.min_tokens:
        banned = tuple(sorted({*banned, *s.stop_ids, *(() if s.ignore_eos else config.stop_ids)}))
    counted = s.presence_penalty or s.frequency_penalty
    repeats = s.repetition_penalty != 1
    if not (banned or counted or repeats or s.logit_bias or s.processor) and s.allowed_ids is None:
        return None
    sequence = all_tokens(record) if repeats or s.processor else _NONE
    drawn_E, count_E = np.unique(drawn, return_counts=True) if counted else (_NONE, _NONE)
    return LogitEdits(
        place=place,
        bias_id_E=frozen([token for token, _ in s.logit_bias]),
        bias_E=frozen([bias for _, bias in s.logit_bias], np.float32),
        repetition_penalty=s.repetition_penalty,
        seen_E=frozen(np.unique(sequence[sequence >= 0])) if repeats else _NONE,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        drawn_E=frozen(drawn_E),
        count_E=frozen(count_E),
        banned_E=frozen(banned),
        allowed_E=None if s.allowed_ids is None else frozen(s.allowed_ids),
        processor=s.processor,
        processor_args=s.processor_args,
        context=frozen(sequence) if s.processor else _NONE,
    )


def probes(
    rows: Rows, count_R: np.ndarray, requests: Map[str, RequestState]
) -> tuple[tuple[ScoredRow, ...], tuple[HiddenRow, ...]]:
    """Whose prompt this step scores, and whose hidden states it returns: positions that are
    computed again after a preemption, and were told before, are left out."""
    scored, hidden = [], []
    for row in np.flatnonzero(rows.probed_R).tolist():
        record, start = requests[rows.ids[row]], int(rows.num_computed_R[row])
        end = start + int(count_R[row])
        tokens, known = record.request.tokens, record.num_scored
        stop = min(end, len(tokens) - 1)  # the last position scores no token of the prompt
        if record.scores_prompt and known < stop:
            target_N = frozen(tokens[known + 1 : stop + 1])
            num_tops = record.request.sampling.prompt_logprobs
            scored.append(
                ScoredRow(row=row, first=known - start, target_N=target_N, num_tops=num_tops)
            )
        if (layers := record.request.hidden_layers) and record.num_hidden < end:
            hidden.append(HiddenRow(row=row, first=record.num_hidden - start, layers=layers))
    return tuple(scored), tuple(hidden)


def embedded_spans(
    rows: Rows, count_R: np.ndarray, requests: Map[str, RequestState]
) -> tuple[EmbeddedSpan, ...]:
    """The tokens of this step that stand for embeddings, row by row."""
    spans, first_R = [], np.cumsum(count_R) - count_R
    for row in np.flatnonzero(rows.embedded_R).tolist():
        request, start = requests[rows.ids[row]].request, int(rows.num_computed_R[row])
        places = np.flatnonzero(request.tokens == -1)
        mine = places[(places >= start) & (places < start + count_R[row])]
        if len(mine):
            spans.append(
                EmbeddedSpan(
                    blob=request.prompt_embeds,
                    first_row=int(np.searchsorted(places, start)),
                    index_E=frozen(mine - start + first_R[row]),
                )
            )
    return tuple(spans)
