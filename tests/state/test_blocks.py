"""The block ledger against the simplest thing that could be right: a list (multi_lora.md, 12)."""

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from purestep.engine.adapters import deliver_loaded
from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.requests import submit
from purestep.engine.schedule import schedule
from purestep.simulation.device import toy_step
from purestep.simulation.world import MODEL, loaded, toy_config, toy_state
from purestep.state.blocks import (
    BlockDraft,
    BlockLedger,
    check_blocks,
    empty_blocks,
    free_order,
    held_blocks,
)
from purestep.state.engine import EngineState, HostState
from purestep.state.hashing import DIGEST_BYTES, block_digests
from purestep.state.plan import StepPlan, StepResult
from purestep.state.request import Request, frozen
from purestep.state.sampling import SamplingParams


def content(ledger: BlockLedger) -> object:
    """Everything a ledger says, as plain values."""
    maps = (ledger.shared, ledger.digest_of, ledger.block_of, ledger.queue, ledger.stamp_of)
    counters = (ledger.num_blocks, ledger.low, ledger.high, ledger.tail, ledger.fresh)
    return counters, [dict(m.items()) for m in maps], free_order(ledger)


def held(ledger: BlockLedger) -> dict[int, int]:
    return {block: ledger.holders(block) for block in held_blocks(ledger)}


def named(chain: bytes, place: int) -> bytes:
    return (chain + bytes([place])).ljust(DIGEST_BYTES, b".")


class BlockMachine(RuleBasedStateMachine):
    """Drafts on a ledger, beside a free list, reference counts and a list of (digest, block).

    The rules call the draft only as `schedule` and `commit` do: a table grows, its full blocks get
    the digests of its chain, hits are taken from the front of a chain.
    """

    @initialize(num_blocks=st.integers(1, 6), rules_a_draft=st.sampled_from((1, 1, 1, 5)))
    def begin(self, num_blocks: int, rules_a_draft: int) -> None:
        self.rules_left = self.rules_a_draft = rules_a_draft
        self.ledger = empty_blocks(num_blocks)
        self.draft: BlockDraft | None = None
        self.free = list(range(num_blocks))
        self.refs: dict[int, int] = {}
        self.digests: dict[int, bytes] = {}
        self.index: dict[bytes, int] = {}  # the first block of each digest
        self.tables: list[tuple[bytes, list[int]]] = []  # (chain, blocks)
        self.old: list[tuple[BlockLedger, object]] = []

    def change(self) -> BlockDraft:
        if self.draft is None:
            self.draft = BlockDraft(self.ledger)
        return self.draft

    @rule(
        chain=st.sampled_from((b"x", b"y", b"z")),
        length=st.integers(1, 4),
        most_hits=st.sampled_from((0, 4, 4)),
        filled=st.integers(0, 4),
    )
    def start(self, chain: bytes, length: int, most_hits: int, filled: int) -> None:
        """A request begins: hits first, then blocks of its own, some of which fill at once (12.3,
        12.4: touch, allocate). Others end, oldest first, until it fits."""
        draft, length = self.change(), min(length, self.ledger.num_blocks)
        while True:
            wanted = [named(chain, i) for i in range(min(length, most_hits))]
            hits = self.model_lookup(wanted)
            assert draft.lookup(wanted) == hits
            queued = sum(b in self.free for b in hits)
            assert draft.count_queued(hits) == queued
            if length - len(hits) <= len(self.free) - queued:
                break
            self.end_table(0)
        draft.retain(hits)
        for block in hits:
            if block in self.free:
                self.free.remove(block)
            self.refs[block] = self.refs.get(block, 0) + 1
        self.tables.append((chain, hits + self.allocated(length - len(hits))))
        self.fill_table(*self.tables[-1], filled)

    def model_lookup(self, wanted: Sequence[bytes]) -> list[int]:
        hits = []
        for digest in wanted:
            if digest not in self.index:
                break
            hits.append(self.index[digest])
        return hits

    def allocated(self, count: int) -> list[int]:
        expected, self.free = self.free[:count], self.free[count:]
        for block in expected:
            self.model_forget(block)
            self.refs[block] = 1
        assert self.change().allocate(count) == expected
        return expected

    def model_forget(self, block: int) -> None:
        digest = self.digests.pop(block, None)
        if self.index.get(digest) == block:
            del self.index[digest]

    @rule(more=st.integers(1, 10))
    def too_many(self, more: int) -> None:
        """Refused before any change (12.4: more than free -> ValueError)."""
        draft = self.change()
        with pytest.raises(ValueError, match=f"{len(self.free) + more} blocks wanted"):
            draft.allocate(len(self.free) + more)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        _, table = data.draw(st.sampled_from(self.tables))
        if count <= len(self.free):
            table += self.allocated(count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), shared=st.integers(0, 4))
    def share(self, data: st.DataObject, shared: int) -> None:
        """A branch: held blocks get one holder more."""
        chain, table = data.draw(st.sampled_from(self.tables))
        self.change().retain(table[:shared])
        for block in table[:shared]:
            self.refs[block] += 1
        self.tables.append((chain, table[:shared]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 4))
    def fill(self, data: st.DataObject, count: int) -> None:
        self.fill_table(*data.draw(st.sampled_from(self.tables)), count)

    def fill_table(self, chain: bytes, table: list[int], count: int) -> None:
        """Blocks fill in order and become findable; a duplicate stays private (12.3)."""
        for i, block in enumerate(table[:count]):
            if block not in self.digests:
                digest = named(chain, i)
                self.change().register(block, digest)
                self.digests[block] = digest
                self.index.setdefault(digest, block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_table(data.draw(st.integers(0, len(self.tables) - 1)))

    def end_table(self, place: int) -> None:
        """Freed in reverse order: unhashed to the head, hashed to the tail (12.4)."""
        _, table = self.tables.pop(place)
        self.change().release(table if place % 2 else frozen(table))
        for block in reversed(table):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            del self.refs[block]
            if self.index.get(self.digests.get(block)) == block:
                self.free.append(block)
            else:  # never filled, or a second copy that no lookup finds
                self.model_forget(block)
                self.free.insert(0, block)

    @precondition(lambda self: self.digests)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Content that a failed step destroyed is not found again; the block stays where it is."""
        block = data.draw(st.sampled_from(sorted(self.digests)))
        self.change().forget(block)
        self.model_forget(block)

    def finish(self) -> None:
        if self.draft is not None:
            before = content(self.ledger)
            self.old.append((self.ledger, before))
            self.ledger, self.draft = self.draft.finish(), None

    @invariant()
    def the_draft_says_what_the_model_says(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.rules_left -= 1
        if self.rules_left and self.draft is not None:
            assert self.draft.num_free == len(self.free)
            return
        self.rules_left = self.rules_a_draft
        self.finish()
        check_blocks(self.ledger, [table for _, table in self.tables])
        assert free_order(self.ledger) == self.free
        assert self.ledger.num_free == len(self.free)
        assert held(self.ledger) == self.refs
        assert self.ledger.num_held == len(self.refs)
        assert dict(self.ledger.block_of) == self.index
        assert dict(self.ledger.digest_of.items()) == self.digests
        assert self.ledger.num_cached == sum(b in self.free for b in self.index.values())

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.rules_left = 1
        self.the_draft_says_what_the_model_says()
        for ledger, before in self.old:
            assert content(ledger) == before, "an old ledger has changed"


def test_blocks_are_an_ordered_list_of_the_free_and_counts_of_the_held() -> None:
    """multi_lora.md, 21: 17, 18, 19."""
    run_state_machine_as_test(
        BlockMachine, settings=settings(max_examples=80, stateful_step_count=30)
    )


def test_old_ledgers_start_other_futures() -> None:
    """Two drafts of one ledger do not see each other."""
    first = BlockDraft(empty_blocks(4))
    first.allocate(2)
    ledger = first.finish()
    one, two = BlockDraft(ledger), BlockDraft(ledger)
    one.release([0, 1])
    assert one.allocate(3) == [0, 1, 2]
    assert two.allocate(2) == [2, 3]
    assert held(ledger) == {0: 1, 1: 1}


def test_a_free_block_cannot_be_released() -> None:
    draft = BlockDraft(empty_blocks(3))
    draft.release(draft.allocate(1))
    for block in (0, 1):  # free again; never used
        with pytest.raises(KeyError):
            draft.release([block])


def test_trace_of_12_4() -> None:
    """R1, R2, R3. There is no null block here, so block n of the text is n-1 and 5 are usable."""
    fr = tuple(named(b"fr", i) for i in range(2))
    draft = BlockDraft(empty_blocks(5))
    r1 = draft.allocate(3)
    assert r1 == [0, 1, 2]
    for block, digest in zip(r1, fr, strict=False):
        draft.register(block, digest)
    draft.release(r1)
    ledger = draft.finish()
    assert free_order(ledger) == [2, 3, 4, 1, 0]

    draft = BlockDraft(ledger)
    hits = draft.lookup(fr[: (40 - 1) // 16])
    assert hits == [0, 1]
    draft.retain(hits)
    assert free_order(draft.finish()) == [2, 3, 4]
    draft = BlockDraft(ledger)
    draft.retain(hits)
    r2 = hits + draft.allocate(1)
    ledger = draft.finish()
    assert r2 == [0, 1, 2]
    assert free_order(ledger) == [3, 4]

    draft = BlockDraft(ledger)
    assert draft.lookup([named(b"de", 0), named(b"de", 1)]) == []
    with pytest.raises(ValueError, match="3 blocks wanted, 2 of 5 are free"):
        draft.allocate(3)
    assert free_order(draft.finish()) == [3, 4]


def with_two_adapters(config: Config) -> EngineState:
    state = toy_state(config)
    for name in ("fr", "de"):
        state = deliver_loaded(state, loaded(name, name, 8, None))
    return state


def test_trace_of_12_4_through_schedule() -> None:
    """The same three requests, submitted: R2 computes 8 tokens, R3 is not scheduled."""
    config = toy_config(
        block_size=16, num_blocks=5, max_context=64, max_batched_tokens=64, max_rows=3
    )
    state = with_two_adapters(config)
    once = SamplingParams(max_tokens=1)
    tokens = [3 + i % 5 for i in range(40)]
    state = submit(state, Request(id="R1", tokens=tokens, adapter="fr", sampling=once))
    state, outputs = toy_step(state)
    assert [c.id for c in outputs.finished] == ["R1"]
    assert free_order(state.host.blocks) == [2, 3, 4, 1, 0]
    state = submit(state, Request(id="R2", tokens=tokens, adapter="fr", sampling=once))
    state = submit(state, Request(id="R3", tokens=tokens, adapter="de", sampling=once))
    host, plan = schedule(config, state.host)
    assert plan.row_ids == ("R2",)
    assert (plan.count_R.tolist(), plan.tables[0].tolist()) == ([8], [0, 1, 2])
    assert host.waiting == ("R3",)


@pytest.mark.parametrize(
    ("num_tokens", "shared", "adapter", "hit_tokens", "computed"),
    [
        (2050, 2050, "fr", 2048, 2),
        (2048, 2048, "fr", 2032, 16),
        (2050, 2000, "fr", 2000, 50),
        (2050, 2050, "de", 0, 2050),
        (16, 16, "fr", 0, 16),
    ],
)
def test_lookup_table_of_12_3(
    num_tokens: int, shared: int, adapter: str, hit_tokens: int, computed: int
) -> None:
    """Hits are whole blocks, never the last token (21: 17; PC-01, PC-03)."""
    config = toy_config(
        model=replace(MODEL, max_position=4096),
        block_size=16,
        num_blocks=300,
        max_context=4096,
        max_batched_tokens=4096,
    )
    state = with_two_adapters(config)
    once = SamplingParams(max_tokens=1)
    first = [3 + i % 5 for i in range(num_tokens)]
    second = [*first[:shared], *[1] * (num_tokens - shared)]
    # The toy device would hash two thousand tokens two thousand times; the plan tells enough.
    host = submit(state, Request(id="1", tokens=first, adapter="fr", sampling=once)).host
    host, plan = schedule(config, host)
    host = finished(config, host, plan)
    state = replace(state, host=host)
    host = submit(state, Request(id="2", tokens=second, adapter=adapter, sampling=once)).host
    host, plan = schedule(config, host)
    assert (plan.num_hit_tokens, plan.count_R.tolist()) == (hit_tokens, [computed])
    assert finished(config, host, plan).idle


def finished(config: Config, host: HostState, plan: StepPlan) -> HostState:
    """The state after a device that drew token 3."""
    result = StepResult(token_S=frozen([3]), logprob_S=frozen([-1.0], np.float32))
    return commit(config, host, plan, result)[0]


def test_a_row_of_digests_is_the_chain() -> None:
    """`lookup` stops at the first miss, whatever is cached behind it (12.3)."""
    digests = block_digests(b"\0" * 32, frozen(range(12)), 4)
    draft = BlockDraft(empty_blocks(3))
    blocks = draft.allocate(3)
    for block, digest in zip(blocks, digests, strict=True):
        draft.register(block, digest)
    draft.forget(blocks[1])
    assert draft.lookup(digests) == blocks[:1]
    assert draft.lookup(digests[2:]) == blocks[2:]
