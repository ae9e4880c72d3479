"""Who runs, how many tokens, which blocks: the decisions of one step, without touching a tensor.

R running rows, B block size. Rows that decode are served before prompt chunks, so that a long
prompt never starves them; a step that preempts admits nobody (multi_lora.md, 11.1).
"""

from dataclasses import dataclass, replace

import numpy as np
from immutables import Map

from purestep.engine.config import Config, describe, row_limit
from purestep.engine.policy import Order, Policy, checked_order, fcfs
from purestep.state.adapters import (
    AdapterLedger,
    Residence,
    activate,
    count_users,
    load_asked,
    num_unevictable,
    touch,
    victims_for,
)
from purestep.state.blocks import BlockDraft
from purestep.state.engine import (
    HostState,
    Rows,
    add_rows,
    all_tokens,
    completed_record,
    completion,
    make_row,
    quiet,
    take_rows,
)
from purestep.state.plan import Overwrites, SamplingRows, StepPlan
from purestep.state.request import Completion, FinishReason, RequestState, frozen


def schedule(config: Config, host: HostState, policy: Policy = fcfs) -> tuple[HostState, StepPlan]:
    """Plan one step. Pure: the returned state has the plan in flight, the given one is unchanged.

    Raises StepError when a plan is in flight already, PolicyError for an inadmissible order.
    """
    order = checked_order(quiet(host, "schedule"), policy)
    draft = BlockDraft(host.blocks)
    running = _serve_running(config, host, order, draft)
    admitted = _Admitted.none(host.adapters)
    if not running.preempted:
        room = config.max_batched_tokens - int(running.count_R.sum())
        admitted = _admit(config, host, order, draft, running, room)

    rows = add_rows(running.rows, [row for row, _ in admitted.rows])
    count_R = np.append(running.count_R, [count for _, count in admitted.rows]).astype(np.int32)

    for source, _ in host.copies:
        draft.release([source])  # after all allocations: this plan reads it
    loads = _wanted_loads(host)
    hopeless = () if loads else _hopeless_loads(config, host)
    ended = (*running.ended, *admitted.ended, *hopeless)
    gone = [c.id for c in ended]
    requests = _updated_records(host, running.records | admitted.records, gone)
    adapters = touch(admitted.adapters, _versions_in_use(rows))
    adapters = load_asked(adapters, (name for name, _ in loads))
    if gone:
        adapters = count_users(adapters, ((host.requests[i].version, -1) for i in gone))
    plan = _make_plan(config, host, rows, count_R, requests, adapters, draft.allocated)
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
    records: dict[str, RequestState]  # of the preempted
    ended: tuple[Completion, ...]


def _serve_running(config: Config, host: HostState, order: Order, draft: BlockDraft) -> _Running:
    rows, B = host.rows, config.block_size
    place = {request_id: row for row, request_id in enumerate(rows.ids)}
    service = [place[i] for i in order.running]
    count_R = _token_counts(rows, service, config.max_batched_tokens)
    need_R = -(-(rows.num_computed_R + count_R) // B) - -(-rows.num_computed_R // B)
    leaving, ended = _make_room(config, host, service, need_R, draft)

    stays = np.ones(len(rows.ids), bool)
    stays[[*leaving, *(place[c.id] for c in ended)]] = False
    tables = list(rows.tables)
    for row in np.flatnonzero(stays & (need_R > 0)).tolist():
        tables[row] = frozen([*tables[row], *draft.allocate(int(need_R[row]))])
    rows = replace(rows, tables=tuple(tables))
    end_R = rows.num_computed_R + count_R
    for row in np.flatnonzero(stays & (end_R // B > rows.num_computed_R // B)).tolist():
        record, start = host.requests[rows.ids[row]], int(rows.num_computed_R[row])
        _register_blocks(config, record, tables[row], start, int(end_R[row]), draft)
    records = {}
    for row in leaving:
        record = completed_record(rows, row, host.requests[rows.ids[row]])
        records[rows.ids[row]] = replace(record, num_preemptions=record.num_preemptions + 1)
    if not stays.all():
        rows, count_R = take_rows(rows, np.flatnonzero(stays)), count_R[stays]
    # The last of the service order left first; in front of the queue they keep that order.
    preempted = tuple(host.rows.ids[row] for row in reversed(leaving))
    return _Running(
        rows=rows, count_R=count_R, preempted=preempted, records=records, ended=tuple(ended)
    )


def _token_counts(rows: Rows, service: list[int], budget: int) -> np.ndarray:
    """Tokens each row computes: one for every decoding row, then prompt chunks in order."""
    remaining_R = rows.num_tokens_R - rows.num_computed_R
    count_R = np.where(remaining_R == 1, 1, 0).astype(np.int32)
    budget -= int(count_R.sum())
    if len(count_R) and remaining_R.max() > 1:
        for row in service:
            if remaining_R[row] > 1:
                count_R[row] = min(int(remaining_R[row]), budget)
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
        ended.append(_end(config, record, FinishReason.CAPACITY))
    return leaving, ended


def _end(
    config: Config, record: RequestState, reason: FinishReason, error: str | None = None
) -> Completion:
    text = None if config.tokens is None else config.tokens.text(record.generated)
    return completion(record, text=text, finish_reason=reason, error=error)


@dataclass(slots=True)
class _Admitted:
    """Waiting requests that become rows, each with its first token count."""

    rows: list[tuple[Rows, int]]
    records: dict[str, RequestState]
    adapters: AdapterLedger
    ended: list[Completion]
    num_hit_tokens: int = 0

    @staticmethod
    def none(adapters: AdapterLedger) -> "_Admitted":
        return _Admitted(rows=[], records={}, adapters=adapters, ended=[])


def _admit(
    config: Config, host: HostState, order: Order, draft: BlockDraft, running: _Running, room: int
) -> _Admitted:
    """Admit in order while tokens, rows, blocks and adapter places last.

    A request whose adapter finds no place is skipped, the next may fit; one that finds no blocks
    stops the admission, or large prompts would wait for ever behind small ones.
    """
    out = _Admitted.none(host.adapters)
    in_use = set(_versions_in_use(running.rows))
    skipped = []
    soon = (host.requests[i].version for i in order.waiting[: config.max_rows])
    wanted = {version for version in soon if version is not None}
    for request_id in order.waiting:
        if room == 0 or len(running.rows.ids) + len(out.rows) == config.max_rows:
            break
        record = host.requests[request_id]
        if record.loading:
            continue
        victims = _adapter_place(out.adapters, record.version, in_use, wanted)
        if victims is None:
            skipped.append(record)
            continue
        if -(-_num_tokens(record) // config.block_size) > config.num_blocks:
            # A branch of a row whose next token outgrows the pool; the row itself ends likewise.
            out.ended.append(_end(config, record, FinishReason.CAPACITY))
            continue
        if not _blocks_suffice(config, record, draft):
            break
        if record.version is not None:
            in_use.add(record.version)
            if record.version not in out.adapters.resident:
                out.adapters = activate(out.adapters, record.version, victims)
        room -= _start_row(config, record, draft, room, out)
    if skipped and not (running.rows.ids or out.rows):
        # Nothing runs, so only pins can be in the way, and no later step would change that.
        pins = len(host.adapters.pins)
        why = f"pinned adapters ({pins}) leave no place for it: max_active_adapters, lora_rows"
        out.ended += [
            _end(config, r, FinishReason.ERROR, f"adapter {r.request.adapter!r}: {why}")
            for r in skipped
        ]
    return out


def _adapter_place(
    ledger: AdapterLedger, version: str | None, in_use: set[str], wanted: set[str]
) -> tuple[str, ...] | None:
    """Whom to evict for this version (nobody, often); None when there is no place."""
    if version is None or version in ledger.resident:
        return ()
    spared = victims_for(ledger, version, in_use | wanted)
    return victims_for(ledger, version, in_use) if spared is None else spared


def _blocks_suffice(config: Config, record: RequestState, draft: BlockDraft) -> bool:
    """Whether all its known tokens fit, so that admission does not cause the next preemption."""
    hits = _prefix_hits(config, record, draft)
    total = -(-_num_tokens(record) // config.block_size)
    return total - len(hits) + draft.count_queued(hits) <= draft.num_free


def _num_tokens(record: RequestState) -> int:
    return len(record.request.tokens) + len(record.generated)


def _prefix_hits(config: Config, record: RequestState, draft: BlockDraft) -> list[int]:
    """Cached blocks of the longest prefix, never with the last token: its logits are needed."""
    if not config.prefix_caching:
        return []
    return draft.lookup(record.digests[: (_num_tokens(record) - 1) // config.block_size])


def _start_row(
    config: Config, record: RequestState, draft: BlockDraft, room: int, out: _Admitted
) -> int:
    """Give a record its blocks and make it a row; returns the tokens it computes first."""
    B, total = config.block_size, _num_tokens(record)
    hits = _prefix_hits(config, record, draft)
    draft.retain(hits)
    computed = len(hits) * B
    count = min(total - computed, room)
    table = frozen([*hits, *draft.allocate(-(-(computed + count) // B) - len(hits))])
    _register_blocks(config, record, table, computed, computed + count, draft)
    limit = row_limit(config, record)
    row = make_row(record, table, num_computed=computed, limit=limit, block_size=B)
    out.rows.append((row, count))
    if record.num_cached < 0:
        record = replace(record, num_cached=computed)
    out.records[record.request.id] = record
    out.num_hit_tokens += computed
    return count


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


def _register_blocks(
    config: Config, record: RequestState, table: np.ndarray, start: int, end: int, draft: BlockDraft
) -> None:
    """Make the blocks findable that computing tokens `start` to `end` fills.

    At once, so that a request admitted in this very step can share them: each layer writes all
    rows' KV before any row attends.
    """
    if not config.prefix_caching:
        return
    num_prompt = len(record.prompt_digests)
    for k in range(start // config.block_size, end // config.block_size):
        known = record.prompt_digests if k < num_prompt else record.generated_digests
        draft.register(int(table[k]), known[k if k < num_prompt else k - num_prompt])


def _versions_in_use(rows: Rows) -> list[str]:
    return list(dict.fromkeys(v for v in rows.versions if v is not None))


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
        _end(config, r, FinishReason.ERROR, f"adapter {r.request.adapter!r}: {why}") for r in waits
    )


def _make_plan(
    config: Config,
    host: HostState,
    rows: Rows,
    count_R: np.ndarray,
    requests: Map[str, RequestState],
    adapters: AdapterLedger,
    allocated: list[int],
) -> StepPlan:
    active = rows if count_R.all() else take_rows(rows, np.flatnonzero(count_R))
    count_R = frozen(count_R[count_R > 0])
    residents = _residents(active, adapters)
    slot_of = {place.version: place.slot for place in residents}
    uploads = tuple(p for p in residents if host.adapters.resident.get(p.version) is not p)
    sampled_R = active.num_computed_R + count_R == active.num_tokens_R
    return StepPlan(
        step=host.step,
        descriptor=describe(config, int(count_R.sum()), len(active.ids), len(residents)),
        uploads=uploads,
        copies=host.copies,
        overwrites=_overwrites(host, allocated, uploads),
        row_ids=active.ids,
        start_R=active.num_computed_R,
        count_R=count_R,
        tokens_T=_step_tokens(active, count_R, requests),
        tables=active.tables,
        slot_R=frozen([slot_of.get(v, -1) for v in active.versions]),
        residents=residents,
        sampled_R=frozen(sampled_R, np.bool_),
        sampling=SamplingRows(
            temperature_S=frozen(active.temperature_R[sampled_R], np.float32),
            top_k_S=frozen(active.top_k_R[sampled_R]),
            top_p_S=frozen(active.top_p_R[sampled_R], np.float64),
            stream_S=frozen(active.stream_R[sampled_R], np.uint64),
            position_S=frozen(active.num_tokens_R[sampled_R]),
        ),
        ended=(),
        loads=(),
    )


def _residents(rows: Rows, adapters: AdapterLedger) -> tuple[Residence, ...]:
    places = [adapters.resident[v] for v in _versions_in_use(rows)]
    return tuple(sorted(places, key=lambda place: place.slot))


def _step_tokens(rows: Rows, count_R: np.ndarray, requests: Map[str, RequestState]) -> np.ndarray:
    """The ids of all rows' windows, row after row."""
    B = rows.tail_RB.shape[1]
    newest_R = rows.num_computed_R == rows.num_tokens_R - 1
    last_R = rows.tail_RB[np.arange(len(rows.ids)), rows.num_computed_R % B]
    if newest_R.all():
        return frozen(last_R)
    windows = []
    for row, request_id in enumerate(rows.ids):
        start = int(rows.num_computed_R[row])
        if newest_R[row]:
            windows.append(last_R[row : row + 1])
        else:
            windows.append(all_tokens(requests[request_id])[start : start + int(count_R[row])])
    return frozen(np.concatenate(windows))


def _overwrites(
    host: HostState, allocated: list[int], uploads: tuple[Residence, ...]
) -> Overwrites:
    """What the input state counts on among the blocks and adapter rows this plan hands out."""
    ledger = host.blocks
    blocks = sorted(b for b in allocated if b in ledger.refs or b in ledger.digest_of)
    taken = {b for place in uploads for b in place.row_blocks}
    adapters = [
        v for v, place in host.adapters.resident.items() if not taken.isdisjoint(place.row_blocks)
    ]
    return Overwrites(blocks=tuple(blocks), adapters=tuple(sorted(adapters)))
