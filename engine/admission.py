"""Which waiting requests become rows, and to whom a place for its adapter is promised."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from purestep.engine.config import Config
from purestep.engine.encoding import Encoding
from purestep.engine.ends import ended_request
from purestep.engine.new_row import blocks_suffice, items_fit, outgrows_pool, start_row
from purestep.engine.policy import Order
from purestep.engine.waiting import Queue
from purestep.state.adapter_places import (
    activate,
    has_place,
    renew_reservations,
    reserve,
    slot_of,
    victims_for,
)
from purestep.state.adapters import AdapterLedger
from purestep.state.blocks import BlockDraft
from purestep.state.engine import HostState
from purestep.state.request import Completion, FinishReason, RequestState
from purestep.state.rows import Rows


@dataclass(slots=True)
class Admitted:
    """Waiting requests that become rows, each with its first token count."""

    rows: list[tuple[Rows, int]]
    records: dict[str, RequestState]
    adapters: AdapterLedger
    ended: list[Completion]
    num_hit_tokens: int = 0

    @staticmethod
    def none(adapters: AdapterLedger) -> "Admitted":
        """Nobody (yet)."""
        return Admitted(rows=[], records={}, adapters=adapters, ended=[])

    def add(self, record: RequestState, row: Rows, count: int) -> None:
        """Note that a record has become a row, which has computed nothing but its prefix hits."""
        computed = int(row.num_computed_R[0])
        if record.num_cached < 0:
            record = replace(record, num_cached=computed)
        self.rows.append((row, count))
        self.records[record.key] = record
        self.num_hit_tokens += computed


def admit(
    config: Config,
    host: HostState,
    order: Order,
    draft: BlockDraft,
    encoding: Encoding,
    running: Rows,
    count_R: np.ndarray,
) -> Admitted:
    """Admit in order while tokens, rows, blocks and adapter places last; `running` compute
    `count_R` tokens.

    A request whose adapter finds no place, or has its quota of blocks, is skipped, the next may
    fit; one that finds no blocks stops the admission, or large prompts would wait for ever behind
    small ones. Base requests are skipped only where a media item cannot be encoded in this step
    (`engine/encoding.py`).

    First come, first served among the requests of one adapter: whoever is admitted is, each time,
    the first in the order that has a place. A place opens in mid-pass by an activation alone, which
    may end the promise that kept it, so behind each activation those skipped before are asked
    again, before anybody who stands behind them; so nobody overtakes a request of his own adapter.

    Bounded wait: a request that is skipped `adapter_age_limit` steps after it was queued gets a
    promise (`state/adapter_places.py`), also where its adapter is there but is to leave for an
    older one: the place of adapters whose running rows are let run out. Until it is taken these get
    no new rows, and no other adapter comes in but those that have a promise too and leave the room
    for this one; so that, given free blocks and rows and a policy that puts nothing else in front,
    the request is admitted at most

        adapter_age_limit + the longest remaining run of those rows

    steps after it was queued, where those are the rows of its victims and of the promises made
    before, and a row's run is the steps it still needs, counted from the step of the promise on:
    one for each token, and one for each chunk of its prompt. For the promise is made in the step in
    which the age limit is reached, all it counts on are free rows, which only an activation takes,
    and victims, whose rows do not increase; and each of these ends or computes in every step. With
    `adapter_preemption` rows are preempted in the next step once they have drawn a token, and the
    bound is `adapter_age_limit + 1` if all have.
    """
    out = Admitted.none(renew_reservations(host.adapters))
    if not order.waiting:
        return out
    queue = Queue(config, host, order, running, draft, out.rows)
    room = config.max_batched_tokens - int(count_R.sum())
    while room and not encoding.stalled and len(running.ids) + len(out.rows) < config.max_rows:
        found = queue.next(out.adapters, to_the_end=not (running.ids or out.rows))
        if found is None:
            break
        record, victims = found
        if outgrows_pool(config, record):
            # A branch of a row whose next token outgrows the pool; the row itself ends likewise.
            out.ended.append(ended_request(config, record, FinishReason.CAPACITY))
            continue
        if record.request.features and not items_fit(config, record, draft, encoding, room):
            continue
        if not blocks_suffice(config, record, draft):
            break
        if record.version is not None:
            queue.counts[record.version] += 1
            if record.version not in out.adapters.resident:
                out.adapters = renew_reservations(activate(out.adapters, record.version, victims))
                queue.look_again()
        slot = slot_of(out.adapters, record.version)
        row, count = start_row(config, record, slot, draft, encoding, room)
        out.add(record, row, count)
        room -= count
    skipped = queue.skipped()
    out.adapters = _with_promises(config, host, out.adapters, skipped, queue.counts)
    if skipped and not (running.ids or out.rows):
        # Nothing runs, so only pins can be in the way, and no later step would change that.
        pins = len(host.adapters.pins)
        why = f"pinned adapters ({pins}) leave no place for it: max_active_adapters, lora_rows"
        out.ended += [
            ended_request(config, r, FinishReason.ERROR, f"adapter {r.request.adapter!r}: {why}")
            for r in skipped
            if victims_for(host.adapters, r.version, ()) is None
        ]
    return out


def _with_promises(
    config: Config,
    host: HostState,
    ledger: AdapterLedger,
    skipped: list[RequestState],
    counts: Mapping[str, int],
) -> AdapterLedger:
    """The ledger with a promise for each adapter that a request has waited too long for.

    Where there is no room for it behind the promises made already, those to requests that stand
    behind this one yield, and are made anew behind its own: so a promise never holds up for ever
    what the policy puts in front.
    """
    front: set[str] = set()
    for record in skipped:
        promises, version = ledger.reservations, record.version
        known = has_place(ledger, promises, version) or any(r.version == version for r in promises)
        if host.step - record.queued_at >= config.adapter_age_limit and not known:
            new = reserve(ledger, record.version, counts)
            if new is ledger:
                kept = tuple(r for r in ledger.reservations if r.version in front)
                bare = replace(ledger, reservations=kept)
                new = reserve(bare, record.version, counts)
                new = ledger if new is bare else new
            ledger = new
        front.add(record.version)
    return ledger
