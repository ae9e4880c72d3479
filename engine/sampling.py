"""From logits to a step's result: edits, draws, logprobs, scores of prompts. Part of `execute`.

S sampled rows, N scored positions, C of them at a time, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.engine.pending import Ring, fetched
from purestep.engine.upload import Arrays, sent
from purestep.models.ends import EAGER, Ends
from purestep.ops.sample import Draws, draws_of
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
    ends: Ends = EAGER,
) -> tuple[Tensor, Callable[[], dict[str, Any]]]:
    """token_S int32 on the device, and what waits for the fields of a StepResult that concern the
    sampled rows. Nothing waits before that, but for processors that look at their logits."""
    edits, asking = rows.edits, _asking(rows.num_tops_S)
    own = {f"tops/{count}": place_C for count, place_C in asking.items()}
    draws, raised = None, {}
    if edits or (rows.temperature_S >= GREEDY_BELOW).any():
        draws = draws_of(
            rows.temperature_S,
            rows.top_k_S,
            rows.top_p_S,
            rows.min_p_S,
            rows.stream_S,
            rows.position_S,
        )
        own |= packed_edits(edits) | draws._asdict()
    there = sent(own, raw_SV.device) if own else {}
    if draws is None:
        found_XS = ends.greedy(raw_SV)
    else:
        logits_SV, bounds = raw_SV, ()
        if edits:
            logits_SV, had_S = ends.edited(raw_SV, there)
            raised = process_(logits_SV, edits, processors)
            left_S = logits_SV.amax(-1) if any(e.processor for _, e in edits) else had_S
            bounds = had_S, left_S  # NaN where there is one
        largest_k = min(int(draws.top_k.max(initial=1)), raw_SV.shape[1])
        there_draws = Draws(*(there[name] for name in Draws._fields))
        found_XS = ends.draw(logits_SV, raw_SV, there_draws, largest_k)
        if bounds:
            found_XS = torch.cat((found_XS, torch.stack(bounds).view(torch.int32)))
    read = ring.receive(found_XS, step)
    read_tops = _tops(raw_SV, asking, there, ends)

    def fields() -> dict[str, Any]:
        token_S, bits_S, *bounds = read()
        logprob_S = frozen(bits_S.view(np.float32), np.float32)
        errors = faults(edits, raised, *(b.view(np.float32) for b in bounds)) if bounds else {}
        # Where the model's own logits are not finite no processor is to blame.
        mine = [(place, why) for place, why in errors.items() if np.isfinite(logprob_S[place])]
        return {
            "token_S": frozen(token_S),
            "logprob_S": logprob_S,
            "tops": read_tops(logprob_S),
            "errors": tuple(sorted(mine)),
        }

    return found_XS[0], fields


def _asking(num_tops_S: np.ndarray) -> dict[int, np.ndarray]:
    """The rows that ask for so many of the likeliest tokens."""
    counts = np.unique(num_tops_S[num_tops_S >= 0]).tolist()
    return {count: np.flatnonzero(num_tops_S == count) for count in counts}


def _tops(
    raw_SV: Tensor, asking: dict[int, np.ndarray], there: dict[str, Tensor], ends: Ends
) -> Callable[[np.ndarray], tuple[Scores, ...]]:
    """The likeliest tokens of each row that asked, found at once for those of equal counts; from
    the rows' own logprobs."""
    pairs = [ends.likeliest(raw_SV[there[f"tops/{count}"]], count) for count in asking]
    read = fetched(*(tensor for pair in pairs for tensor in pair)) if pairs else tuple

    def tops(logprob_S: np.ndarray) -> tuple[Scores, ...]:
        found, arrays = {}, iter(read())
        for place_C, id_CK, logprob_CK in zip(asking.values(), arrays, arrays, strict=True):
            for i, place in enumerate(place_C.tolist()):
                found[place] = Scores(
                    logprob_N=frozen(logprob_S[place : place + 1], np.float32),
                    top_id_NK=frozen(id_CK[i : i + 1]),
                    top_logprob_NK=frozen(logprob_CK[i : i + 1], np.float32),
                )
        return tuple(found[place] for place in sorted(found))

    return tops


def score_rows(
    head: Callable[[int, int], Tensor],
    target_N: np.ndarray,
    num_tops: int,
    ends: Ends = EAGER,
    chunk: int = SCORE_CHUNK,
) -> Callable[[], Scores]:
    """Begins to score a row's prompt tokens; `head(start, end)` gives the logits of a range of
    them. What is returned waits for the scores.

    In chunks, so that memory grows with chunk x V and not with the prompt.
    """
    reads = []
    for start in range(0, len(target_N), chunk):
        logits_CV = head(start, min(start + chunk, len(target_N)))
        target = {"C": target_N[start : start + chunk].astype(np.int64)}
        logprob_C = ends.score(logits_CV, sent(target, logits_CV.device)["C"])
        reads.append(fetched(logprob_C, *ends.likeliest(logits_CV, num_tops)))

    def scores() -> Scores:
        parts = [_scores(*read()) for read in reads]
        return parts[0] if len(parts) == 1 else joined(parts, num_tops)

    return scores


def _scores(logprob_N: np.ndarray, id_NK: np.ndarray, logprob_NK: np.ndarray) -> Scores:
    return Scores(
        logprob_N=frozen(logprob_N, np.float32),
        top_id_NK=frozen(id_NK),
        top_logprob_NK=frozen(logprob_NK, np.float32),
    )


def packed_edits(edits: Chosen) -> Arrays:
    """All but the processors: those of `COLUMNS` that are wanted."""
    found: Arrays = {}

    def pairs(chosen: Chosen, ids: str, *columns: Any) -> list[np.ndarray]:
        """Rows, ids and further columns, an entry for each id of each of these edits."""
        lengths = [len(getattr(e, ids)) for _, e in chosen]
        rows = np.repeat([place for place, _ in chosen], lengths)
        flat = [rows, np.concatenate([getattr(e, ids) for _, e in chosen]).astype(np.int64)]
        for column in columns:
            values = [column(e) for _, e in chosen]
            whole = isinstance(values[0], np.ndarray)
            entries = np.concatenate(values) if whole else np.repeat(values, lengths)
            flat.append(entries.astype(np.float32))
        return flat

    def add(kind: str, columns: list[np.ndarray]) -> None:
        found.update((f"{kind}/{n}", column) for n, column in enumerate(columns))

    if biased := [(s, e) for s, e in edits if len(e.bias_id_E)]:
        add("bias", pairs(biased, "bias_id_E", lambda e: e.bias_E))
    if repeated := [(s, e) for s, e in edits if len(e.seen_E)]:
        add("seen", pairs(repeated, "seen_E", lambda e: e.repetition_penalty))
    if counted := [(s, e) for s, e in edits if len(e.drawn_E)]:
        columns = (lambda e: e.count_E, lambda e: e.frequency_penalty, lambda e: e.presence_penalty)
        add("drawn", pairs(counted, "drawn_E", *columns))
    if banned := [(s, e) for s, e in edits if len(e.banned_E)]:
        add("banned", pairs(banned, "banned_E"))
    if limited := [(s, e) for s, e in edits if e.allowed_E is not None]:
        rows_A = np.array([place for place, _ in limited])
        add("allowed", [rows_A, *pairs(limited, "allowed_E")])
    return found


def process_(
    logits_SV: Tensor, edits: Chosen, processors: Mapping[str, Processor]
) -> dict[int, str]:
    """Run the rows' processors; what they raised, by place."""
    errors = {}
    for place, edit in edits:
        if edit.processor is not None:
            try:
                logits_SV[place] = _processed(logits_SV[place], edit, processors)
            except Exception as error:  # whatever a user's function raises ends its request alone
                errors[place] = f"logits processor {edit.processor!r}: {error!r}"
    return errors


def faults(
    edits: Chosen, raised: Mapping[int, str], had_S: np.ndarray, left_S: np.ndarray
) -> dict[int, str]:
    """What went wrong, by place, also where no token is left to draw; from the largest logit of
    each row before and after the processors, NaN where there is one."""
    errors = dict(raised)
    for place, edit in edits:
        had, left = float(had_S[place]), float(left_S[place])
        if place in errors or np.isfinite(left):
            continue
        if had == left == -np.inf:
            errors[place] = "no token is left: every id is banned or has a bias of -inf"
        elif edit.processor is not None:
            what = "-inf for every id" if left == -np.inf else f"{left} as a logit"
            errors[place] = f"logits processor {edit.processor!r} returned {what}"
    return errors


def _processed(logits_V: Tensor, edit: LogitEdits, processors: Mapping[str, Processor]) -> Tensor:
    function = processors[edit.processor]
    found = function(tuple(edit.context.tolist()), logits_V, *edit.processor_args)
    if not isinstance(found, Tensor) or found.shape != logits_V.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"returned {shape}, must be a tensor of shape {tuple(logits_V.shape)}")
    return found.to(logits_V)
