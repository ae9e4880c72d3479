"""One live request continued as several that share its KV blocks. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from purestep.engine.config import Config, row_limit
from purestep.engine.quota import quota_room
from purestep.engine.requests import check_free
from purestep.state.adapters import count_users
from purestep.state.blocks import BlockDraft
from purestep.state.engine import (
    EngineState,
    HostState,
    progress,
    quiet,
)
from purestep.state.errors import RequestError
from purestep.state.hashing import random_stream
from purestep.state.request import RequestState
from purestep.state.rows import Rows, add_rows, make_row


def branch(state: EngineState, request_id: str, new_ids: Sequence[str]) -> EngineState:
    """Continue one live request as several: the original goes on, `new_ids` start as its copies.

    Full KV blocks are shared; only the last partial block is copied, by the next step. Each branch
    draws from a noise stream of its own; greedy branches equal the original. A branch that finds no
    row or block free waits in front of the queue and is recomputed, as if preempted; branches of a
    waiting request wait behind it. A branch inherits what was streamed, so its `Outputs.texts` go
    on where the original's stood, and the number of the sample that it branched from.

    Raises UnknownRequestError, RequestError for an id that is live or given twice, StepError when a
    plan is in flight.
    """
    return replace(state, host=branch_host(state.config, state.host, request_id, new_ids))


def branch_host(
    config: Config, host: HostState, request_id: str, new_ids: Sequence[str]
) -> HostState:
    """`branch` on the host state alone."""
    parent = progress(quiet(host, "branch"), request_id)
    _check_new_ids(host, request_id, new_ids)
    children = [_child(host, parent, i, new_id) for i, new_id in enumerate(new_ids)]
    rows, waiting, copies = [], [], []
    draft = BlockDraft(host.blocks)
    parent_row = host.rows.ids.index(request_id) if request_id in host.rows.ids else None
    for child in children:
        spare = config.max_rows - len(host.rows.ids) - len(rows)
        full = parent_row is None or spare <= 0 or draft.num_free == 0
        if full or not _within_quota(config, host.rows, rows, parent_row, child, draft):
            waiting.append(child.key)
            continue
        row, copied = _branched_row(config, host.rows, parent_row, child, draft)
        rows.append(row)
        copies += copied
    kept = replace(host.requests[request_id], num_branches=parent.num_branches + len(children))
    with host.requests.mutate() as requests:
        requests[request_id] = kept
        requests.update({child.key: child for child in children})
        records = requests.finish()
    return replace(
        host,
        arrivals=host.arrivals + len(children),
        requests=records,
        rows=add_rows(host.rows, rows),
        waiting=_queued(host.waiting, request_id, waiting),
        blocks=draft.finish(),
        copies=(*host.copies, *copies),
        adapters=count_users(host.adapters, [(parent.version, 1)] * len(children)),
    )


def _within_quota(
    config: Config,
    running: Rows,
    more: Sequence[Rows],
    parent_row: int,
    child: RequestState,
    draft: BlockDraft,
) -> bool:
    """Whether the child's adapter may have the blocks that it does not share with its parent."""
    if not config.adapter_block_quota or child.version is None:
        return True
    full = int(running.num_computed_R[parent_row]) // config.block_size
    needed = -(-row_limit(config, child) // config.block_size) - full
    return needed <= quota_room(config, draft, child.version, [running, *more])


def _queued(queue: tuple[str, ...], parent: str, children: list[str]) -> tuple[str, ...]:
    """The children behind their parent where it waits, else in front, like preempted rows."""
    place = queue.index(parent) + 1 if parent in queue else 0
    return (*queue[:place], *children, *queue[place:])


def _check_new_ids(host: HostState, request_id: str, new_ids: Sequence[str]) -> None:
    if isinstance(new_ids, str) or len(set(new_ids)) != len(new_ids):
        raise RequestError(f"branch of {request_id!r}: new_ids={new_ids!r} must be distinct ids")
    for new_id in new_ids:
        if not isinstance(new_id, str) or not new_id:
            raise RequestError(
                f"branch of {request_id!r}: id {new_id!r} must be a non-empty string"
            )
        check_free(host, new_id, 1, f"branch of {request_id!r}")


def _child(host: HostState, parent: RequestState, ordinal: int, new_id: str) -> RequestState:
    """The parent's copy. It keeps the seed, so a branch's noise depends on its path, not its id."""
    path = (*parent.branch_path, parent.num_branches + ordinal + 1)
    return replace(
        parent,
        request=replace(parent.request, id=new_id),
        key=new_id,
        arrival=host.arrivals + ordinal,
        queued_at=host.step,
        stream=random_stream(parent.seed, parent.index, path),
        branch_path=path,
        num_branches=0,
        num_preemptions=0,
    )


def _branched_row(
    config: Config, rows: Rows, parent_row: int, child: RequestState, draft: BlockDraft
) -> tuple[Rows, list[tuple[int, int]]]:
    """A running row for `child` on the parent's blocks, and the copy it needs, if any."""
    computed = int(rows.num_computed_R[parent_row])
    full = computed // config.block_size
    table = rows.tables[parent_row].tolist()
    draft.retain(table[:full])
    copies = []
    if computed % config.block_size:
        (block,) = draft.allocate(1, child.version)
        # Held until the step that copies is planned, which then cannot hand it out itself: if that
        # step fails and is tried again, the content is still there.
        draft.retain([table[full]])
        copies.append((table[full], block))
        table = [*table[:full], block]
    row = make_row(
        child,
        table,
        slot=int(rows.slot_R[parent_row]),
        num_computed=computed,
        limit=row_limit(config, child),
        block_size=config.block_size,
    )
    return row, copies
