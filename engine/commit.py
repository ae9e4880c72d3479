"""What a step's result changes: new tokens, ended requests, freed blocks.

R running rows, S sampled rows of the plan.
"""

from collections.abc import Mapping

import numpy as np

from purestep.engine.config import Config
from purestep.engine.drawn import with_longer_tails, with_scores, with_tokens
from purestep.engine.encoding import settled
from purestep.engine.ends import (
    End,
    failed_rows,
    faulty_rows,
    finish,
    in_doubt,
    new_texts,
    sampled_ends,
    unsound_rows,
    untrusted_rows,
)
from purestep.state.adapters import count_users
from purestep.state.blocks import BlockDraft
from purestep.state.encoder import dropped
from purestep.state.engine import HostState
from purestep.state.errors import StepError
from purestep.state.in_flight import plan_places, released
from purestep.state.plan import Outputs, StepPlan, StepResult
from purestep.state.pytree import evolve
from purestep.state.request import FinishReason, RequestState
from purestep.state.rows import Rows, take_rows
from purestep.state.scores import locked


def commit(
    config: Config, host: HostState, plan: StepPlan, result: StepResult
) -> tuple[HostState, Outputs]:
    """Fold a step's result into the host state. Pure.

    Rows that left since the plan was made (aborted, or stopped by a commit before) are discarded.
    Another plan may be in flight behind it. Raises StepError unless `plan` is the oldest one in
    flight and `result` has an entry for each of its sampled rows.
    """
    _check_matches(host, plan, result)
    at_R = plan_places(host, plan)
    at_S, token_S, logprob_S = at_R[plan.sampled_R], result.token_S, result.logprob_S
    good_S, drew, ends = (at_S >= 0) & np.isfinite(logprob_S), at_S, {}
    if result.errors:
        good_S[[s for s, _ in result.errors]] = False
    faulty = faulty_rows(host, result)
    if faulty:
        good_S &= ~np.isin(at_S, list(faulty))
    if np.count_nonzero(good_S) < len(good_S):
        failed = ((at_S >= 0) & ~good_S).nonzero()[0]
        ends = failed_rows(result, failed.tolist(), at_S[failed].tolist())
        drew = np.where(good_S, at_S, -1)
        at_S, token_S, logprob_S = at_S[good_S], token_S[good_S], logprob_S[good_S]
    # Nearly always all rows, in their order: then nothing has to be picked from columns.
    all_drew = plan.row_ids is host.rows.ids and len(at_S) == len(at_R)
    of_S = slice(None) if all_drew else at_S
    ids_S = host.rows.ids if all_drew else tuple(host.rows.ids[row] for row in at_S.tolist())

    rows, full = with_tokens(config, host, at_S, of_S, token_S, logprob_S)
    rows, changed = with_longer_tails(host, rows, plan, result, at_R, drew, full)
    changed = with_scores(host, plan, result, at_R, changed)
    ends |= sampled_ends(config, host, rows, at_S, of_S, token_S)
    ends |= _scored_ends(rows, plan, at_R)
    ends |= unsound_rows(plan, result, at_R) | faulty
    rows, texts = new_texts(config, host, rows, changed, ends, at_S, of_S, ids_S, token_S)
    finished = tuple(
        finish(config, rows, row, changed.get(rows.ids[row]) or host.requests[rows.ids[row]], end)
        for row, end in ends.items()
    )
    after = _without(config, host, plan, result, rows, changed, full, ends)
    if plan.encodes or host.encoder.holders:
        encoder = settled(host, plan, [rows.ids[row] for row in ends])
        if result.faults:
            encoder = dropped(encoder, _not_kept(plan, result))
        after = evolve(after, encoder=encoder)
    outputs = Outputs(
        step=plan.step,
        ids=ids_S,
        tokens_S=locked(token_S),
        logprobs_S=locked(logprob_S),
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


def _not_kept(plan: StepPlan, result: StepResult) -> list[str]:
    """The outputs that the plan was to keep and that turned out to be of another size."""
    wrong = {(name, said) for name, said, _ in result.faults}
    return [i.identifier for i in plan.encodes if (i.identifier, i.num_embeds) in wrong]


def _check_matches(host: HostState, plan: StepPlan, result: StepResult) -> None:
    if not host.in_flight or host.in_flight[0].step != plan.step:
        flying = [p.step for p in host.in_flight]
        raise StepError(f"commit: plan of step {plan.step} is not the oldest in flight: {flying}")
    sampled = int(np.count_nonzero(plan.sampled_R))
    tops = int(np.count_nonzero(plan.sampling.num_tops_S >= 0))
    want = sampled, sampled, tops, len(plan.scored), len(plan.hidden)
    names = "token_S", "logprob_S", "tops", "scored", "hidden"
    found = tuple(len(getattr(result, name)) for name in names)
    if found != want:
        columns = (dict(zip(names, counts, strict=True)) for counts in (want, found))
        raise StepError("commit: step {} wants {}, the result has {}".format(plan.step, *columns))


def _scored_ends(rows: Rows, plan: StepPlan, at_R: np.ndarray) -> dict[int, End]:
    """The ends of rows that generate nothing and have computed their whole prompt."""
    if "only_scored" not in rows.traits:
        return {}
    ran, end_R = at_R[at_R >= 0], (plan.start_R + plan.count_R)[at_R >= 0]
    full_R = (rows.num_tokens_R[ran] == rows.limit_R[ran]) & (end_R == rows.num_tokens_R[ran])
    return {row: End(FinishReason.LENGTH) for row in ran[full_R].tolist()}


def _without(
    config: Config,
    host: HostState,
    plan: StepPlan,
    result: StepResult,
    rows: Rows,
    changed: dict[str, RequestState],
    full: list[int],
    ends: Mapping[int, End],
) -> HostState:
    """The state with `rows` and `changed` in place and `plan` landed: blocks that the plan behind
    it fills are findable if their last ids are known by now, and what the rows that end held is
    freed, their blocks with the last plan in flight that uses them. If the result is in doubt,
    nobody finds what those computed who left in flight: it may be theirs that went wrong."""
    records, leaving = host.requests, list(ends)
    if changed or leaving:
        with host.requests.mutate() as requests:
            requests.update(changed)
            for row in leaving:
                del requests[rows.ids[row]]
            records = requests.finish()
    flown = evolve(host, rows=rows, requests=records, in_flight=host.in_flight[1:])
    filled = _filled_blocks(config, flown, full, leaving) if flown.in_flight else []
    if not (leaving or filled or host.departed):
        return flown
    draft = BlockDraft(host.blocks)
    for block, digest in filled:
        draft.register(block, digest)
    doubt = bool(host.departed) and in_doubt(result)
    for step, _, table in host.departed:
        for block in table.tolist() if doubt else ():
            draft.forget(block)
        if step == plan.step:
            draft.release(table)
    flown = evolve(flown, departed=tuple(d for d in host.departed if d[0] != plan.step))
    if not leaving:
        return evolve(flown, blocks=draft.finish())
    for row in untrusted_rows(ends):
        for block in rows.tables[row].tolist():
            draft.forget(block)
    stays = np.ones(len(rows.ids), bool)
    stays[leaving] = False
    return evolve(
        flown,
        rows=take_rows(rows, np.flatnonzero(stays)),
        departed=released(
            flown, [rows.ids[row] for row in leaving], [rows.tables[row] for row in leaving], draft
        ),
        blocks=draft.finish(),
        adapters=count_users(host.adapters, ((rows.versions[row], -1) for row in leaving)),
    )


def _filled_blocks(
    config: Config, host: HostState, full: list[int], leaving: list[int]
) -> list[tuple[int, bytes]]:
    """(block, digest) of those that a plan in flight fills with an id that it did not know, among
    the rows whose blocks are `full` with what was drawn."""
    if not config.prefix_caching:
        return []
    rows, found = host.rows, []
    for row in full:
        length = int(rows.num_tokens_R[row])
        if length == rows.num_computed_R[row] and row not in leaving:
            digest = rows.sealed[row][-1][2]
            found.append((int(rows.tables[row][length // config.block_size - 1]), digest))
    return found


def _waiting_for(host: HostState) -> tuple[str, ...]:
    """The adapters being loaded, when nothing else is left to do."""
    if host.in_flight or host.rows.ids:
        return ()
    if not all(host.requests[i].loading for i in host.waiting):
        return ()
    return tuple(sorted({host.requests[i].request.adapter for i in host.waiting}))
