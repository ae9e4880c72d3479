"""What a caller does with requests between steps: submit, abort, branch. All pure.

Each takes an EngineState and returns another; a call that is refused raises before any change.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from purestep.engine.config import Config, row_limit
from purestep.state.adapters import count_users, resolve
from purestep.state.blocks import BlockDraft
from purestep.state.engine import (
    EngineState,
    HostState,
    Rows,
    add_rows,
    drop_blobs,
    drop_copies,
    live,
    make_row,
    progress,
    quiet,
    take_rows,
)
from purestep.state.errors import RequestError
from purestep.state.hashing import block_digests, chain_root, random_stream, request_seed
from purestep.state.request import (
    Request,
    RequestState,
    checked_request,
    frozen,
)


def submit(state: EngineState, request: Request) -> EngineState:
    """Queue a request; it runs when `step` finds room for it.

    Raises RequestError (empty or too long prompt, id outside the vocabulary, an id that is live),
    SamplingError or UnknownAdapterError, naming item, value and limit, before any change.
    """
    return replace(state, host=submit_host(state.config, state.host, request))


def submit_host(config: Config, host: HostState, request: Request) -> HostState:
    """`submit` on the host state alone."""
    request = _checked(config, host, request)
    who = f"request {request.id!r}"
    version, loading = resolve(host.adapters, request.adapter, who)
    given = request.sampling.seed
    seed = request_seed(config.seed, request.id) if given is None else given
    record = RequestState(
        request=request,
        arrival=host.arrivals,
        version=None,
        loading=True,
        seed=seed,
        stream=random_stream(seed, 0, ()),
        branch_path=(),
        num_branches=0,
        root=b"",
        prompt_digests=(),
        generated_digests=(),
        generated=frozen(()),
        logprobs=frozen((), np.float32),
        num_cached=-1,
        num_preemptions=0,
        text=b"" if request.sampling.stop else None,
    )
    adapters = host.adapters
    if not loading:
        record = bind(config, record, version)
        adapters = count_users(adapters, ((version, 1),))
    return replace(
        host,
        arrivals=host.arrivals + 1,
        requests=host.requests.set(request.id, record),
        waiting=(*host.waiting, request.id),
        adapters=adapters,
    )


def _checked(config: Config, host: HostState, request: Request) -> Request:
    request = checked_request(
        request,
        vocab_size=config.model.vocab_size,
        max_context=config.max_context,
        has_text=config.tokens is not None,
    )
    if request.id in host.requests or any(c.id == request.id for c in host.ended):
        raise RequestError(f"request {request.id!r}: a live request has this id")
    count = len(request.tokens)
    needed = -(-(count + 1) // config.block_size)
    if needed > config.num_blocks:
        raise RequestError(
            f"request {request.id!r}: {count} prompt tokens and one generated token need "
            f"{needed} blocks of {config.block_size}, but num_blocks={config.num_blocks}"
        )
    return request


def bind(config: Config, record: RequestState, version: str | None) -> RequestState:
    """The record with its adapter version, which fixes the identity of its KV blocks."""
    root = chain_root(config.kv_identity, version, record.request.salt)
    digests = ()
    if config.prefix_caching:
        digests = block_digests(root, record.request.tokens, config.block_size)
    return replace(record, version=version, loading=False, root=root, prompt_digests=digests)


def abort(state: EngineState, request_id: str) -> EngineState:
    """End a request at once and free all it holds; `progress` tells what it had generated.

    Raises UnknownRequestError.
    """
    return drop_blobs(replace(state, host=abort_host(state.host, request_id)))


def abort_host(host: HostState, request_id: str) -> HostState:
    """`abort` on the host state alone. A plan in flight loses the row at its commit."""
    record = live(host, request_id)
    rows, blocks, copies = host.rows, host.blocks, host.copies
    if request_id in rows.ids:
        row = rows.ids.index(request_id)
        draft = BlockDraft(blocks)
        draft.release(rows.tables[row])
        copies = drop_copies(host.copies, draft)
        blocks = draft.finish()
        rows = take_rows(rows, [r for r in range(len(rows.ids)) if r != row])
    return replace(
        host,
        requests=host.requests.delete(request_id),
        waiting=tuple(i for i in host.waiting if i != request_id),
        rows=rows,
        blocks=blocks,
        copies=copies,
        adapters=count_users(host.adapters, ((record.version, -1),)),
    )


def branch(state: EngineState, request_id: str, new_ids: Sequence[str]) -> EngineState:
    """Continue one live request as several: the original goes on, `new_ids` start as its copies.

    Full KV blocks are shared; only the last partial block is copied, by the next step. Each branch
    draws from a noise stream of its own; greedy branches equal the original. A branch that finds no
    row or block free waits in front of the queue and is recomputed, as if preempted; branches of a
    waiting request wait behind it.

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
        if parent_row is None or spare <= 0 or draft.num_free == 0:
            waiting.append(child.request.id)
            continue
        row, copied = _branched_row(config, host.rows, parent_row, child, draft)
        rows.append(row)
        copies += copied
    kept = replace(host.requests[request_id], num_branches=parent.num_branches + len(children))
    with host.requests.mutate() as requests:
        requests[request_id] = kept
        requests.update({child.request.id: child for child in children})
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


def _queued(queue: tuple[str, ...], parent: str, children: list[str]) -> tuple[str, ...]:
    """The children behind their parent where it waits, else in front, like preempted rows."""
    place = queue.index(parent) + 1 if parent in queue else 0
    return (*queue[:place], *children, *queue[place:])


def _check_new_ids(host: HostState, request_id: str, new_ids: Sequence[str]) -> None:
    if isinstance(new_ids, str) or len(set(new_ids)) != len(new_ids):
        raise RequestError(f"branch of {request_id!r}: new_ids={new_ids!r} must be distinct ids")
    for new_id in new_ids:
        if not isinstance(new_id, str) or not new_id or new_id in host.requests:
            raise RequestError(f"branch of {request_id!r}: id {new_id!r} is empty or live")


def _child(host: HostState, parent: RequestState, ordinal: int, new_id: str) -> RequestState:
    """The parent's copy. It keeps the seed, so a branch's noise depends on its path, not its id."""
    path = (*parent.branch_path, parent.num_branches + ordinal + 1)
    return replace(
        parent,
        request=replace(parent.request, id=new_id),
        arrival=host.arrivals + ordinal,
        stream=random_stream(parent.seed, 0, path),
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
        (block,) = draft.allocate(1)
        # Held until the step that copies is planned, which then cannot hand it out itself: if that
        # step fails and is tried again, the content is still there.
        draft.retain([table[full]])
        copies.append((table[full], block))
        table = [*table[:full], block]
    row = make_row(
        child,
        frozen(table),
        num_computed=computed,
        limit=row_limit(config, child),
        block_size=config.block_size,
    )
    return row, copies
