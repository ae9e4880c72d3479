"""What a step's result changes: new tokens, ended requests, freed blocks.

R running rows, S sampled rows of the plan, B block size.
"""

from dataclasses import dataclass, replace

import numpy as np

from purestep.engine.config import Config
from purestep.state.adapters import count_users
from purestep.state.blocks import BlockDraft
from purestep.state.engine import (
    HostState,
    Rows,
    completed_record,
    completion,
    take_rows,
    unsealed,
)
from purestep.state.errors import StepError
from purestep.state.hashing import block_digest
from purestep.state.plan import Outputs, StepPlan, StepResult
from purestep.state.request import Completion, FinishReason, RequestState, frozen
from purestep.state.text import decode, find_stop


def commit(
    config: Config, host: HostState, plan: StepPlan, result: StepResult
) -> tuple[HostState, Outputs]:
    """Fold a step's result into the host state. Pure.

    Rows that left since the plan was made (aborted) are discarded. Raises StepError unless `plan`
    is the oldest one in flight and `result` has an entry for each of its sampled rows.
    """
    _check_matches(host, plan, result)
    row_of = {request_id: row for row, request_id in enumerate(host.rows.ids)}
    sampled = np.flatnonzero(plan.sampled_R).tolist()
    pairs = [
        (s, row_of[plan.row_ids[r]]) for s, r in enumerate(sampled) if plan.row_ids[r] in row_of
    ]
    news_S = np.array([s for s, _ in pairs], np.intp)
    at_S = np.array([row for _, row in pairs], np.intp)
    token_S, logprob_S = result.token_S[news_S], result.logprob_S[news_S]
    finite_S = np.isfinite(logprob_S)

    rows = _append_tokens(host.rows, at_S[finite_S], token_S[finite_S], logprob_S[finite_S])
    changed = _sealed_records(config, host, rows, at_S[finite_S])
    ends = _find_ends(config, host, rows, changed, at_S, token_S, finite_S)
    finished = tuple(
        _finish(config, rows, row, changed.get(rows.ids[row]) or host.requests[rows.ids[row]], end)
        for row, end in ends.items()
    )
    after = _without(host, rows, changed, list(ends))
    after = replace(after, in_flight=host.in_flight[1:])
    told = at_S[finite_S].tolist()
    outputs = Outputs(
        step=plan.step,
        ids=tuple(rows.ids[row] for row in told),
        tokens_S=frozen(token_S[finite_S]),
        logprobs_S=frozen(logprob_S[finite_S], np.float32),
        finished=(*plan.ended, *finished),
        loads=plan.loads,
        waiting_for=_waiting_for(after),
        num_tokens=len(plan.tokens_T),
        num_rows=len(plan.row_ids),
        num_active_adapters=len(plan.residents),
        num_hit_tokens=plan.num_hit_tokens,
        num_preempted=plan.num_preempted,
    )
    return after, outputs


def _check_matches(host: HostState, plan: StepPlan, result: StepResult) -> None:
    flying = [p.step for p in host.in_flight]
    if not flying or flying[0] != plan.step:
        raise StepError(f"commit: plan of step {plan.step} is not the oldest in flight: {flying}")
    want = int(plan.sampled_R.sum())
    if len(result.token_S) != want or len(result.logprob_S) != want:
        raise StepError(
            f"commit: step {plan.step} sampled {want} rows, the result has {len(result.token_S)} "
            f"tokens and {len(result.logprob_S)} logprobs"
        )


def _append_tokens(
    rows: Rows, at_S: np.ndarray, token_S: np.ndarray, logprob_S: np.ndarray
) -> Rows:
    position_S = rows.num_tokens_R[at_S]
    place_S = position_S % rows.tail_RB.shape[1]
    tail_RB, tail_logprob_RB = rows.tail_RB.copy(), rows.tail_logprob_RB.copy()
    num_tokens_R = rows.num_tokens_R.copy()
    tail_RB[at_S, place_S] = token_S
    tail_logprob_RB[at_S, place_S] = logprob_S
    num_tokens_R[at_S] = position_S + 1
    for array in (tail_RB, tail_logprob_RB, num_tokens_R):
        array.setflags(write=False)
    return replace(
        rows, tail_RB=tail_RB, tail_logprob_RB=tail_logprob_RB, num_tokens_R=num_tokens_R
    )


def _sealed_records(
    config: Config, host: HostState, rows: Rows, at_S: np.ndarray
) -> dict[str, RequestState]:
    """Records of rows whose newest token filled a block: its tokens move there, and its digest."""
    B, changed = config.block_size, {}
    for row in at_S[rows.num_tokens_R[at_S] % B == 0].tolist():
        record = host.requests[rows.ids[row]]
        tokens, logprobs = unsealed(rows, row, record)
        digests = record.generated_digests
        if config.prefix_caching:
            parent = (digests or record.prompt_digests or (record.root,))[-1]
            digests = (*digests, block_digest(parent, rows.tail_RB[row]))
        changed[rows.ids[row]] = replace(
            record,
            generated=frozen(np.concatenate([record.generated, tokens])),
            logprobs=frozen(np.concatenate([record.logprobs, logprobs]), np.float32),
            generated_digests=digests,
        )
    return changed


@dataclass(slots=True)
class _End:
    reason: FinishReason
    stop: str | int | None = None
    text: bytes | None = None  # cut before the stop string
    error: str | None = None


def _find_ends(
    config: Config,
    host: HostState,
    rows: Rows,
    changed: dict[str, RequestState],
    at_S: np.ndarray,
    token_S: np.ndarray,
    finite_S: np.ndarray,
) -> dict[int, _End]:
    """Which rows end with this token, and how. A stop wins over a limit reached at the same time.

    Rows with a stop string get their text extended in `changed`.
    """
    ends = {}
    full_S = rows.num_tokens_R[at_S] >= rows.limit_R[at_S]
    eos_S = rows.heeds_eos_R[at_S] & np.isin(token_S, config.stop_ids)
    for s in np.flatnonzero(~finite_S | full_S | eos_S | rows.watched_R[at_S]).tolist():
        row, token = int(at_S[s]), int(token_S[s])
        if not finite_S[s]:
            error = "the model's logits are not finite (NaN or infinite weights or activations)"
            ends[row] = _End(FinishReason.ERROR, error=error)
            continue
        own = (
            _own_stop(config, host, rows.ids[row], changed, token) if rows.watched_R[row] else None
        )
        if own is not None:
            ends[row] = own
        elif eos_S[s]:
            ends[row] = _End(FinishReason.STOP, stop=token)
        elif full_S[s]:
            ends[row] = _End(FinishReason.LENGTH)
    return ends


def _own_stop(
    config: Config, host: HostState, request_id: str, changed: dict[str, RequestState], token: int
) -> _End | None:
    """Whether the request's own stop strings or ids end it with this token."""
    record = changed.get(request_id) or host.requests[request_id]
    sampling = record.request.sampling
    if record.text is not None:
        text = record.text + config.tokens.join(np.array([token]))
        found = find_stop(text, len(record.text), sampling.stop)
        if found is not None:
            return _End(FinishReason.STOP, stop=found[1], text=text[: found[0]])
        changed[request_id] = replace(record, text=text)
    if token in sampling.stop_ids:
        return _End(FinishReason.STOP, stop=token)
    return None


def _finish(config: Config, rows: Rows, row: int, record: RequestState, end: _End) -> Completion:
    record = completed_record(rows, row, record)
    text = None
    if end.text is not None:
        text = decode(end.text)
    elif config.tokens is not None:
        ended_by_id = isinstance(end.stop, int)
        text = config.tokens.text(record.generated[:-1] if ended_by_id else record.generated)
    return completion(record, text=text, finish_reason=end.reason, stop=end.stop, error=end.error)


def _without(
    host: HostState, rows: Rows, changed: dict[str, RequestState], leaving: list[int]
) -> HostState:
    """The state with `rows` and `changed` in place and the leaving rows' resources freed."""
    with host.requests.mutate() as requests:
        requests.update(changed)
        for row in leaving:
            del requests[rows.ids[row]]
        records = requests.finish()
    if not leaving:
        return replace(host, rows=rows, requests=records)
    draft = BlockDraft(host.blocks)
    for row in leaving:
        draft.release(rows.tables[row])
    stays = np.ones(len(rows.ids), bool)
    stays[leaving] = False
    return replace(
        host,
        rows=take_rows(rows, np.flatnonzero(stays)),
        requests=records,
        blocks=draft.finish(),
        adapters=count_users(host.adapters, ((rows.versions[row], -1) for row in leaving)),
    )


def _waiting_for(host: HostState) -> tuple[str, ...]:
    """The adapters being loaded, when nothing else is left to do."""
    if host.rows.ids or not all(host.requests[i].loading for i in host.waiting):
        return ()
    return tuple(sorted({host.requests[i].request.adapter for i in host.waiting}))
