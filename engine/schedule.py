"""Who runs, how many tokens, which blocks: the decisions of one step, without touching a tensor.

R running rows. Rows that decode are served before prompt chunks, so that a long prompt never
starves them; a step that preempts admits nobody (multi_lora.md, 11.1).

A plan may be in flight. What it draws counts as length only: a row that may stop there is planned
all the same. Nothing that it reads or writes is handed out, so where the next plan would have to
take blocks from a row, or needs a token's value, it waits until the one in flight is committed.
"""

import numpy as np
from immutables import Map

from purestep.engine.admission import Admitted, admit
from purestep.engine.config import Config
from purestep.engine.encoding import Encoding
from purestep.engine.ends import ended_request
from purestep.engine.planning import make_plan
from purestep.engine.policy import Policy, checked_order, fcfs
from purestep.engine.running import Running, serve_running
from purestep.state.adapters import count_users, load_asked, num_unevictable, touch
from purestep.state.blocks import BlockDraft
from purestep.state.engine import HostState, drop_copies
from purestep.state.errors import InFlightError, StepError
from purestep.state.in_flight import commit_first, drawn_in_flight
from purestep.state.plan import StepPlan
from purestep.state.pytree import evolve
from purestep.state.request import Completion, FinishReason, RequestState, frozen
from purestep.state.rows import Rows, add_rows
from purestep.state.scores import locked


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
    running = serve_running(config, host, order, draft, encoding, drawn_R)
    admitted = Admitted.none(host.adapters)
    if running.admits and not encoding.stalled:
        admitted = admit(config, host, order, draft, encoding, running.rows, running.count_R)

    rows, count_R = _with_admitted(running, admitted)
    copies = drop_copies(host.copies, draft)  # of branches that were preempted: after allocations
    sources = [(host.step, "", frozen([source])) for source, _ in copies]  # this plan reads it
    loads = _wanted_loads(host)
    hopeless = () if loads else _hopeless_loads(config, host)
    ended = (*running.ended, *admitted.ended, *hopeless)
    gone = [c.key for c in ended]
    requests = _updated_records(host, running.records | admitted.records, gone)
    adapters = load_asked(touch(admitted.adapters, rows.used), [name for name, _ in loads])
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


def _with_admitted(running: Running, admitted: Admitted) -> tuple[Rows, np.ndarray]:
    """All rows, new ones behind the old, and how many tokens each computes: int32."""
    if not admitted.rows:
        return running.rows, running.count_R
    new, counts = zip(*admitted.rows, strict=True)
    return add_rows(running.rows, new), np.append(running.count_R, counts).astype(np.int32)


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
            raise commit_first(
                host, f"what {rows.ids[row]!r} draws next depends on the token it draws"
            )
    for place in flying.residents:
        found = host.adapters.resident.get(place.version)
        if found is None or (found.slot, found.row_blocks) != (place.slot, place.row_blocks):
            raise commit_first(host, f"it reads adapter {place.version!r}, which was dropped")
    return evolve(host, rows=evolve(rows, num_tokens_R=locked(num_tokens_R)))


def _as_known(rows: Rows, drawn_R: np.ndarray | None) -> Rows:
    """The rows, new ones behind the old, without the tokens that `_lengthened` counted."""
    if drawn_R is None:
        return rows
    num_tokens_R = rows.num_tokens_R.copy()
    num_tokens_R[: len(drawn_R)] -= drawn_R >= 0
    return evolve(rows, num_tokens_R=locked(num_tokens_R))


def _still_waiting(host: HostState, preempted: tuple[str, ...], left: set[str]) -> tuple[str, ...]:
    if not (preempted or left):
        return host.waiting
    return (*preempted, *(i for i in host.waiting if i not in left))


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
