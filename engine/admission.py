"""Which waiting requests become rows: prefix hits, first blocks, places for adapters."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from purestep.engine.config import Config, row_limit
from purestep.engine.policy import Order
from purestep.state.adapters import (
    AdapterLedger,
    activate,
    renew_reservations,
    reserve,
    victims_for,
)
from purestep.state.blocks import BlockDraft
from purestep.state.engine import HostState, Rows, completion, make_row
from purestep.state.request import Completion, FinishReason, RequestState, frozen


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
    config: Config, host: HostState, order: Order, draft: BlockDraft, running: Rows, room: int
) -> Admitted:
    """Admit in order while tokens, rows, blocks and adapter places last.

    A request whose adapter finds no place is skipped, the next may fit; one that finds no blocks
    stops the admission, or large prompts would wait for ever behind small ones. Base requests are
    never skipped.

    Bounded wait: a request that is skipped `adapter_age_limit` steps after it was queued gets a
    promise (`state/adapters.py: reserve`): the place of adapters whose running rows are let run
    out. Until it is taken these get no new rows and no other adapter comes in, so that, given free
    blocks and a policy that puts nothing else in front, the request is admitted at most

        adapter_age_limit + the longest remaining run of those rows

    steps after it was queued, where a row's run is the steps it still needs, counted from the step
    of the promise on: one for each token, and one for each chunk of its prompt. For the promise is
    made in the step in which the age limit is reached, the rows it waits for do not increase, and
    each of them ends or computes in every step. With `adapter_preemption` rows are preempted in the
    next step once they have drawn a token, and the bound is `adapter_age_limit + 1` if all have.
    """
    out = Admitted.none(renew_reservations(host.adapters))
    if not order.waiting:
        return out
    queue = _Queue(host, order, running)
    skipped = []
    for request_id in order.waiting:
        full = room == 0 or len(running.ids) + len(out.rows) == config.max_rows
        if full or (queue.exhausted and (running.ids or out.rows)):
            break
        record = host.requests[request_id]
        queue.pass_by(record)
        if record.loading:
            continue
        victims = queue.adapter_place(config, out.adapters, record)
        if victims is None:
            skipped.append(record)
            continue
        if -(-_num_tokens(record) // config.block_size) > config.num_blocks:
            # A branch of a row whose next token outgrows the pool; the row itself ends likewise.
            out.ended.append(ended_request(config, record, FinishReason.CAPACITY))
            continue
        if not _blocks_suffice(config, record, draft):
            break
        if record.version is not None:
            queue.counts[record.version] += 1
            if record.version not in out.adapters.resident:
                out.adapters = renew_reservations(activate(out.adapters, record.version, victims))
                queue.look_again()
        room -= _start_row(config, record, draft, room, out)
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
    """What one pass over the waiting requests has learnt. A local of a pure function.

    It makes a pass cheap behind an adapter limit, where thousands may wait: a version that found no
    place finds none until another is activated, so it is looked for once; and the pass ends where
    only such versions are left, which the counts of users tell.
    """

    def __init__(self, host: HostState, order: Order, running: Rows) -> None:
        self.counts = Counter(running.versions)  # running rows of each version
        del self.counts[None]
        self._host, self._order = host, order
        self._flying = {p.version for plan in host.in_flight for p in plan.residents}
        self._by_arrival = order.waiting is host.waiting
        users = host.adapters.users
        self._unseen = Counter({v: n - self.counts[v] for v, n in users.items()})
        self._num_unseen = len(order.waiting)
        self._num_hopeless = 0  # unseen ones of the versions in `_settled`
        self._blocked: set[str] = set()
        self._settled: set[str] = set()
        self._wanted: set[str] | None = None

    @property
    def exhausted(self) -> bool:
        """Whether all that is left is of versions that have no place, and none has waited longer
        than one that was seen, so that no promise is missed."""
        return self._num_unseen == self._num_hopeless

    def pass_by(self, record: RequestState) -> None:
        """Count a request as seen."""
        self._num_unseen -= 1
        if record.version is not None:
            self._unseen[record.version] -= 1
            self._num_hopeless -= record.version in self._settled

    def adapter_place(
        self, config: Config, ledger: AdapterLedger, record: RequestState
    ) -> tuple[str, ...] | None:
        """Whom to evict for a request's adapter (nobody, often); None when it has no place."""
        version = record.version
        if version is None:
            return ()
        if version not in self._blocked:
            victims = self._victims(config, ledger, version)
            if victims is not None:
                return victims
            self._blocked.add(version)
        # Behind a request that was never admitted, and is no branch, stand later ones alone.
        in_line = self._by_arrival and record.num_cached < 0 and not record.branch_path
        if in_line and version not in self._settled:
            self._settled.add(version)
            self._num_hopeless += self._unseen[version]
        return None

    def _victims(
        self, config: Config, ledger: AdapterLedger, version: str
    ) -> tuple[str, ...] | None:
        others = {v for r in ledger.reservations if r.version != version for v in r.victims}
        if version in ledger.resident:
            return None if version in others else ()
        if ledger.reservations and all(r.version != version for r in ledger.reservations):
            return None
        in_use = self.counts.keys() | self._flying
        spared = victims_for(ledger, version, in_use | others | self._soon(config))
        return victims_for(ledger, version, in_use | others) if spared is None else spared

    def _soon(self, config: Config) -> set[str]:
        """The versions of the next requests, which are spared where possible."""
        if self._wanted is None:
            soon = (self._host.requests[i].version for i in self._order.waiting[: config.max_rows])
            self._wanted = {version for version in soon if version is not None}
        return self._wanted

    def look_again(self) -> None:
        """An adapter was activated, so another choice of victims may be open."""
        self._blocked.clear()
        self._settled.clear()
        self._num_hopeless = 0


def _with_promises(
    config: Config,
    host: HostState,
    ledger: AdapterLedger,
    skipped: list[RequestState],
    counts: Mapping[str, int],
) -> AdapterLedger:
    """The ledger with a promise for each adapter that a request has waited too long for."""
    for record in skipped:
        if host.step - record.queued_at < config.adapter_age_limit:
            continue
        known = {r.version for r in ledger.reservations}
        if record.version not in known and record.version not in ledger.resident:
            ledger = reserve(ledger, record.version, counts)
    return ledger


def _blocks_suffice(config: Config, record: RequestState, draft: BlockDraft) -> bool:
    """Whether all its known tokens fit, so that admission does not cause the next preemption."""
    hits = _prefix_hits(config, record, draft)
    total = -(-_num_tokens(record) // config.block_size)
    return total - len(hits) + draft.count_queued(hits) <= draft.num_free


def _num_tokens(record: RequestState) -> int:
    return len(record.request.tokens) + len(record.generated)


def _prefix_hits(config: Config, record: RequestState, draft: BlockDraft) -> list[int]:
    """Cached blocks of the longest prefix, never with the last token: its logits are needed. Nor
    with positions whose scores or hidden states the caller is still to get."""
    if not config.prefix_caching:
        return []
    most, told = _num_tokens(record) - 1, record.num_told
    usable = most if told is None else min(most, told)
    return draft.lookup(record.digests[: usable // config.block_size])


def _start_row(
    config: Config, record: RequestState, draft: BlockDraft, room: int, out: Admitted
) -> int:
    """Give a record its blocks and make it a row; returns the tokens it computes first."""
    B, total = config.block_size, _num_tokens(record)
    hits = _prefix_hits(config, record, draft)
    draft.retain(hits)
    computed = len(hits) * B
    count = min(total - computed, room, config.long_prefill_threshold or total)
    table = frozen([*hits, *draft.allocate(-(-(computed + count) // B) - len(hits))])
    if config.prefix_caching:
        register_blocks(config, record, table, computed, computed + count, draft)
    limit = row_limit(config, record)
    row = make_row(record, table, num_computed=computed, limit=limit, block_size=B)
    out.rows.append((row, count))
    if record.num_cached < 0:
        record = replace(record, num_cached=computed)
    out.records[record.key] = record
    out.num_hit_tokens += computed
    return count


def register_blocks(
    config: Config, record: RequestState, table: np.ndarray, start: int, end: int, draft: BlockDraft
) -> None:
    """Make the blocks findable that computing tokens `start` to `end` fills; with prefix caching.

    At once, so that a request admitted in this very step can share them: each layer writes all
    rows' KV before any row attends.
    """
    num_prompt = len(record.prompt_digests)
    first, last = start // config.block_size, end // config.block_size
    for k, block in enumerate(table[first:last].tolist(), first):
        if k < num_prompt:
            draft.register(block, record.prompt_digests[k])
        else:
            draft.register(block, record.generated_digests[k - num_prompt])


def ended_request(
    config: Config, record: RequestState, reason: FinishReason, error: str | None = None
) -> Completion:
    """The end of a request that gets no further token; its record is complete."""
    text = None if config.tokens is None else config.tokens.text(record.generated)
    return completion(record, text=text, finish_reason=reason, error=error)
