"""The main loop of everything: one step is schedule, execute, commit. Open this file first."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from purestep.engine.ahead import look_ahead
from purestep.engine.commit import commit
from purestep.engine.encoding import holds_of
from purestep.engine.execute import execute
from purestep.engine.policy import Policy, fcfs
from purestep.engine.pool import advance_, owned
from purestep.engine.program import Program
from purestep.engine.schedule import schedule
from purestep.state.adapters import evict
from purestep.state.blocks import BlockDraft
from purestep.state.encoder import dropped, let_go
from purestep.state.engine import (
    EngineState,
    HostState,
    completed_record,
    drop_blobs,
    drop_copies,
    quiet,
    take_rows,
)
from purestep.state.errors import ConfigError
from purestep.state.plan import Outputs, Overwrites, StepPlan, StepResult
from purestep.state.request import frozen


def step(
    program: Program,
    state: EngineState,
    policy: Policy = fcfs,
    sees: Callable[[StepPlan, StepResult], object] | None = None,
) -> tuple[EngineState, Outputs]:
    """Advance every request the plan has room for by one model call.

    Pure on the host: `state.host` stays valid and unchanged. `state.device` is donated, its memory
    is written in place, so afterwards only the returned state can be stepped. An idle state is
    returned as it is, with empty outputs. `sees` is told what was planned and what came back, once
    the step has succeeded (see `record`).

    Raises DonatedStateError for a state that was stepped before, TornStateError after a step that
    failed half-way (see `recover`), PolicyError for an inadmissible policy.
    """
    if program.config != replace(state.config, num_blocks=program.config.num_blocks):
        raise ConfigError("this state belongs to another program: their configs differ")
    if state.host.idle:
        return state, idle_outputs(state.host)
    host, plan = schedule(state.config, state.host, policy)
    meanwhile = look_ahead(program, state, host, plan, policy)
    device, result = execute(program, state.device, plan, state.blobs, meanwhile)
    host, outputs = commit(state.config, host, plan, result)
    if sees is not None:
        sees(plan, result)
    state = replace(state, host=host, device=device)
    return (drop_blobs(state) if outputs.finished else state), outputs


def idle_outputs(host: HostState) -> Outputs:
    """What a step of an idle engine says."""
    nothing = frozen((), np.float32)
    return Outputs(step=host.step, ids=(), tokens_S=frozen(()), logprobs_S=nothing, finished=())


def recover(state: EngineState) -> EngineState:
    """Make the state before a failed step usable again.

    Drops just the cached blocks, adapters and encoder outputs that the failed plan may have
    overwritten; running requests that held such a block wait in front of the queue and are
    recomputed. Without a failed step the state is returned as it is. Raises DonatedStateError for a
    spent state.
    """
    pool = owned(state.device)
    if pool.torn is None:
        return state
    host = without_overwritten(quiet(state.host, "recover"), pool.torn)
    pool.torn = None
    return replace(state, host=host, device=advance_(pool, "recover"))


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
    records = {}
    for row in hurt:
        draft.release(host.rows.tables[row])
        request_id = host.rows.ids[row]
        records[request_id] = completed_record(host.rows, row, host.requests[request_id])
    adapters = host.adapters
    for version in lost.adapters:
        adapters = evict(adapters, version)
    copies = drop_copies(host.copies, draft)
    held = [pair for record in records.values() for pair in holds_of(record)]
    kept = [row for row in range(len(host.rows.ids)) if row not in hurt]
    return replace(
        host,
        rows=take_rows(host.rows, kept),
        requests=host.requests.update(records),
        waiting=(*records, *host.waiting),
        copies=copies,
        blocks=draft.finish(),
        adapters=adapters,
        encoder=dropped(let_go(host.encoder, held), lost.outputs),
    )
