"""What a step's result changes: new tokens, ended requests, freed blocks.

R running rows, S sampled rows of the plan, B block size.
"""

from dataclasses import replace

import numpy as np

from purestep.engine.config import Config
from purestep.engine.ends import End, failed_rows, finish, new_texts, sampled_ends, unsound_rows
from purestep.state.adapters import count_users
from purestep.state.blocks import BlockDraft
from purestep.state.engine import (
    HostState,
    Rows,
    completed_record,
    take_rows,
)
from purestep.state.errors import StepError
from purestep.state.hashing import block_digest
from purestep.state.plan import Outputs, StepPlan, StepResult
from purestep.state.request import FinishReason, RequestState, frozen


def commit(
    config: Config, host: HostState, plan: StepPlan, result: StepResult
) -> tuple[HostState, Outputs]:
    """Fold a step's result into the host state. Pure.

    Rows that left since the plan was made (aborted) are discarded. Raises StepError unless `plan`
    is the oldest one in flight and `result` has an entry for each of its sampled rows.
    """
    _check_matches(host, plan, result)
    row_of = {key: row for row, key in enumerate(host.rows.ids)}
    sampled = np.flatnonzero(plan.sampled_R).tolist()
    pairs = [
        (s, row_of[plan.row_ids[r]]) for s, r in enumerate(sampled) if plan.row_ids[r] in row_of
    ]
    place_S = np.array([s for s, _ in pairs], np.intp)
    at_S = np.array([row for _, row in pairs], np.intp)
    token_S, logprob_S = result.token_S[place_S], result.logprob_S[place_S]
    wrong = {s for s, _ in result.errors}
    good_S = np.isfinite(logprob_S) & ~np.isin(place_S, list(wrong))

    drew = dict(zip(place_S[good_S].tolist(), at_S[good_S].tolist(), strict=True))
    rows = _append_tokens(host.rows, at_S[good_S], token_S[good_S], logprob_S[good_S])
    rows = _with_tails(rows, plan, result, row_of, drew)
    rows, changed = _sealed_records(config, host, rows, at_S[good_S])
    _collect_scores(host, plan, result, row_of, changed)
    ends = failed_rows(result, place_S[~good_S].tolist(), at_S[~good_S].tolist())
    ends |= sampled_ends(config, host, rows, changed, at_S[good_S], token_S[good_S])
    ends |= _scored_ends(plan, rows, row_of)
    ends |= unsound_rows(plan, result, row_of)
    texts = new_texts(config, host, rows, changed, at_S[good_S], ends)
    finished = tuple(
        finish(config, rows, row, changed.get(rows.ids[row]) or host.requests[rows.ids[row]], end)
        for row, end in ends.items()
    )
    after = _without(host, rows, changed, list(ends))
    after = replace(after, in_flight=host.in_flight[1:])
    outputs = Outputs(
        step=plan.step,
        ids=tuple(rows.ids[row] for row in at_S[good_S].tolist()),
        tokens_S=frozen(token_S[good_S]),
        logprobs_S=frozen(logprob_S[good_S], np.float32),
        finished=(*plan.ended, *finished),
        texts=texts,
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
    sampled = int(plan.sampled_R.sum())
    want = {
        "token_S": sampled,
        "logprob_S": sampled,
        "tops": int(np.count_nonzero(plan.sampling.num_tops_S >= 0)),
        "scored": len(plan.scored),
        "hidden": len(plan.hidden),
    }
    found = {name: len(getattr(result, name)) for name in want}
    if found != want:
        raise StepError(f"commit: step {plan.step} wants {want}, the result has {found}")


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


def _with_tails(
    rows: Rows, plan: StepPlan, result: StepResult, row_of: dict[str, int], drew: dict[int, int]
) -> Rows:
    """Rows with likeliest tokens and hidden states behind the tails of the few that asked.

    `drew` maps the places of the sampled rows that drew a token to running rows.
    """
    if result.tops:
        tails = list(rows.tail_tops)
        asked = np.flatnonzero(plan.sampling.num_tops_S >= 0).tolist()
        for s, tops in zip(asked, result.tops, strict=True):
            if s in drew:
                tails[drew[s]] = (*tails[drew[s]], tops)
        rows = replace(rows, tail_tops=tuple(tails))
    if result.hidden:
        tails = list(rows.tail_hidden)
        for probe, states in zip(plan.hidden, result.hidden, strict=True):
            row = row_of.get(plan.row_ids[probe.row])
            if row is not None:
                tails[row] = (*tails[row], states)
        rows = replace(rows, tail_hidden=tuple(tails))
    return rows


def _sealed_records(
    config: Config, host: HostState, rows: Rows, at_S: np.ndarray
) -> tuple[Rows, dict[str, RequestState]]:
    """Records of rows whose newest token filled a block: its tokens move there, and its digest;
    and the rows without what moved."""
    B, changed = config.block_size, {}
    full = at_S[rows.num_tokens_R[at_S] % B == 0].tolist()
    for row in full:
        record = host.requests[rows.ids[row]]
        digests = record.generated_digests
        if config.prefix_caching:
            known = record.digests
            parent = known[-1] if known else record.root
            extra = (
                record.block_extras[len(known)] if len(known) < len(record.block_extras) else b""
            )
            digests = (*digests, block_digest(parent, rows.tail_RB[row], extra))
        changed[rows.ids[row]] = completed_record(rows, row, record, generated_digests=digests)
    tails = {"tail_tops": list(rows.tail_tops), "tail_hidden": list(rows.tail_hidden)}
    for row in full:
        for column in tails.values():
            column[row] = ()
    if full:
        rows = replace(rows, **{name: tuple(column) for name, column in tails.items()})
    return rows, changed


def _collect_scores(
    host: HostState,
    plan: StepPlan,
    result: StepResult,
    row_of: dict[str, int],
    changed: dict[str, RequestState],
) -> None:
    """Add to `changed` the scores of the prompts that this step read."""
    for probe, scores in zip(plan.scored, result.scored, strict=True):
        key = plan.row_ids[probe.row]
        if key in row_of:
            record = changed.get(key) or host.requests[key]
            changed[key] = replace(record, prompt_scores=(*record.prompt_scores, scores))


def _scored_ends(plan: StepPlan, rows: Rows, row_of: dict[str, int]) -> dict[int, End]:
    """The ends of rows that generate nothing and have computed their whole prompt."""
    if not (rows.limit_R == rows.num_prompt_R).any():
        return {}
    ran = [row_of[key] for key in plan.row_ids if key in row_of]
    full_R = (rows.num_tokens_R[ran] == rows.limit_R[ran]) & (
        rows.num_computed_R[ran] == rows.num_tokens_R[ran]
    )
    return {row: End(FinishReason.LENGTH) for row, full in zip(ran, full_R, strict=True) if full}


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
