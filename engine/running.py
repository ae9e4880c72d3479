"""The running rows' part of a step: their token counts, their blocks, and who has to leave.

R running rows, G rows that lack blocks, F rows that fill one, B block size.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from purestep.engine.config import Config
from purestep.engine.encoding import Encoding
from purestep.engine.ends import ended_request
from purestep.engine.new_row import register_blocks
from purestep.engine.policy import Order
from purestep.state.blocks import BlockDraft
from purestep.state.engine import HostState
from purestep.state.in_flight import commit_first
from purestep.state.pytree import evolve
from purestep.state.request import Completion, FinishReason, RequestState
from purestep.state.rows import Rows, chain, completed_record, take_rows
from purestep.state.tables import grown, newest


@dataclass(slots=True)
class Running:
    """The rows that stay, with this step's token counts, and those that had to leave."""

    rows: Rows
    count_R: np.ndarray
    preempted: tuple[str, ...]
    admits: bool  # no row had to leave for want of blocks
    records: dict[str, RequestState]  # of the preempted
    ended: tuple[Completion, ...]


def serve_running(
    config: Config,
    host: HostState,
    order: Order,
    draft: BlockDraft,
    encoding: Encoding,
    drawn_R: np.ndarray | None,
) -> Running:
    """Give the rows their tokens and blocks of this step, in order of service, and those that have
    to leave none; `drawn_R` as `drawn_in_flight` has it, None where nothing is in flight.

    Raises InFlightError where a row would have to leave while a plan is in flight.
    """
    rows, B = host.rows, config.block_size
    service, making_way = _served(config, host, order)
    if host.in_flight and making_way:
        raise commit_first(host, f"{rows.ids[making_way[0]]!r} makes way for a promised adapter")
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
    records = _preempted(host, rows, gone, encoding)
    for completion in ended:
        encoding.leave(host.requests[completion.key])
    if left:
        stays = np.delete(np.arange(len(rows.ids)), left)
        rows, count_R = take_rows(rows, stays), count_R[stays]
    return Running(
        rows=rows,
        count_R=count_R,
        # In front of the queue they keep the order of service.
        preempted=tuple(i for i in order.running if i in records) if records else (),
        admits=not leaving,
        records=records,
        ended=tuple(ended),
    )


def _preempted(
    host: HostState, rows: Rows, gone: Iterable[int], encoding: Encoding
) -> dict[str, RequestState]:
    """The records of rows that go back to the queue; what they held of the encoder is let go."""
    records = {}
    for row in gone:
        record = completed_record(rows, row, host.requests[rows.ids[row]])
        encoding.leave(record)
        records[record.key] = replace(
            record, num_preemptions=record.num_preemptions + 1, queued_at=host.step
        )
    return records


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
        raise commit_first(host, f"rows need {needed} blocks, of which {draft.num_free} are free")
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
