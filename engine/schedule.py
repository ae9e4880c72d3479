"""Who runs, how many tokens, which blocks: the decisions of one step, without touching a tensor.

R running rows, B block size. Rows that decode are served before prompt chunks, so that a long
prompt never starves them; a step that preempts admits nobody (multi_lora.md, 11.1).

A plan may be in flight. What it draws counts as length only: a row that may stop there is planned
all the same. Nothing that it reads or writes is handed out, so where the next plan would have to
take blocks from a row, or needs a token's value, it waits until the one in flight is committed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from immutables import Map

from purestep.engine.admission import Admitted, admit, ended_request, register_blocks
from purestep.engine.config import Config
from purestep.engine.encoding import Encoding
from purestep.engine.planning import make_plan
from purestep.engine.policy import Order, Policy, checked_order, fcfs
from purestep.state.adapters import count_users, load_asked, num_unevictable, touch
from purestep.state.blocks import BlockDraft
from purestep.state.engine import HostState, drop_copies
from purestep.state.errors import InFlightError, StepError
from purestep.state.in_flight import drawn_in_flight
from purestep.state.plan import StepPlan
from purestep.state.pytree import evolve
from purestep.state.request import Completion, FinishReason, RequestState, frozen
from purestep.state.rows import Rows, add_rows, chain, completed_record, take_rows
from purestep.state.scores import locked
from purestep.state.tables import grown, newest


def schedule(config: Config, host: HostState, policy: Policy = fcfs) -> tuple[HostState, StepPlan]:
    """Plan one step. Pure: the returned state has the plan in flight, the given one is unchanged.

    Raises PolicyError for an inadmissible order, InFlightError where the plan in flight has to be
    committed first, StepError when two are in flight.
    """
    if len(host.in_flight) > 1:
        steps = [plan.step for plan in host.in_flight]
        raise StepError(f"schedule: steps {steps} were scheduled and not committed")
    order = checked_order(host, policy)
    drawn_R = drawn_in_flight(host) if host.in_flight else None
    host = _lengthened(host, drawn_R)
    draft, encoding = BlockDraft(host.blocks), Encoding(config, host.encoder)
    running = _serve_running(config, host, order, draft, encoding, drawn_R)
    admitted = Admitted.none(host.adapters)
    if running.admits and not encoding.stalled:
        admitted = admit(config, host, order, draft, encoding, running.rows, running.count_R)

    rows, count_R = running.rows, running.count_R
    if admitted.rows:
        rows = add_rows(rows, [row for row, _ in admitted.rows])
        count_R = np.append(count_R, [count for _, count in admitted.rows]).astype(np.int32)

    copies = drop_copies(host.copies, draft)  # of branches that were preempted: after allocations
    sources = [(host.step, "", frozen([source])) for source, _ in copies]  # this plan reads it
    loads = _wanted_loads(host)
    hopeless = () if loads else _hopeless_loads(config, host)
    ended = (*running.ended, *admitted.ended, *hopeless)
    gone = [c.key for c in ended]
    requests = _updated_records(host, running.records | admitted.records, gone)
    adapters = touch(admitted.adapters, rows.used)
    if loads:
        adapters = load_asked(adapters, (name for name, _ in loads))
    if gone:
        adapters = count_users(adapters, ((host.requests[i].version, -1) for i in gone))
    encoder, drops, encodes = encoding.finish()
    plan = make_plan(
        config,
        host,
        rows,
        count_R,
        requests,
        adapters,
        draft.allocated,
        drawn_R,
        copies=copies,
        drops=drops,
        encodes=encodes,
        ended=(*host.ended, *ended),
        loads=loads,
        num_hit_tokens=admitted.num_hit_tokens,
        num_preempted=len(running.preempted),
    )
    left = {*gone, *(row.ids[0] for row, _ in admitted.rows)}
    after = evolve(
        host,
        step=host.step + 1,
        requests=requests,
        waiting=_still_waiting(host, running.preempted, left),
        rows=_as_known(evolve(rows, num_computed_R=locked(rows.num_computed_R + count_R)), drawn_R),
        blocks=draft.finish(),
        adapters=adapters,
        encoder=encoder,
        copies=(),
        ended=(),
        in_flight=(*host.in_flight, plan),
        departed=(*host.departed, *sources),
    )
    return after, plan


def plan_ahead(
    config: Config, host: HostState, policy: Policy = fcfs
) -> tuple[HostState, StepPlan] | None:
    """`schedule`, for a driver that keeps a plan in flight: None where the one in flight has to be
    committed first, and where no row would take part. Raises PolicyError and StepError as it does.
    """
    try:
        after, plan = schedule(config, host, policy)
    except InFlightError:
        return None
    return (after, plan) if plan.row_ids else None


def _lengthened(host: HostState, drawn_R: np.ndarray | None) -> HostState:
    """The state with the tokens counted that the plan in flight draws, if there is one.

    Raises InFlightError where one of them has to be known, or an adapter it uses was dropped, so
    that its place looks free.
    """
    if drawn_R is None:
        return host
    (flying,) = host.in_flight
    rows, drawn = host.rows, drawn_R >= 0
    num_tokens_R = rows.num_tokens_R + drawn
    for row in np.flatnonzero(drawn & rows.edited_R & (num_tokens_R < rows.limit_R)).tolist():
        edits = host.requests[rows.ids[row]].edits
        if edits is not None and edits.looks_back:
            raise _waits(host, f"what {rows.ids[row]!r} draws next depends on the token it draws")
    for place in flying.residents:
        found = host.adapters.resident.get(place.version)
        if found is None or (found.slot, found.row_blocks) != (place.slot, place.row_blocks):
            raise _waits(host, f"it reads adapter {place.version!r}, which was dropped")
    return evolve(host, rows=evolve(rows, num_tokens_R=locked(num_tokens_R)))


def _as_known(rows: Rows, drawn_R: np.ndarray | None) -> Rows:
    """The rows, new ones behind the old, without the tokens that `_lengthened` counted."""
    if drawn_R is None:
        return rows
    num_tokens_R = rows.num_tokens_R.copy()
    num_tokens_R[: len(drawn_R)] -= drawn_R >= 0
    return evolve(rows, num_tokens_R=locked(num_tokens_R))


def _waits(host: HostState, why: str) -> InFlightError:
    return InFlightError(f"schedule: commit step {host.in_flight[0].step} first, since {why}")


def _still_waiting(host: HostState, preempted: tuple[str, ...], left: set[str]) -> tuple[str, ...]:
    if not (preempted or left):
        return host.waiting
    return (*preempted, *(i for i in host.waiting if i not in left))


@dataclass(slots=True)
class _Running:
    """The rows that stay, with this step's token counts, and those that had to leave."""

    rows: Rows
    count_R: np.ndarray
    preempted: tuple[str, ...]
    admits: bool  # no row had to leave for want of blocks
    records: dict[str, RequestState]  # of the preempted
    ended: tuple[Completion, ...]


def _serve_running(
    config: Config,
    host: HostState,
    order: Order,
    draft: BlockDraft,
    encoding: Encoding,
    drawn_R: np.ndarray | None,
) -> _Running:
    rows, B = host.rows, config.block_size
    service, making_way = _served(config, host, order)
    if host.in_flight and making_way:
        raise _waits(host, f"{rows.ids[making_way[0]]!r} makes way for a promised adapter")
    for row in making_way:
        draft.release(rows.tables[row])
    count_R = _token_counts(config, host, service, encoding)
    start_R, end_R = rows.num_computed_R, rows.num_computed_R + count_R
    short_G = (end_R > rows.tables.length_R * B).nonzero()[0]  # rows that lack blocks
    need_G = (end_R[short_G] + (B - 1)) // B - rows.tables.length_R[short_G]
    leaving, ended = [], []
    if need_G.sum() > draft.num_free:
        need_of = dict(zip(short_G.tolist(), need_G.tolist(), strict=True))
        leaving, ended = _make_room(config, host, service, need_of, draft)
    gone = {*leaving, *making_way}
    left = [*gone, *(rows.ids.index(c.key) for c in ended)]
    if left:
        stay_G, end_R[left] = ~np.isin(short_G, left), start_R[left]
        short_G, need_G = short_G[stay_G], need_G[stay_G]
    if len(short_G):
        blocks = _allocated(config, rows, short_G, need_G, draft)
        rows = evolve(rows, tables=grown(rows.tables, short_G, need_G, blocks))
    if config.prefix_caching:
        fills_R = end_R // B * B > start_R
        if drawn_R is not None:  # a block with an unknown token gets its digest in `commit`
            fills_R &= drawn_R < 0
        filling = fills_R.nonzero()[0]
        if len(filling):
            _register_filled(host, rows, filling, end_R, draft)
    records = {}
    for row in gone:
        record = completed_record(rows, row, host.requests[rows.ids[row]])
        encoding.leave(record)
        records[rows.ids[row]] = replace(
            record, num_preemptions=record.num_preemptions + 1, queued_at=host.step
        )
    for completion in ended:
        encoding.leave(host.requests[completion.key])
    if left:
        stays = np.delete(np.arange(len(rows.ids)), left)
        rows, count_R = take_rows(rows, stays), count_R[stays]
    return _Running(
        rows=rows,
        count_R=count_R,
        # In front of the queue they keep the order of service.
        preempted=tuple(i for i in order.running if i in records) if records else (),
        admits=not leaving,
        records=records,
        ended=tuple(ended),
    )


def _register_filled(
    host: HostState, rows: Rows, filling_F: np.ndarray, end_R: np.ndarray, draft: BlockDraft
) -> None:
    """Make the blocks findable that these rows fill up to `end_R`. Nearly all are decoding, and the
    block is their last one, whose digest it got with its last token."""
    B = rows.tail_RB.shape[1]
    start_F, end_F = rows.num_computed_R[filling_F], end_R[filling_F]
    decodes_F = (end_F == start_F + 1) & (end_F == rows.num_tokens_R[filling_F])
    parts = filling_F, newest(rows.tables, filling_F), decodes_F
    for row, block, decodes in zip(*(part.tolist() for part in parts), strict=True):
        sealed = rows.sealed[row]
        if decodes and sealed:
            draft.register(block, sealed[-1][2])
        else:
            digests = chain(rows, row, host.requests[rows.ids[row]])
            first, last = int(rows.num_computed_R[row]) // B, int(end_R[row]) // B
            register_blocks(digests, rows.tables[row], first, last, draft)


def _served(config: Config, host: HostState, order: Order) -> tuple[np.ndarray, list[int]]:
    """The rows in order of service, but for those that make way and those that end with the plan in
    flight; and those that make way."""
    rows, making_way = host.rows, _rows_making_way(config, host)
    if order.running is host.rows.ids:
        service = np.arange(len(host.rows.ids))
    else:
        place = {request_id: row for row, request_id in enumerate(host.rows.ids)}
        service = np.array([place[i] for i in order.running], np.intp)
    if making_way:
        service = service[~np.isin(service, making_way)]
    if host.in_flight:
        ending_R = (rows.num_tokens_R == rows.limit_R) & (rows.num_tokens_R > rows.num_prompt_R)
        ending_R |= rows.num_computed_R == rows.num_tokens_R
        service = service[~ending_R[service]]
    return service, making_way


def _allocated(
    config: Config, rows: Rows, row_G: np.ndarray, need_G: np.ndarray, draft: BlockDraft
) -> np.ndarray:
    """int32: so many more blocks for each of these rows."""
    if not config.adapter_block_quota:
        return np.array(draft.allocate(int(need_G.sum())), np.int32)
    counts = zip(row_G.tolist(), need_G.tolist(), strict=True)
    parts = [draft.allocate(count, rows.versions[row]) for row, count in counts]
    return np.array([block for part in parts for block in part], np.int32)


def _rows_making_way(config: Config, host: HostState) -> list[int]:
    """Rows that are preempted for an adapter that waited too long, where the config says so.

    Each has drawn a token first: two adapters could else preempt each other for ever.
    """
    if not (config.adapter_preemption and host.adapters.reservations):
        return []
    promised = {v for r in host.adapters.reservations for v in r.victims}
    drew = np.flatnonzero(host.rows.num_tokens_R > host.rows.num_known_R).tolist()
    return [row for row in drew if host.rows.versions[row] in promised]


def _token_counts(
    config: Config, host: HostState, service: np.ndarray, encoding: Encoding
) -> np.ndarray:
    """Tokens each row of `service` computes: one for every decoding row, then prompt chunks."""
    rows = host.rows
    remaining_R = rows.num_tokens_R - rows.num_computed_R
    chunked_R = remaining_R > 1
    if has_media := "media" in rows.traits:
        media_R = rows.num_computed_R < rows.media_end_R
        chunked_R |= media_R
    if len(service) < len(rows.ids):
        served_R = np.zeros(len(rows.ids), bool)
        served_R[service] = True
        count_R = (served_R & ~chunked_R).astype(np.int32)
    else:
        count_R = (~chunked_R).astype(np.int32)
    if np.count_nonzero(chunked_R):
        budget = config.max_batched_tokens - np.count_nonzero(count_R)
        chunk = config.long_prefill_threshold or budget
        for row in service[chunked_R[service]].tolist():
            count = min(int(remaining_R[row]), budget, chunk)
            if count and has_media and media_R[row]:
                record = host.requests[rows.ids[row]]
                count = encoding.fit(record, int(rows.num_computed_R[row]), count)
            count_R[row] = count
            budget -= count
    return count_R


def _make_room(
    config: Config,
    host: HostState,
    service: np.ndarray,
    need_of: Mapping[int, int],
    draft: BlockDraft,
) -> tuple[list[int], list[Completion]]:
    """Release rows from the end of the service order until the blocks that the others need are
    free.

    A row that is alone and still lacks a block has outgrown the pool: it ends, since preempting it
    would repeat the same computation for ever.
    """
    rows, leaving, ended = host.rows, [], []
    needed, remaining = sum(need_of.values()), service.tolist()
    if host.in_flight:
        raise _waits(host, f"rows need {needed} blocks, of which {draft.num_free} are free")
    while needed > draft.num_free:
        row = remaining.pop()
        draft.release(rows.tables[row])
        needed -= need_of.get(row, 0)
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
    if not host.waiting:
        return ()
    # Of long queues most are bound to a version, and how many is known without a look at each.
    unbound = len(host.requests) - sum(ledger.users.values()) - host.rows.versions.count(None)
    names: dict[str, None] = {}
    for request_id in host.waiting:
        if unbound == 0:
            break
        record = host.requests[request_id]
        unbound -= record.version is None
        if record.loading and record.request.adapter not in ledger.loading:
            names[record.request.adapter] = None
    room = ledger.max_registered - len(ledger.loading) - num_unevictable(ledger) if names else 0
    return tuple((name, ledger.sources[name]) for name in list(names)[: max(room, 0)])


def _hopeless_loads(config: Config, host: HostState) -> tuple[Completion, ...]:
    """The ends of requests whose adapter can never be registered: all others are kept for ever.

    That is so when nothing but loading requests is left and no load is, or can be, under way.
    """
    if host.rows.ids or host.adapters.loading:
        return ()
    if not all(host.requests[i].loading for i in host.waiting):
        return ()
    limit = host.adapters.max_registered
    why = f"max_registered_adapters={limit} are pinned or were given as tensors"
    waits = [host.requests[i] for i in host.waiting]
    return tuple(
        ended_request(config, r, FinishReason.ERROR, f"adapter {r.request.adapter!r}: {why}")
        for r in waits
    )
