"""Which waiting requests become rows: prefix hits, first blocks, places for adapters."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from purestep.engine.config import Config, row_limit
from purestep.engine.encoding import Encoding
from purestep.engine.policy import Order
from purestep.engine.quota import quota_room
from purestep.state.adapter_places import (
    activate,
    has_place,
    keeping,
    promised_victims,
    renew_reservations,
    reserve,
    slot_of,
    victims_for,
)
from purestep.state.adapters import AdapterLedger, Reservation
from purestep.state.blocks import BlockDraft
from purestep.state.engine import HostState
from purestep.state.media import outside_groups
from purestep.state.request import Completion, FinishReason, RequestState, completion
from purestep.state.rows import Rows, make_row


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
        return Admitted(rows=[], records={}, adapters=adapters, ended=[])


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
    queue = _Queue(config, host, order, running, draft, out)
    room = config.max_batched_tokens - int(count_R.sum())
    while room and not encoding.stalled and len(running.ids) + len(out.rows) < config.max_rows:
        found = queue.next(out.adapters, to_the_end=not (running.ids or out.rows))
        if found is None:
            break
        record, victims = found
        if -(-_num_tokens(record) // config.block_size) > config.num_blocks:
            # A branch of a row whose next token outgrows the pool; the row itself ends likewise.
            out.ended.append(ended_request(config, record, FinishReason.CAPACITY))
            continue
        if record.request.features and not _encodes(config, record, draft, encoding, room):
            continue
        if not _blocks_suffice(config, record, draft):
            break
        if record.version is not None:
            queue.counts[record.version] += 1
            if record.version not in out.adapters.resident:
                out.adapters = renew_reservations(activate(out.adapters, record.version, victims))
                queue.look_again()
        room -= _start_row(config, record, draft, encoding, room, out)
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


class _Queue:
    """One pass over the waiting requests, and what it has learnt. A local of a pure function.

    It makes a pass cheap behind an adapter limit, where thousands may wait: a version that found no
    place finds none until another is activated, so it is looked for once; and the pass ends where
    only such versions are left, which the counts of users tell.
    """

    def __init__(
        self,
        config: Config,
        host: HostState,
        order: Order,
        running: Rows,
        draft: BlockDraft,
        out: Admitted,
    ) -> None:
        self.counts = Counter(running.versions)  # running rows of each version
        del self.counts[None]
        self._config, self._host, self._order = config, host, order
        self._running, self._draft, self._out = running, draft, out
        self._flying = {p.version for plan in host.in_flight for p in plan.residents}
        self._by_arrival = order.waiting is host.waiting
        self._rest = enumerate(order.waiting)
        rows, users = Counter(host.rows.versions), host.adapters.users  # also rows that make way
        self._unseen = Counter({v: n - rows[v] for v, n in users.items()})
        self._num_unseen = len(order.waiting)
        self._num_hopeless = 0  # unseen ones of the versions in `_settled`
        self._skipped: dict[str, deque[tuple[int, RequestState]]] = {}  # by version, with places
        self._asks_again = False
        self._blocked: set[str] = set()
        self._full: set[str] = set()  # versions at their quota of blocks
        self._settled: set[str] = set()
        self._wanted: set[str] | None = None

    def next(
        self, ledger: AdapterLedger, *, to_the_end: bool
    ) -> tuple[RequestState, tuple[str, ...]] | None:
        """The first request in the order that has a place, or needs none, and whom to evict for it
        (nobody, often). None at the end, or, unless `to_the_end`, where all that is left is of
        versions without a place and none has waited longer than one that was seen, so that no
        promise is missed."""
        if self._asks_again and (found := self._first_skipped(ledger)):
            return found
        while to_the_end or self._num_unseen > self._num_hopeless:
            place, request_id = next(self._rest, (0, None))
            if request_id is None:
                break
            record = self._host.requests[request_id]
            self._num_unseen -= 1
            version = record.version
            if version is None:
                if not record.loading:
                    return record, ()
                continue
            self._unseen[version] -= 1
            self._num_hopeless -= version in self._settled
            victims = self._place(ledger, record)
            if victims is not None:
                return record, victims
            self._skipped.setdefault(version, deque()).append((place, record))
            # Behind a request that was never admitted, and is no branch, stand later ones alone.
            in_line = self._by_arrival and record.num_cached < 0 and not record.branch_path
            if in_line and version not in self._settled:
                self._settled.add(version)
                self._num_hopeless += self._unseen[version]
        return None

    def _first_skipped(self, ledger: AdapterLedger) -> tuple[RequestState, tuple[str, ...]] | None:
        """Likewise, of those that were skipped."""
        for version in sorted(self._skipped, key=lambda v: self._skipped[v][0][0]):
            _, record = self._skipped[version][0]
            victims = self._place(ledger, record)
            if victims is None:
                continue
            self._skipped[version].popleft()
            if not self._skipped[version]:
                del self._skipped[version]
            return record, victims
        self._asks_again = False
        return None

    def skipped(self) -> list[RequestState]:
        """Those that were seen and found no place for their adapters, in the order."""
        lines = [line for version, line in self._skipped.items() if version not in self._full]
        entries = [entry for line in lines for entry in line]
        return [record for _, record in sorted(entries, key=lambda entry: entry[0])]

    def _place(self, ledger: AdapterLedger, record: RequestState) -> tuple[str, ...] | None:
        """Whom to evict so that a request's adapter has a place; None where it gets none, or no
        blocks within its quota, which none behind it gets then."""
        version = record.version
        if version in self._blocked or version in self._full:
            return None
        victims = self._victims(ledger, version)
        if victims is None:
            self._blocked.add(version)
        elif not self._within_quota(record):
            self._full.add(version)
            return None
        return victims

    def _within_quota(self, record: RequestState) -> bool:
        if not self._config.adapter_block_quota:
            return True
        hits = _prefix_hits(self._config, record, self._draft)
        last = -(-row_limit(self._config, record) // self._config.block_size)
        needed = last - len(hits) + self._draft.count_queued(hits)
        parts = [self._running, *(row for row, _ in self._out.rows)]
        return needed <= quota_room(self._config, self._draft, record.version, parts)

    def _victims(self, ledger: AdapterLedger, version: str) -> tuple[str, ...] | None:
        mine = [r for r in ledger.reservations if r.version == version]
        others = [r for r in ledger.reservations if r.version != version]
        promised = {v for r in others for v in r.victims}
        if version in ledger.resident:
            return None if version in promised else ()
        if others and not mine:
            return None
        taken = self.counts.keys() | self._flying | promised
        choices = [victims_for(ledger, version, spared) for spared in (taken | self._soon(), taken)]
        due = (promise for promise in mine if taken.isdisjoint(promise.victims))
        choices += [promised_victims(ledger, promise) for promise in due]
        for victims in choices:
            if victims is not None and _keeps(ledger, version, victims, others):
                return victims
        return None

    def _soon(self) -> set[str]:
        """The versions of the next requests, which are spared where possible."""
        if self._wanted is None:
            first = self._order.waiting[: self._config.max_rows]
            soon = (self._host.requests[i].version for i in first)
            self._wanted = {version for version in soon if version is not None}
        return self._wanted

    def look_again(self) -> None:
        """An adapter was activated, so another choice of victims may be open, and a promise kept:
        who was skipped may have a place now."""
        self._blocked.clear()
        self._settled.clear()
        self._num_hopeless = 0
        self._asks_again = True


def _keeps(
    ledger: AdapterLedger, version: str, victims: tuple[str, ...], promises: list[Reservation]
) -> bool:
    """Whether other promises can still be kept once `version` has come in."""
    return not promises or keeping(activate(ledger, version, victims), promises) is not None


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


def _blocks_suffice(config: Config, record: RequestState, draft: BlockDraft) -> bool:
    """Whether all its known tokens fit, so that admission does not cause the next preemption."""
    hits = _prefix_hits(config, record, draft)
    total = -(-_num_tokens(record) // config.block_size)
    return total - len(hits) + draft.count_queued(hits) <= draft.num_free


def _encodes(
    config: Config, record: RequestState, draft: BlockDraft, encoding: Encoding, room: int
) -> bool:
    """Whether the items that its first tokens need can be encoded now."""
    start = len(_prefix_hits(config, record, draft)) * config.block_size
    return encoding.lets_in(record, start, _first_count(config, record, start, room))


def _first_count(config: Config, record: RequestState, start: int, room: int) -> int:
    """The tokens a new row computes first, media aside."""
    return min(_num_tokens(record) - start, room, config.long_prefill_threshold or room)


def _num_tokens(record: RequestState) -> int:
    return len(record.request.tokens) + len(record.generated)


def _prefix_hits(config: Config, record: RequestState, draft: BlockDraft) -> list[int]:
    """Cached blocks of the longest prefix, never with the last token: its logits are needed. Nor
    with positions whose scores or hidden states the caller is still to get."""
    if not config.prefix_caching:
        return []
    most, told = _num_tokens(record) - 1, record.num_told
    usable = most if told is None else min(most, told)
    hits = draft.lookup(record.digests[: usable // config.block_size])
    if config.disable_chunked_mm_input and record.request.features:
        del hits[outside_groups(record.request.features, len(hits), config.block_size) :]
    return hits


def _start_row(
    config: Config,
    record: RequestState,
    draft: BlockDraft,
    encoding: Encoding,
    room: int,
    out: Admitted,
) -> int:
    """Give a record its blocks and make it a row; returns the tokens it computes first."""
    B = config.block_size
    hits = _prefix_hits(config, record, draft)
    draft.retain(hits)
    computed = len(hits) * B
    count = _first_count(config, record, computed, room)
    if record.request.features:
        count = encoding.fit(record, computed, count)
    num_more = -(-(computed + count) // B) - len(hits)
    table = [*hits, *draft.allocate(num_more, record.version)]
    if config.prefix_caching:
        register_blocks(record.digests, table, computed // B, (computed + count) // B, draft)
    limit = row_limit(config, record)
    slot = slot_of(out.adapters, record.version)
    row = make_row(record, table, slot=slot, num_computed=computed, limit=limit, block_size=B)
    out.rows.append((row, count))
    if record.num_cached < 0:
        record = replace(record, num_cached=computed)
    out.records[record.key] = record
    out.num_hit_tokens += computed
    return count


def register_blocks(
    digests: Sequence[bytes],
    table: Sequence[int] | np.ndarray,
    first: int,
    last: int,
    draft: BlockDraft,
) -> None:
    """Make the blocks from the `first` up to the `last` of a table findable, which this step fills
    and whose chain is `digests`; with prefix caching.

    At once, so that a request admitted in this very step can share them: each layer writes all
    rows' KV before any row attends.
    """
    for k in range(first, last):
        draft.register(int(table[k]), digests[k])


def ended_request(
    config: Config, record: RequestState, reason: FinishReason, error: str | None = None
) -> Completion:
    """The end of a request that gets no further token; its record is complete."""
    text = None if config.tokens is None else config.tokens.text(record.generated)
    return completion(record, text=text, finish_reason=reason, error=error)
