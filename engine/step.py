"""The main loop of everything: one step is schedule, execute, commit. Open this file first."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from purestep.engine.ahead import look_ahead
from purestep.engine.commit import commit
from purestep.engine.encoding import holds_of
from purestep.engine.execute import execute, launch, wait
from purestep.engine.policy import Policy, fcfs
from purestep.engine.pool import advance_, owned, retract_
from purestep.engine.program import Program
from purestep.engine.schedule import plan_ahead, schedule
from purestep.state.adapters import evict, load_failed
from purestep.state.blocks import BlockDraft
from purestep.state.encoder import dropped, let_go
from purestep.state.engine import EngineState, HostState, drop_blobs, drop_copies
from purestep.state.errors import ConfigError
from purestep.state.in_flight import released
from purestep.state.plan import Outputs, Overwrites, StepPlan, StepResult
from purestep.state.request import frozen
from purestep.state.rows import completed_record, take_rows

Sees = Callable[[StepPlan, StepResult], object]


def step(
    program: Program, state: EngineState, policy: Policy = fcfs, sees: Sees | None = None
) -> tuple[EngineState, Outputs]:
    """Advance every request the plan has room for by one model call.

    Pure on the host: `state.host` stays valid and unchanged. `state.device` is donated, its memory
    is written in place, so afterwards only the returned state can be stepped. An idle state is
    returned as it is, with empty outputs. Where `step_ahead` has left a plan in flight, its results
    are waited for and nothing new is planned. `sees` is told what was planned and what came back,
    once the step has succeeded (see `record`).

    Raises DonatedStateError for a state that was stepped before, TornStateError after a step that
    failed half-way (see `recover`), PolicyError for an inadmissible policy.
    """
    _check_program(program, state)
    if state.host.idle:
        return state, idle_outputs(state.host)
    if state.host.in_flight:
        device, result = wait(state.device)
        return _landed(replace(state, device=device), result, sees)
    host, plan = schedule(state.config, state.host, policy)
    meanwhile = look_ahead(program, state, host, plan, policy)
    device, result = execute(program, state.device, plan, state.blobs, meanwhile)
    return _landed(replace(state, host=host, device=device), result, sees)


def step_ahead(
    program: Program, state: EngineState, policy: Policy = fcfs, sees: Sees | None = None
) -> tuple[EngineState, Outputs]:
    """`step` that leaves a plan in flight, so that a GPU computes while the host works: the next
    plan is queued behind it before its results are waited for. Every request gets the same tokens.

    The first call only queues a plan, and says nothing (`Outputs` of an idle engine); every later
    one tells the outputs of the plan before. Where that has to be known first (`schedule` raises
    InFlightError), and where nothing is left to queue, the call is a `step`. Whatever may be done
    between two steps may be done with a plan in flight, but for branch, flush, adopt, fork and
    snapshot, which raise StepError: call `step` once before.

    Raises as `step` does. If it raises, `state` stays valid, also the plan it has in flight, unless
    waiting for that one is what failed (see `recover`).
    """
    _check_program(program, state)
    following = None if state.host.idle else plan_ahead(state.config, state.host, policy)
    if following is None:
        return step(program, state, policy, sees)
    host, plan = following
    device = launch(program, state.device, plan, state.blobs)
    if not state.host.in_flight:
        return replace(state, host=host, device=device), idle_outputs(state.host)
    try:
        device, result = wait(device)
    except BaseException:
        retract_(state.device, plan)
        raise
    return _landed(replace(state, host=host, device=device), result, sees)


def _check_program(program: Program, state: EngineState) -> None:
    if program.config != replace(state.config, num_blocks=program.config.num_blocks):
        raise ConfigError("this state belongs to another program: their configs differ")


def _landed(
    state: EngineState, result: StepResult, sees: Sees | None
) -> tuple[EngineState, Outputs]:
    """The state once the oldest plan in flight has come back with `result`."""
    plan = state.host.in_flight[0]
    host, outputs = commit(state.config, state.host, plan, result)
    if sees is not None:
        sees(plan, result)
    state = replace(state, host=host)
    return (drop_blobs(state) if outputs.finished else state), outputs


def idle_outputs(host: HostState) -> Outputs:
    """What a step of an idle engine says."""
    nothing = frozen((), np.float32)
    return Outputs(step=host.step, ids=(), tokens_S=frozen(()), logprobs_S=nothing, finished=())


def recover(state: EngineState) -> EngineState:
    """Make the state before a failed step usable again.

    Drops just the cached blocks, adapters and encoder outputs that the failed plan may have
    overwritten; running requests that held such a block wait in front of the queue and are
    recomputed. So are the rows of a plan in flight whose own results could not be had; one that did
    not fail stays in flight. Without a failed step the state is returned as it is. Raises
    DonatedStateError for a spent one.
    """
    pool = owned(state.device)
    lost = bool(state.device.launched) and state.device.launched[0].failed
    if pool.torn is None and not lost:
        return state
    host = without_flown(state.host) if lost else state.host
    if pool.torn is not None:
        host = without_overwritten(host, pool.torn)
    pool.torn = None
    device = replace(state.device, launched=() if lost else state.device.launched)
    return replace(state, host=host, device=advance_(device, "recover"))


def without_flown(host: HostState) -> HostState:
    """The host state without its plans in flight, of which nobody knows what they have done."""
    plans, draft = host.in_flight, BlockDraft(host.blocks)
    for plan in reversed(plans):
        first_R = plan.start_R // host.rows.tail_RB.shape[1]
        for table, first in zip(plan.tables, first_R.tolist(), strict=True):
            for block in table[first:].tolist():
                draft.forget(block)
        host = replace(host, ended=(*plan.ended, *host.ended))
    planned = {key for plan in plans for key in plan.row_ids}
    written = {target for plan in plans for _, target in plan.copies}
    for _, _, table in host.departed:
        draft.release(table)
    adapters = host.adapters
    uploaded = {place.version for plan in plans for place in plan.uploads}
    for version in uploaded:
        adapters = evict(adapters, version)
    for name, _ in (load for plan in plans for load in plan.loads):
        adapters = load_failed(adapters, name)
    hurt = [
        row
        for row, key in enumerate(host.rows.ids)
        if key in planned
        or host.rows.versions[row] in uploaded
        or not written.isdisjoint(host.rows.tables[row].tolist())
    ]
    host = replace(
        host,
        blocks=draft.finish(),
        adapters=adapters,
        in_flight=(),
        departed=(),
    )
    host = _recomputed(host, hurt)
    made = [item.identifier for plan in plans for item in plan.encodes if item.keep]
    drops = [identifier for plan in plans for identifier in plan.drops]
    encoder = dropped(host.encoder, made)
    leaving = tuple(dict.fromkeys((*drops, *encoder.leaving)))
    return replace(host, encoder=replace(encoder, leaving=leaving))


def without_overwritten(host: HostState, lost: Overwrites) -> HostState:
    """`recover` on the host state alone."""
    gone = set(lost.blocks)
    draft = BlockDraft(host.blocks)
    for block in lost.blocks:
        draft.forget(block)
    hurt = [
        row
        for row, table in enumerate(host.rows.tables)
        if not gone.isdisjoint(table.tolist()) or host.rows.versions[row] in lost.adapters
    ]
    adapters = host.adapters
    for version in lost.adapters:
        adapters = evict(adapters, version)
    host = _recomputed(replace(host, blocks=draft.finish(), adapters=adapters), hurt)
    return replace(host, encoder=dropped(host.encoder, lost.outputs))


def _recomputed(host: HostState, hurt: list[int]) -> HostState:
    """These rows in front of the queue, where they begin anew."""
    rows, draft = host.rows, BlockDraft(host.blocks)
    departed = released(host, [rows.ids[r] for r in hurt], [rows.tables[r] for r in hurt], draft)
    records = {
        rows.ids[row]: completed_record(rows, row, host.requests[rows.ids[row]]) for row in hurt
    }
    copies = drop_copies(host.copies, draft)
    held = [pair for record in records.values() for pair in holds_of(record)]
    return replace(
        host,
        rows=take_rows(rows, [row for row in range(len(rows.ids)) if row not in hurt]),
        requests=host.requests.update(records),
        waiting=(*records, *host.waiting),
        copies=copies,
        blocks=draft.finish(),
        departed=departed,
        encoder=let_go(host.encoder, held),
    )
