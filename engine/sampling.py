"""From logits to a step's result: edits, draws, logprobs, scores of prompts. Part of `execute`.

S sampled rows, N scored positions, C of them at a time, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.engine.pending import Ring
from purestep.ops.edit_logits import (
    add_bias_,
    allow_only_,
    ban_,
    penalise_counts_,
    penalise_repetition_,
)
from purestep.ops.sample import draw, greedy, likeliest, score, with_bits
from purestep.state.plan import SamplingRows
from purestep.state.request import frozen
from purestep.state.sampling import GREEDY_BELOW, LogitEdits
from purestep.state.scores import Scores, joined

Processor = Callable[..., Tensor]
"""(ids of the row so far, fp32 logits [V], *processor_args) -> fp32 logits [V].

Runs in inference mode, and may write into the logits it is given."""

SCORE_CHUNK = 64  # prompt tokens whose logits are there at a time

Chosen = Sequence[tuple[int, LogitEdits]]
"""(place among the sampled rows, what changes its logits), as a plan has them."""


def sampled(
    raw_SV: Tensor,
    rows: SamplingRows,
    processors: Mapping[str, Processor],
    ring: Ring,
    step: int,
) -> tuple[Tensor, Callable[[], dict[str, Any]]]:
    """token_S int32 on the device, and what waits for the fields of a StepResult that concern the
    sampled rows."""
    errors: dict[int, str] = {}
    logits_SV = raw_SV
    if rows.edits:
        logits_SV = raw_SV.clone()
        edit_(logits_SV, rows.edits)
        errors = process_(logits_SV, rows.edits, processors)
    found_2S = _drawn(logits_SV, raw_SV, rows)
    read = ring.receive(found_2S, step)
    asked = (rows.num_tops_S >= 0).any()
    tops = _tops(raw_SV, found_2S[0].long(), rows.num_tops_S) if asked else ()

    def fields() -> dict[str, Any]:
        token_S, bits_S = read()
        logprob_S = frozen(bits_S.view(np.float32), np.float32)
        # Where the model's own logits are not finite no processor is to blame.
        own = [(place, why) for place, why in errors.items() if np.isfinite(logprob_S[place])]
        return {
            "token_S": frozen(token_S),
            "logprob_S": logprob_S,
            "tops": tops,
            "errors": tuple(sorted(own)),
        }

    return found_2S[0], fields


def _drawn(logits_SV: Tensor, raw_SV: Tensor, rows: SamplingRows) -> Tensor:
    """int32 [2, S]: tokens, and the bits of their logprobs."""
    if logits_SV is raw_SV and (rows.temperature_S < GREEDY_BELOW).all():
        return greedy(raw_SV)
    columns = (
        rows.temperature_S,
        rows.top_k_S,
        rows.top_p_S,
        rows.min_p_S,
        rows.stream_S.view(np.int64),
        rows.position_S,
    )
    token_S = draw(logits_SV, *(torch.from_numpy(c.copy()).to(raw_SV.device) for c in columns))
    return with_bits(token_S, score(raw_SV, token_S))


def _tops(raw_SV: Tensor, token_S: Tensor, num_tops_S: np.ndarray) -> tuple[Scores, ...]:
    """The likeliest tokens of each row that asked, found at once for those of equal counts."""
    found: dict[int, Scores] = {}
    for count in np.unique(num_tops_S[num_tops_S >= 0]).tolist():
        places = np.flatnonzero(num_tops_S == count)
        index = torch.from_numpy(places).to(raw_SV.device)
        scores = _scores(raw_SV[index], token_S[index], count)
        for i, place in enumerate(places.tolist()):
            found[place] = Scores(
                logprob_N=scores.logprob_N[i : i + 1],
                top_id_NK=scores.top_id_NK[i : i + 1],
                top_logprob_NK=scores.top_logprob_NK[i : i + 1],
            )
    return tuple(found[place] for place in sorted(found))


def score_rows(
    head: Callable[[int, int], Tensor],
    target_N: np.ndarray,
    num_tops: int,
    chunk: int = SCORE_CHUNK,
) -> Scores:
    """The scores of a row's prompt tokens; `head(start, end)` gives the logits of a range of them.

    In chunks, so that memory grows with chunk x V and not with the prompt.
    """
    parts = []
    for start in range(0, len(target_N), chunk):
        logits_CV = head(start, min(start + chunk, len(target_N)))
        target_C = torch.from_numpy(target_N[start : start + chunk].astype(np.int64))
        parts.append(_scores(logits_CV, target_C.to(logits_CV.device), num_tops))
    return parts[0] if len(parts) == 1 else joined(parts, num_tops)


def _scores(logits_NV: Tensor, token_N: Tensor, num_tops: int) -> Scores:
    id_NK, logprob_NK = likeliest(logits_NV, num_tops)
    return Scores(
        logprob_N=frozen(score(logits_NV, token_N).cpu().numpy(), np.float32),
        top_id_NK=frozen(id_NK.cpu().numpy()),
        top_logprob_NK=frozen(logprob_NK.cpu().numpy(), np.float32),
    )


def edit_(logits_SV: Tensor, edits: Chosen) -> None:
    """All but the processors, for all rows at once, in the order that SamplingParams documents."""

    def pairs(chosen: Chosen, ids: str, *columns: Any) -> list[Tensor]:
        """Rows, ids and further columns, an entry for each id of each of these edits."""
        lengths = [len(getattr(e, ids)) for _, e in chosen]
        rows = np.repeat([place for place, _ in chosen], lengths)
        flat = [rows, np.concatenate([getattr(e, ids) for _, e in chosen]).astype(np.int64)]
        for column in columns:
            values = [column(e) for _, e in chosen]
            whole = isinstance(values[0], np.ndarray)
            entries = np.concatenate(values) if whole else np.repeat(values, lengths)
            flat.append(entries.astype(np.float32))
        return [torch.from_numpy(array).to(logits_SV.device) for array in flat]

    if biased := [(s, e) for s, e in edits if len(e.bias_id_E)]:
        add_bias_(logits_SV, *pairs(biased, "bias_id_E", lambda e: e.bias_E))
    if repeated := [(s, e) for s, e in edits if len(e.seen_E)]:
        penalise_repetition_(logits_SV, *pairs(repeated, "seen_E", lambda e: e.repetition_penalty))
    if counted := [(s, e) for s, e in edits if len(e.drawn_E)]:
        columns = (lambda e: e.count_E, lambda e: e.frequency_penalty, lambda e: e.presence_penalty)
        penalise_counts_(logits_SV, *pairs(counted, "drawn_E", *columns))
    if banned := [(s, e) for s, e in edits if len(e.banned_E)]:
        ban_(logits_SV, *pairs(banned, "banned_E"))
    if limited := [(s, e) for s, e in edits if e.allowed_E is not None]:
        rows_A = torch.tensor([place for place, _ in limited], device=logits_SV.device)
        allow_only_(logits_SV, rows_A, *pairs(limited, "allowed_E"))


def process_(
    logits_SV: Tensor, edits: Chosen, processors: Mapping[str, Processor]
) -> dict[int, str]:
    """Run the rows' processors; what went wrong, by place, also where no token is left to draw."""
    errors = {}
    places = torch.tensor([place for place, _ in edits], device=logits_SV.device)
    before = logits_SV[places].amax(-1).tolist()
    for place, edit in edits:
        if edit.processor is not None:
            try:
                logits_SV[place] = _processed(logits_SV[place], edit, processors)
            except Exception as error:  # whatever a user's function raises ends its request alone
                errors[place] = f"logits processor {edit.processor!r}: {error!r}"
    after = logits_SV[places].amax(-1).tolist()  # NaN where there is one
    for (place, edit), had, top in zip(edits, before, after, strict=True):
        if place in errors or np.isfinite(top):
            continue
        if had == top == -np.inf:
            errors[place] = "no token is left: every id is banned or has a bias of -inf"
        elif edit.processor is not None:
            what = "-inf for every id" if top == -np.inf else f"{top} as a logit"
            errors[place] = f"logits processor {edit.processor!r} returned {what}"
    return errors


def _processed(logits_V: Tensor, edit: LogitEdits, processors: Mapping[str, Processor]) -> Tensor:
    function = processors[edit.processor]
    found = function(tuple(edit.context.tolist()), logits_V, *edit.processor_args)
    if not isinstance(found, Tensor) or found.shape != logits_V.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"returned {shape}, must be a tensor of shape {tuple(logits_V.shape)}")
    return found.to(logits_V)
