"""One pass over the waiting requests: whose adapter has a place, and who is evicted for it."""

from collections import Counter, deque
from collections.abc import Sequence

from purestep.engine.config import Config, row_limit
from purestep.engine.new_row import prefix_hits
from purestep.engine.policy import Order
from purestep.engine.quota import quota_room
from purestep.state.adapter_places import (
    activate,
    keeping,
    promised_victims,
    victims_for,
)
from purestep.state.adapters import AdapterLedger, Reservation
from purestep.state.blocks import BlockDraft
from purestep.state.engine import HostState
from purestep.state.request import RequestState
from purestep.state.rows import Rows


class Queue:
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
        admitted: Sequence[tuple[Rows, int]],
    ) -> None:
        self.counts = Counter(running.versions)  # running rows of each version
        del self.counts[None]
        self._config, self._host, self._order = config, host, order
        self._running, self._draft, self._admitted = running, draft, admitted
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
        hits = prefix_hits(self._config, record, self._draft)
        last = -(-row_limit(self._config, record) // self._config.block_size)
        needed = last - len(hits) + self._draft.count_queued(hits)
        parts = [self._running, *(row for row, _ in self._admitted)]
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
