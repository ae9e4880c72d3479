"""The KV block ledger: who holds which block, what it contains, which is reused next.

Blocks with references are held. A free block keeps its digest, and so stays findable, until it is
allocated again. Free blocks stand in one queue and leave it at the head: blocks that never had a
digest are put back at the head, hashed ones at the tail, a request's last block before its first,
so that eviction is LRU by release and the longest prefix survives longest (multi_lora.md, 12.4).

The queue is a persistent map from a stamp to a block. Stamps below 0 are blocks put back at the
head, 0 to num_blocks-1 are blocks never used (their stamp is their number and they are not stored),
higher ones the LRU tail. So every operation costs O(1) map updates whatever the pool's size.

With a quota each adapter version owns the blocks its requests hold or have left cached, and once it
owns so many, it takes its own least recently released one in place of the queue's first: so what
others have cached is safe from it. Who admits sees to it that its requests never hold more.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from immutables import Map

from purestep.state.digests import Digests, no_digests
from purestep.state.pytree import tree


@tree
class BlockLedger:
    """Reference counts, digests and free order of the blocks 0..num_blocks-1. A block that is
    neither queued nor was never used is held."""

    num_blocks: int
    shared: Map[int, int]  # block -> holders, of blocks that have more than one
    digest_of: Digests  # block -> digest, for every hashed block
    block_of: Map[bytes, int]  # digest -> the first block that got it
    queue: Map[int, int]  # stamp -> free block
    stamp_of: Map[int, int]  # the reverse of `queue`
    low: int  # lowest stamp below 0; those up to -1 are all queued, as nothing can hit them
    high: int  # no queued stamp from num_blocks up to here
    tail: int  # next stamp at the tail
    fresh: int  # blocks from here on were never used
    quota: int  # blocks that one owner may have; 0 = no limit, and nobody owns any
    owner_of: Map[int, str]  # block -> adapter version
    owned: Map[str, int]  # how many blocks each owner has, held or cached
    idle: Map[str, Map[int, int]]  # owner -> stamp -> block, of those that are free

    @property
    def num_free(self) -> int:
        return len(self.queue) + self.num_blocks - self.fresh

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that a lookup can still find."""
        return sum(b in self.stamp_of for b in self.block_of.values())

    def holders(self, block: int) -> int:
        """How many hold a block; 0 for a free one."""
        held = block < self.fresh and block not in self.stamp_of
        return self.shared.get(block, 1) if held else 0


def empty_blocks(num_blocks: int, quota: int = 0) -> BlockLedger:
    """A ledger with every block free and nothing cached."""
    none: Map = Map()
    return BlockLedger(
        num_blocks=num_blocks,
        shared=none,
        digest_of=no_digests(),
        block_of=none,
        queue=none,
        stamp_of=none,
        low=0,
        high=num_blocks,
        tail=num_blocks,
        fresh=0,
        quota=quota,
        owner_of=none,
        owned=none,
        idle=none,
    )


class BlockDraft:
    """One step's changes to a ledger, made in order and turned into a new ledger by `finish`.

    A local of a pure function: the ledger it started from never changes. The whole step shares one
    draft since a persistent update per row costs 70 times as much (256 rows: 21 ms against 0.3).
    """

    def __init__(self, ledger: BlockLedger) -> None:
        self.num_blocks = ledger.num_blocks
        self.shared = ledger.shared.mutate()
        self.digest_of = ledger.digest_of.mutate()
        self.block_of = ledger.block_of.mutate()
        self.queue = ledger.queue.mutate()
        self.stamp_of = ledger.stamp_of.mutate()
        self.low, self.high = ledger.low, ledger.high
        self.tail, self.fresh = ledger.tail, ledger.fresh
        self.quota = ledger.quota
        self.owner_of = ledger.owner_of.mutate()
        self.owned = ledger.owned.mutate()
        self.idle = ledger.idle
        self.allocated: list[int] = []  # every block handed out, in order

    @property
    def num_free(self) -> int:
        return len(self.queue) + self.num_blocks - self.fresh

    def num_held(self, owner: str) -> int:
        """How many different blocks the requests of an owner hold; with a quota."""
        return self.owned.get(owner, 0) - len(self.idle.get(owner, ()))

    def allocate(self, count: int, owner: str | None = None) -> list[int]:
        """Take `count` blocks from the head of the queue; what they cached is forgotten. An owner
        who has his quota takes his own cached ones first; the base model is nobody.

        Raises ValueError, before any change, when fewer are free.
        """
        if count > self.num_free:
            raise ValueError(
                f"{count} blocks wanted, {self.num_free} of {self.num_blocks} are free"
            )
        if self.quota and owner is not None:
            blocks = [self._pop_for(owner) for _ in range(count)]
        else:
            blocks = [self._pop() for _ in range(count)]
        self.allocated += blocks
        return blocks

    def _pop_for(self, owner: str) -> int:
        idle = self.idle.get(owner)
        if idle and self.owned[owner] >= self.quota:
            block = idle[min(idle)]
            self._unqueue(block)
            self.forget(block)
            return block
        block = self._pop()
        self.owner_of[block] = owner
        self.owned[owner] = self.owned.get(owner, 0) + 1
        return block

    def _pop(self) -> int:
        if self.low < 0:
            stamp, self.low = self.low, self.low + 1
        elif self.fresh < self.num_blocks:
            block, self.fresh = self.fresh, self.fresh + 1
            return block
        else:
            while self.high not in self.queue:  # a hit took this one out of the middle
                self.high += 1
            stamp, self.high = self.high, self.high + 1
        block = self.queue[stamp]
        self._unqueue(block)
        self._disown(block)
        self.forget(block)
        return block

    def _unqueue(self, block: int) -> None:
        stamp = self.stamp_of.pop(block)
        del self.queue[stamp]
        if self.quota and (owner := self.owner_of.get(block)) is not None:
            self._keep_idle(owner, self.idle[owner].delete(stamp))

    def _keep_idle(self, owner: str, idle: Map) -> None:
        self.idle = self.idle.set(owner, idle) if idle else self.idle.delete(owner)

    def _disown(self, block: int) -> None:
        owner = self.owner_of.pop(block, None) if self.quota else None
        if owner is None:
            return
        count = self.owned.pop(owner) - 1
        if count:
            self.owned[owner] = count

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block, taking it out of the free queue if need be."""
        for block in blocks:
            if block in self.stamp_of:
                self._unqueue(block)
            else:
                self.shared[block] = self.shared.get(block, 1) + 1

    def holds(self, block: int) -> bool:
        """Whether anybody holds a block."""
        return block < self.fresh and block not in self.stamp_of

    def release(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Drop one holder from each of a request's blocks, given in the request's order. Raises
        KeyError for a block that is free."""
        for block in reversed([int(b) for b in blocks]):
            held = self.shared.get(block, 1) - 1
            if held:
                del self.shared[block]
                if held > 1:
                    self.shared[block] = held
                continue
            if not self.holds(block):
                raise KeyError(block)
            if self._findable(block):
                stamp, self.tail = self.tail, self.tail + 1
                if self.quota and (owner := self.owner_of.get(block)) is not None:
                    self._keep_idle(owner, self.idle.get(owner, Map()).set(stamp, block))
            else:
                self.forget(block)
                self._disown(block)
                stamp = self.low = self.low - 1
            self.queue[stamp] = block
            self.stamp_of[block] = stamp

    def _findable(self, block: int) -> bool:
        digest = self.digest_of.get(block)
        return digest is not None and self.block_of.get(digest) == block

    def register(self, block: int, digest: bytes) -> None:
        """Make a block findable. A second block of the same content stays private."""
        self.digest_of[block] = digest
        if digest not in self.block_of:
            self.block_of[digest] = block

    def forget(self, block: int) -> None:
        """Drop what is known of a block's content."""
        digest = self.digest_of.pop(block)
        if digest is not None and self.block_of.get(digest) == block:
            del self.block_of[digest]

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of a digest chain."""
        hits = []
        for digest in digests:
            block = self.block_of.get(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def count_queued(self, blocks: Iterable[int]) -> int:
        """How many of these blocks a `retain` would take out of the free queue."""
        return sum(b in self.stamp_of for b in blocks)

    def finish(self) -> BlockLedger:
        return BlockLedger(
            num_blocks=self.num_blocks,
            shared=self.shared.finish(),
            digest_of=self.digest_of.finish(),
            block_of=self.block_of.finish(),
            queue=self.queue.finish(),
            stamp_of=self.stamp_of.finish(),
            low=self.low,
            high=self.high,
            tail=self.tail,
            fresh=self.fresh,
            quota=self.quota,
            owner_of=self.owner_of.finish(),
            owned=self.owned.finish(),
            idle=self.idle,
        )


def held_blocks(ledger: BlockLedger) -> list[int]:
    """All blocks that somebody holds, in ascending order."""
    return [block for block in range(ledger.fresh) if block not in ledger.stamp_of]


def free_order(ledger: BlockLedger) -> list[int]:
    """All free blocks in the order in which they will be reused."""
    stamps = sorted(ledger.queue)
    low = [ledger.queue[s] for s in stamps if s < 0]
    high = [ledger.queue[s] for s in stamps if s >= ledger.num_blocks]
    return low + list(range(ledger.fresh, ledger.num_blocks)) + high


def check_blocks(ledger: BlockLedger, holders: Iterable[Sequence[int] | np.ndarray]) -> None:
    """Assert the ledger's laws: counts are the number of holders, free or held and never both."""
    counts: dict[int, int] = {}
    for table in holders:
        assert len(set(map(int, table))) == len(table), f"a table holds a block twice: {table}"
        for block in table:
            counts[int(block)] = counts.get(int(block), 0) + 1
    found = {block: ledger.holders(block) for block in held_blocks(ledger)}
    assert counts == found, f"references {found}, holders {counts}"
    assert dict(ledger.shared) == {block: n for block, n in counts.items() if n > 1}
    order = free_order(ledger)
    assert sorted([*order, *counts]) == list(range(ledger.num_blocks)), "a block is lost or twice"
    assert len(order) == ledger.num_free
    assert {b: s for s, b in ledger.queue.items()} == dict(ledger.stamp_of)
    low = sorted(s for s in ledger.queue if s < 0)
    assert low == list(range(ledger.low, 0)), "the head of the queue has a gap"
    assert all(s < 0 or ledger.high <= s < ledger.tail for s in ledger.queue)
    for digest, block in ledger.block_of.items():
        assert ledger.digest_of[block] == digest
    for block in ledger.stamp_of:
        digest = ledger.digest_of.get(block)
        assert digest is None or ledger.block_of[digest] == block, "a free duplicate has a digest"
    check_owners(ledger)


def check_owners(ledger: BlockLedger) -> None:
    """Assert the laws of a quota: an owner's blocks are counted, and those that are free are known
    by their stamps; nobody has more than the quota; without one nobody owns any."""
    counts: dict[str, int] = {}
    for block, owner in ledger.owner_of.items():
        counts[owner] = counts.get(owner, 0) + 1
        assert ledger.holders(block) or ledger.idle[owner][ledger.stamp_of[block]] == block
    assert counts == dict(ledger.owned), f"owners have {counts}, counted are {dict(ledger.owned)}"
    idle = [block for blocks in ledger.idle.values() for block in blocks.values()]
    assert sorted(idle) == sorted(b for b in ledger.owner_of if not ledger.holders(b))
    assert all(count <= ledger.quota for count in counts.values()), f"over the quota: {counts}"
