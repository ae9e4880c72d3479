"""The parts of a plan that only some rows need: edited logits, scores, hidden states, embeddings.

A batch in which nobody asks for them pays for one look at what its rows are.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from immutables import Map

from purestep.engine.config import Config
from purestep.state.plan import EmbeddedSpan, HiddenRow, ScoredRow
from purestep.state.request import RequestState, frozen
from purestep.state.rows import Rows, drawn_parts
from purestep.state.sampling import LogitEdits, SamplingParams
from purestep.state.scores import locked

_NONE = frozen(())


def edits_of(config: Config, sampling: SamplingParams, early: bool) -> LogitEdits | None:
    """What changes the logits whatever the tokens so far; None where nothing does. `early`: before
    `min_tokens` are generated, so that end tokens are banned. Made once a request, in `submit`."""
    s, banned = sampling, sampling.banned_ids
    if early:
        banned = tuple(sorted({*banned, *s.stop_ids, *(() if s.ignore_eos else config.stop_ids)}))
    counts = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
    masks = banned or s.logit_bias or s.allowed_ids is not None
    if not (counts or masks or s.processor):
        return None
    return LogitEdits(
        bias_id_E=frozen([token for token, _ in s.logit_bias]),
        bias_E=frozen([bias for _, bias in s.logit_bias], np.float32),
        repetition_penalty=s.repetition_penalty,
        seen_E=_NONE,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        drawn_E=_NONE,
        count_E=_NONE,
        banned_E=frozen(banned),
        allowed_E=None if s.allowed_ids is None else frozen(s.allowed_ids),
        processor=s.processor,
        processor_args=s.processor_args,
        context=_NONE,
    )


def edits_after(
    edits: LogitEdits, prompt: np.ndarray, generated: Sequence[np.ndarray]
) -> LogitEdits:
    """The edits for the token behind these, the generated ones in parts."""
    if not edits.looks_back:
        return edits
    found: dict[str, np.ndarray] = {}
    if edits.processor or edits.repetition_penalty != 1:
        sequence = locked(np.concatenate([prompt, *generated]))
        if edits.processor:
            found["context"] = sequence
        if edits.repetition_penalty != 1:
            found["seen_E"] = sequence if sequence.min() >= 0 else locked(sequence[sequence >= 0])
    if edits.presence_penalty or edits.frequency_penalty:
        drawn_E, count_E = np.unique(np.concatenate(generated), return_counts=True)
        found |= {"drawn_E": frozen(drawn_E), "count_E": frozen(count_E)}
    return replace(edits, **found)


def row_edits(
    rows: Rows, sampled_R: np.ndarray, requests: Map[str, RequestState]
) -> tuple[tuple[int, LogitEdits], ...]:
    """(place among the sampled rows, edits) of those that have any: most batches have none."""
    if "edited" not in rows.traits and "early" not in rows.traits:
        return ()
    early_R = rows.num_tokens_R < rows.least_R
    edited_R = sampled_R & (rows.edited_R | early_R)
    if not np.count_nonzero(edited_R):
        return ()
    place_R, found = np.cumsum(sampled_R) - 1, []
    for row in np.flatnonzero(edited_R).tolist():
        record = requests[rows.ids[row]]
        edits = record.early_edits if early_R[row] else record.edits
        if edits is not None and edits.looks_back:
            parts = (record.generated, *drawn_parts(rows, row)[0])
            edits = edits_after(edits, record.request.tokens, parts)
        if edits is not None:
            found.append((int(place_R[row]), edits))
    return tuple(found)


def probes(
    rows: Rows, count_R: np.ndarray, requests: Map[str, RequestState]
) -> tuple[tuple[ScoredRow, ...], tuple[HiddenRow, ...]]:
    """Whose prompt this step scores, and whose hidden states it returns: positions that are
    computed again after a preemption, and were told before, are left out."""
    if "probed" not in rows.traits:
        return (), ()
    scored, hidden = [], []
    start_R, end_R = rows.num_computed_R, rows.num_computed_R + count_R
    # The last position scores no token of the prompt.
    known_R, stop_R = (
        np.maximum(rows.num_scored_R, start_R),
        np.minimum(end_R, rows.num_prompt_R - 1),
    )
    for row in np.flatnonzero((rows.num_scored_R >= 0) & (known_R < stop_R)).tolist():
        request, known = requests[rows.ids[row]].request, int(known_R[row])
        scored.append(
            ScoredRow(
                row=row,
                first=known - int(start_R[row]),
                target_N=frozen(request.tokens[known + 1 : int(stop_R[row]) + 1]),
                num_tops=request.sampling.prompt_logprobs,
            )
        )
    first_R = np.maximum(rows.num_hidden_R - start_R, 0)
    for row in np.flatnonzero((rows.num_hidden_R >= 0) & (first_R < count_R)).tolist():
        layers = requests[rows.ids[row]].request.hidden_layers
        hidden.append(HiddenRow(row=row, first=int(first_R[row]), layers=layers))
    return tuple(scored), tuple(hidden)


def embedded_spans(
    rows: Rows, count_R: np.ndarray, requests: Map[str, RequestState]
) -> tuple[EmbeddedSpan, ...]:
    """The tokens of this step that stand for embeddings, row by row."""
    if "embedded" not in rows.traits:
        return ()
    spans, first_R = [], np.cumsum(count_R) - count_R
    for row in np.flatnonzero(rows.embedded_R & (rows.num_computed_R < rows.num_prompt_R)).tolist():
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
