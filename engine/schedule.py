"""Who runs, how many tokens, which blocks: the decisions of one step, without touching a tensor.

R running rows, B block size. Rows that decode are served before prompt chunks, so that a long
prompt never starves them; a step that preempts admits nobody (multi_lora.md, 11.1).
"""

from dataclasses import dataclass, replace

import numpy as np
from immutables import Map

from purestep.engine.admission import Admitted, admit, ended_request, register_blocks
from purestep.engine.config import Config
from purestep.engine.planning import make_plan, versions_in_use
from purestep.engine.policy import Order, Policy, checked_order, fcfs
from purestep.state.adapters import count_users, load_asked, num_unevictable, touch
from purestep.state.blocks import BlockDraft
from purestep.state.engine import (
    HostState,
    Rows,
    add_rows,
    completed_record,
    quiet,
    take_rows,
)
from purestep.state.plan import StepPlan
from purestep.state.request import Completion, FinishReason, RequestState, frozen


def schedule(config: Config, host: HostState, policy: Policy = fcfs) -> tuple[HostState, StepPlan]:
    """Plan one step. Pure: the returned state has the plan in flight, the given one is unchanged.

    Raises StepError when a plan is in flight already, PolicyError for an inadmissible order.
    """
    order = checked_order(quiet(host, "schedule"), policy)
    draft = BlockDraft(host.blocks)
    running = _serve_running(config, host, order, draft)
    admitted = Admitted.none(host.adapters)
    if running.admits:
        room = config.max_batched_tokens - int(running.count_R.sum())
        admitted = admit(config, host, order, draft, running.rows, room)

    rows = add_rows(running.rows, [row for row, _ in admitted.rows])
    count_R = np.append(running.count_R, [count for _, count in admitted.rows]).astype(np.int32)

    for source, _ in host.copies:
        draft.release([source])  # after all allocations: this plan reads it
    loads = _wanted_loads(host)
    hopeless = () if loads else _hopeless_loads(config, host)
    ended = (*running.ended, *admitted.ended, *hopeless)
    gone = [c.key for c in ended]
    requests = _updated_records(host, running.records | admitted.records, gone)
    adapters = touch(admitted.adapters, versions_in_use(rows))
    adapters = load_asked(adapters, (name for name, _ in loads))
    if gone:
        adapters = count_users(adapters, ((host.requests[i].version, -1) for i in gone))
    plan = make_plan(config, host, rows, count_R, requests, adapters, draft.allocated)
    plan = replace(
        plan,
        ended=(*host.ended, *ended),
        loads=loads,
        num_hit_tokens=admitted.num_hit_tokens,
        num_preempted=len(running.preempted),
    )
    left = {*gone, *(row.ids[0] for row, _ in admitted.rows)}
    after = replace(
        host,
        step=host.step + 1,
        requests=requests,
        waiting=(*running.preempted, *(i for i in host.waiting if i not in left)),
        rows=replace(rows, num_computed_R=frozen(rows.num_computed_R + count_R)),
        blocks=draft.finish(),
        adapters=adapters,
        copies=(),
        ended=(),
        in_flight=(plan,),
    )
    return after, plan


@dataclass(slots=True)
class _Running:
    """The rows that stay, with this step's token counts, and those that had to leave."""

    rows: Rows
    count_R: np.ndarray
    preempted: tuple[str, ...]
    admits: bool  # no row had to leave for want of blocks
    records: dict[str, RequestState]  # of the preempted
    ended: tuple[Completion, ...]


def _serve_running(config: Config, host: HostState, order: Order, draft: BlockDraft) -> _Running:
    rows, B = host.rows, config.block_size
    place = {request_id: row for row, request_id in enumerate(rows.ids)}
    service = [place[i] for i in order.running]
    making_way = _rows_making_way(config, host)
    service = [row for row in service if row not in making_way]
    for row in making_way:
        draft.release(rows.tables[row])
    count_R = _token_counts(config, rows, service)
    need_R = -(-(rows.num_computed_R + count_R) // B) - -(-rows.num_computed_R // B)
    leaving, ended = _make_room(config, host, service, need_R, draft)

    stays = np.ones(len(rows.ids), bool)
    stays[[*leaving, *making_way, *(place[c.key] for c in ended)]] = False
    tables = list(rows.tables)
    for row in np.flatnonzero(stays & (need_R > 0)).tolist():
        tables[row] = frozen([*tables[row], *draft.allocate(int(need_R[row]))])
    rows = replace(rows, tables=tuple(tables))
    end_R = rows.num_computed_R + count_R
    for row in np.flatnonzero(stays & (end_R // B > rows.num_computed_R // B)).tolist():
        record, start = host.requests[rows.ids[row]], int(rows.num_computed_R[row])
        register_blocks(config, record, tables[row], start, int(end_R[row]), draft)
    records = {}
    gone = {*leaving, *making_way}
    for row in gone:
        record = completed_record(rows, row, host.requests[rows.ids[row]])
        records[rows.ids[row]] = replace(
            record, num_preemptions=record.num_preemptions + 1, queued_at=host.step
        )
    if not stays.all():
        rows, count_R = take_rows(rows, np.flatnonzero(stays)), count_R[stays]
    # In front of the queue they keep the order of service.
    preempted = tuple(i for i in order.running if place[i] in gone) if gone else ()
    return _Running(
        rows=rows,
        count_R=count_R,
        preempted=preempted,
        admits=not leaving,
        records=records,
        ended=tuple(ended),
    )


def _rows_making_way(config: Config, host: HostState) -> list[int]:
    """Rows that are preempted for an adapter that waited too long, where the config says so.

    Each has drawn a token first: two adapters could else preempt each other for ever.
    """
    if not (config.adapter_preemption and host.adapters.reservations):
        return []
    promised = {v for r in host.adapters.reservations for v in r.victims}
    drew = np.flatnonzero(host.rows.num_tokens_R > host.rows.num_known_R).tolist()
    return [row for row in drew if host.rows.versions[row] in promised]


def _token_counts(config: Config, rows: Rows, service: list[int]) -> np.ndarray:
    """Tokens each row of `service` computes: one for every decoding row, then prompt chunks."""
    remaining_R = rows.num_tokens_R - rows.num_computed_R
    served_R = np.zeros(len(rows.ids), bool)
    served_R[service] = True
    count_R = (served_R & (remaining_R == 1)).astype(np.int32)
    budget = config.max_batched_tokens - int(count_R.sum())
    if len(count_R) and remaining_R.max() > 1:
        chunk = config.long_prefill_threshold or budget
        for row in service:
            if remaining_R[row] > 1:
                count_R[row] = min(int(remaining_R[row]), budget, chunk)
                budget -= int(count_R[row])
    return count_R


def _make_room(
    config: Config, host: HostState, service: list[int], need_R: np.ndarray, draft: BlockDraft
) -> tuple[list[int], list[Completion]]:
    """Release rows from the end of the service order until the others' blocks are free.

    A row that is alone and still lacks a block has outgrown the pool: it ends, since preempting it
    would repeat the same computation for ever.
    """
    rows, leaving, ended = host.rows, [], []
    needed = int(need_R.sum())
    remaining = list(service)
    while needed > draft.num_free:
        row = remaining.pop()
        draft.release(rows.tables[row])
        needed -= int(need_R[row])
        fits = -(-int(rows.num_tokens_R[row]) // config.block_size) <= config.num_blocks
        if remaining or fits:  # alone and yet preempted: a copy's source took the room, this once
            leaving.append(row)
            continue
        record = completed_record(rows, row, host.requests[rows.ids[row]])
        ended.append(ended_request(config, record, FinishReason.CAPACITY))
    return leaving, ended


def _updated_records(
    host: HostState, changes: dict[str, RequestState], gone: list[str]
) -> Map[str, RequestState]:
    if not (changes or gone):
        return host.requests
    with host.requests.mutate() as requests:
        requests.update(changes)
        for request_id in gone:
            del requests[request_id]
        return requests.finish()


def _wanted_loads(host: HostState) -> tuple[tuple[str, str], ...]:
    """Adapters that waiting requests need, nobody has asked for yet, and the host tier can take.

    The others are asked for once users of registered ones have finished.
    """
    ledger = host.adapters
    names = dict.fromkeys(
        host.requests[i].request.adapter for i in host.waiting if host.requests[i].loading
    )
    room = ledger.max_registered - len(ledger.loading) - num_unevictable(ledger)
    wanted = [name for name in names if name not in ledger.loading]
    return tuple((name, ledger.sources[name]) for name in wanted[: max(room, 0)])


def _hopeless_loads(config: Config, host: HostState) -> tuple[Completion, ...]:
    """The ends of requests whose adapter can never be registered: all others are kept for ever.

    That is so when nothing but loading requests is left and no load is, or can be, under way.
    """
    waits = [host.requests[i] for i in host.waiting]
    if host.rows.ids or host.adapters.loading or not all(r.loading for r in waits):
        return ()
    limit = host.adapters.max_registered
    why = f"max_registered_adapters={limit} are pinned or were given as tensors"
    return tuple(
        ended_request(config, r, FinishReason.ERROR, f"adapter {r.request.adapter!r}: {why}")
        for r in waits
    )
