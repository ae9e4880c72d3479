"""The state laws of multi_lora.md, section 21 (items 1 to 5 and 13 to 20), one function each, and
those of a plan in flight (design, section 3).

A law of a state takes a HostState; a law of a step takes the states before and after its plan was
made, and the plan. All assert and return nothing; `check_state` and `check_step` assert them all.
B block size, R rows of a plan.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from purestep.engine.config import Config, row_limit
from purestep.engine.policy import Order
from purestep.simulation.device import CELL, ToyDevice, context_of
from purestep.simulation.media import facts
from purestep.state.adapter_places import has_place, victims_for
from purestep.state.adapters import check_adapters, pinned_versions
from purestep.state.blocks import check_blocks, free_order, held_blocks
from purestep.state.checks import block_holders, check_rows, encoder_items
from purestep.state.encoder import check_encoder, i7_device_has_what_is_computed
from purestep.state.engine import HostState
from purestep.state.media import embed_runs, group_embeds, overlap_groups, rows_in_window
from purestep.state.plan import StepPlan
from purestep.state.request import Request, RequestState
from purestep.state.rows import chain

Contents = dict[bytes, tuple]


def check_state(
    config: Config, host: HostState, device: ToyDevice, before: HostState | None = None
) -> None:
    """Every law of one state. `before` is one that has passed: a law that reads only values which
    both have in common, the very same objects, is not asked again."""
    check_rows(host, config.block_size)
    if before is None or host.adapters is not before.adapters:
        law_1_places(host)
    law_4_rows_of_one_owner(host, device)
    if before is None or not _same_holders(host, before):
        law_18_references(host)
    if before is None or host.encoder is not before.encoder or host.encoder.holders:
        law_m_references_are_of_items_ahead(host)
    if not host.in_flight:
        i7_device_has_what_is_computed(host.encoder, device.encoded)
    law_20_no_hit_crosses_versions(host)
    law_in_flight_blocks_are_held(host)


def _same_holders(host: HostState, before: HostState) -> bool:
    """Whether all that `law_18_references` reads is the same."""
    parts = ("blocks", "copies", "departed")
    same = all(getattr(host, name) is getattr(before, name) for name in parts)
    return same and host.rows.tables is before.rows.tables


def check_step(
    config: Config, before: HostState, after: HostState, plan: StepPlan, order: Order
) -> None:
    """Every law of one step as it is planned, whose policy gave `order`."""
    check_plan(config, before, plan)
    law_2_used_is_active(before, plan)
    law_5_least_recently_used(config, before, after, plan)
    law_13_tokens_and_owners(config, before, plan)
    law_14_distinct_adapters(after)
    law_14_first_come_first_served(before, plan, order)
    law_14_last_come_first_preempted(before, after, plan, order)
    law_14_no_place_stays_empty(config, before, after, plan, order)
    law_15_base_is_never_delayed(before, plan, order)
    law_15_a_promise_is_kept(before, after)
    law_17_hits(config, before, plan)
    law_19_reuse_order(before, after)
    law_in_flight_nothing_is_handed_out(config, before, plan)
    law_in_flight_ids_are_the_rows_own(before, plan)
    law_m_budgets(config, plan)
    law_m_outputs_are_there(before, plan)
    law_m_what_is_needed_stays(after, plan)
    law_m_least_recently_released(before, after, plan)
    law_m_whole_items(config, before, plan)
    law_m_nobody_takes_from_the_first(config, before, after, plan, order)


def check_plan(config: Config, before: HostState, plan: StepPlan) -> None:
    """Limits of one step, and that it touches only what it may (9.4; design, section 3)."""
    assert len(plan.tokens_T) == plan.count_R.sum() <= config.max_batched_tokens
    assert len(plan.row_ids) <= config.max_rows
    assert (plan.count_R > 0).all()
    for key, end in zip(plan.row_ids, (plan.start_R + plan.count_R).tolist(), strict=True):
        request = before.requests[key].request
        limit = row_limit(config, before.requests[key]) - (request.sampling.max_tokens > 0)
        assert end <= limit, f"{key} computes token {end} of {limit} that are read"
    active = {place.version for place in plan.residents}
    lost, running = set(plan.overwrites.adapters), set(before.rows.versions)
    uploaded = [place.version for place in plan.uploads]
    assert len(set(uploaded)) == len(uploaded)
    assert lost & active <= set(uploaded) <= active
    if not plan.num_preempted and not plan.ended:
        assert not lost & running, "a running request's adapter was evicted"


def law_1_places(host: HostState) -> None:
    """21.1: active are the non-empty slots, no version twice; active are among the registered,
    neither are more than there is room for."""
    check_adapters(host.adapters)


def law_2_used_is_active(before: HostState, plan: StepPlan) -> None:
    """21.2: every adapter that a step uses is active in it, and no other takes part."""
    used = {before.requests[key].version for key in plan.row_ids} - {None}
    assert used == {place.version for place in plan.residents}


def law_3_pins_stay(before: HostState, after: HostState, kind: str) -> None:
    """21.3: what is pinned stays active and registered whatever happens (`kind` of event), until it
    is unpinned, unloaded or bound anew; a failed load changes nothing for adapters and rows."""
    old, new = before.adapters, after.adapters
    assert set(old.pins) <= set(new.pins) or kind in ("unload", "pin")
    for name in set(old.pins) & set(new.pins):
        version = old.names[name]
        if new.names[name] == version:
            assert version in new.registered
            lost = kind == "lose"  # the step that uploaded it
            assert version in new.resident or version not in old.resident or lost
    if kind == "load_fails":
        for part in ("names", "registered", "resident", "host_order", "device_order", "users"):
            assert getattr(old, part) == getattr(new, part)
        assert after.rows is before.rows
        assert after.blocks is before.blocks


def law_4_rows_of_one_owner(host: HostState, device: ToyDevice) -> None:
    """21.4: the rows of a resident adapter hold just its version, part after part, and nothing of
    who had them before."""
    for version, place in host.adapters.resident.items():
        held = [device.row_blocks.get(block) for block in place.row_blocks]
        assert held == [(version, part) for part in range(len(held))]


def law_5_least_recently_used(
    config: Config, before: HostState, after: HostState, plan: StepPlan
) -> None:
    """21.5, the trace of 9.3 as a rule: a step's adapters become the most recently used, all
    others keep their order, and who is evicted is the least recently used that may be."""
    old, new = before.adapters, after.adapters
    used = {place.version for place in plan.residents} | set(after.rows.versions)
    unused = [v for v in new.device_order if v not in used]
    assert list(new.device_order[: len(unused)]) == unused
    assert unused == [v for v in old.device_order if v in unused]
    evicted = {v for v in old.device_order if v not in new.resident and v in new.registered}
    evicted -= set(before.rows.versions)  # of rows that were preempted: another order of events
    if not evicted:
        return
    newest = max(old.device_order.index(v) for v in evicted)
    soon = {before.requests[key].version for key in before.waiting}
    promised = {v for r in (*old.reservations, *new.reservations) for v in r.victims}
    spared = used | soon | promised | pinned_versions(old) | set(before.rows.versions)
    spared |= {place.version for flying in before.in_flight for place in flying.residents}
    older = {v for v in old.device_order[:newest] if v in new.registered}
    assert older <= evicted | spared, "an adapter was evicted before a less recently used one"


def law_13_tokens_and_owners(config: Config, before: HostState, plan: StepPlan) -> None:
    """21.13: as many tokens as the rows count, as many draws as rows draw, and each row's slot is
    its owner's."""
    assert len(plan.tokens_T) == plan.count_R.sum()
    drawn = int(plan.sampled_R.sum())
    columns = (plan.sampling.stream_S, plan.sampling.position_S, plan.sampling.temperature_S)
    assert all(len(column) == drawn for column in columns)
    slot_of = {place.version: place.slot for place in plan.residents}
    owners = [before.requests[key].version for key in plan.row_ids]
    assert plan.slot_R.tolist() == [slot_of.get(v, -1) for v in owners]
    ends = (plan.start_R + plan.count_R)[plan.sampled_R]
    assert plan.sampling.position_S.tolist() == ends.tolist()
    blocks_R = -(-(plan.start_R + plan.count_R) // config.block_size)
    assert [len(table) for table in plan.tables] == blocks_R.tolist()


def law_14_distinct_adapters(host: HostState) -> None:
    """21.14: the distinct adapters of all running requests, and the pinned ones that are resident
    beside them, fit the slots."""
    ledger = host.adapters
    running = set(host.rows.versions) - {None}
    assert len(running | (pinned_versions(ledger) & set(ledger.resident))) <= ledger.num_slots


def law_14_first_come_first_served(before: HostState, plan: StepPlan, order: Order) -> None:
    """21.14: among the requests of one adapter those in front are admitted first."""
    admitted, ended = set(plan.row_ids), {completion.key for completion in plan.ended}
    left: set[str | None] = set()
    for key in order.waiting:
        record = before.requests[key]
        if record.loading or key in ended or _lacks_outputs(before, key):
            continue
        if key not in admitted:
            left.add(record.version)
        assert key not in admitted or record.version not in left, f"{key} went first"


def law_14_last_come_first_preempted(
    before: HostState, after: HostState, plan: StepPlan, order: Order
) -> None:
    """21.14 for those who leave: rows make room from the end of the order, but for those that make
    way for a promised adapter, and wait in front in their order."""
    front = after.waiting[: plan.num_preempted]
    assert front == tuple(key for key in order.running if key in front), "preempted out of turn"
    promised = {v for r in before.adapters.reservations for v in r.victims}
    leaves = {*front, *(completion.key for completion in plan.ended)}
    left = [key in leaves for key in order.running if before.requests[key].version not in promised]
    assert left == sorted(left), "a row left before one that came later"


def law_14_no_place_stays_empty(
    config: Config, before: HostState, after: HostState, plan: StepPlan, order: Order
) -> None:
    """21.14 for those who wait: while rows, tokens, blocks and a place for its adapter are left
    behind a step, nobody was passed over. With a quota, a promise or a copy that is still to be
    made others may have a right to these; media may wait for an encoding, and where items may not
    be split nobody comes in behind one that waits for tokens."""
    if config.disable_chunked_mm_input:
        return
    full = len(after.rows.ids) == config.max_rows or len(plan.tokens_T) == config.max_batched_tokens
    leaving = [key for key in after.waiting[: plan.num_preempted] if not _makes_way(before, key)]
    if full or leaving or before.copies or after.adapters.reservations:
        return
    over = {*plan.row_ids, *(completion.key for completion in plan.ended)}
    for key in order.waiting:
        record = before.requests[key]
        if key in over or record.loading:
            continue
        num_tokens = len(record.request.tokens) + len(record.generated)
        if record.request.features or -(-num_tokens // config.block_size) > after.blocks.num_free:
            return
        if record.version is None or not config.adapter_block_quota:
            assert not _finds_place(after, record.version), f"{key} waits beside an empty place"


def _makes_way(before: HostState, key: str) -> bool:
    """Whether a row that was preempted left for a promised adapter, and not for want of blocks."""
    rows, row = before.rows, before.rows.ids.index(key)
    promised = {v for promise in before.adapters.reservations for v in promise.victims}
    return rows.versions[row] in promised and rows.num_tokens_R[row] > rows.num_known_R[row]


def _finds_place(after: HostState, version: str | None) -> bool:
    """Whether an adapter is there behind a step, or could come without harm to anybody's."""
    if version is None or version in after.adapters.resident:
        return True
    used = {place.version for plan in after.in_flight for place in plan.residents}
    used |= set(after.rows.versions)
    return victims_for(after.adapters, version, used) is not None


def law_15_base_is_never_delayed(before: HostState, plan: StepPlan, order: Order) -> None:
    """21.15: nobody who stands behind a request of the base model is admitted before it."""
    admitted, ended = set(plan.row_ids), {completion.key for completion in plan.ended}
    waits = [key for key in order.waiting if key not in ended and not before.requests[key].loading]
    waits = [key for key in waits if not _lacks_outputs(before, key)]
    base = [key not in admitted and before.requests[key].version is None for key in waits]
    if any(base):
        assert not admitted & set(waits[base.index(True) :]), "a base request was overtaken"


def law_15_a_promise_is_kept(before: HostState, after: HostState) -> None:
    """21.15, what bounds the wait (11.3): while a promise stands (one that a pin makes impossible,
    or that yields, is made anew), the rows that its place waits for do not become more, and no
    adapter but those that have a promise comes in."""
    promises = before.adapters.reservations
    standing = [p for p in promises if any(p is now for now in after.adapters.reservations)]
    for promise in standing:
        for victim in promise.victims:
            had, has = before.rows.versions.count(victim), after.rows.versions.count(victim)
            assert has <= had, f"{victim} got a new row before {promise.version} came in"
    if standing:
        came = set(after.adapters.resident) - set(before.adapters.resident)
        assert came <= {p.version for p in promises}, "another adapter came in before the promised"


def law_15_bounded_wait(due: dict[str, int], before: HostState, after: HostState) -> int:
    """21.15 in numbers (11.3; derived in `engine/admission.py`), where blocks and rows suffice and
    a prompt takes one step: a promise is kept at the latest when the rows it waits for have run
    out. `due` remembers, from step to step, the last step for each version. Returns how many came
    in: also one that a later promise takes away again in the very step in which its request became
    a row, since that row is what it was promised; and such a row may have ended with that step, so
    what tells of it is that its request waits no more."""
    waited_for: set[str] = set()  # by a promise and those before it
    for promise in after.adapters.reservations:
        waited_for.update(promise.victims)
        if not any(promise is known for known in before.adapters.reservations):
            run = 1 + longest_run(after, waited_for)  # and this step's
            due.setdefault(promise.version, before.step + run)
    promises = after.adapters.reservations
    admitted = set(before.waiting) - set(after.waiting)
    served = {before.requests[key].version for key in admitted}
    came = [v for v in due if v in served or has_place(after.adapters, promises, v)]
    for version in came:
        assert before.step <= due.pop(version), f"the promise to {version} was kept too late"
    return len(came)


def longest_run(host: HostState, versions: set[str]) -> int:
    """Steps until no row of these versions is left, where each draws a token a step."""
    left_R = (host.rows.limit_R - host.rows.num_tokens_R).tolist()
    mine = [left for left, v in zip(left_R, host.rows.versions, strict=True) if v in versions]
    return max(mine, default=0)


def law_16_keys_are_contents(
    config: Config,
    record: RequestState,
    sequence: Sequence[int],
    request: Request,
    known: Contents,
    names: dict,
) -> None:
    """21.16: equal keys if and only if equal weights, adapter version, salt, tokens, embeddings and
    placeholders up to the block's end. `known` and `names` are all keys and contents met so far;
    `sequence` is what the caller knows of the request's tokens."""
    who = (config.kv_identity, record.version, record.request.salt)
    for k, digest in enumerate(record.digests, start=1):
        end = k * config.block_size
        content = (*who, facts(request, end), *sequence[:end])
        assert known.setdefault(digest, content) == content, "two contents have one key"
        assert names.setdefault(content, digest) == digest, "one content has two keys"


def law_17_hits(config: Config, before: HostState, plan: StepPlan) -> None:
    """21.17: a hit is whole blocks and leaves the last token to be computed."""
    running = set(before.rows.ids)
    starts = zip(plan.row_ids, plan.start_R.tolist(), strict=True)
    hits = {key: start for key, start in starts if key not in running}
    assert sum(hits.values()) == plan.num_hit_tokens
    for key, start in hits.items():
        record = before.requests[key]
        known = len(record.request.tokens) + len(record.generated)
        assert start % config.block_size == 0
        assert start <= known - 1


def law_18_references(host: HostState) -> None:
    """21.18: reference counts are the number of holders; a block without one is in the free queue,
    no other is."""
    check_blocks(host.blocks, block_holders(host))


def law_19_reuse_order(before: HostState, after: HostState) -> None:
    """21.19: blocks without a key at the head, then the least recently released, the tail of a
    chain before its head; of an adapter that has its quota, among its own."""
    old, new = before.blocks, after.blocks
    assert not any(s < 0 and b in new.digest_of for s, b in new.queue.items())
    for row, key in enumerate(before.rows.ids):
        if key in after.rows.ids:
            continue
        digests = chain(before.rows, row, before.requests[key])
        held = zip(before.rows.tables[row].tolist(), digests, strict=False)
        freed = [b for b, d in held if old.holders(b) == 1 and new.digest_of.get(b) == d]
        stamps = [new.stamp_of[b] for b in freed if b in new.stamp_of]
        assert all(a > b for a, b in pairwise(stamps)), "the head of a chain goes before its tail"
    queued = [b for b in free_order(old) if b in old.digest_of]
    lost = {b for b in queued if new.digest_of.get(b) != old.digest_of[b]}
    owned = lost.intersection(old.owner_of)  # their owner may take them out of turn
    lines = [(queued, lost - owned)]
    for owner in {old.owner_of[b] for b in owned}:
        line = [b for b in queued if old.owner_of.get(b) == owner]
        lines.append((line, owned.intersection(line)))
    for line, taken in lines:
        newest = max((line.index(b) for b in taken), default=0)
        for block in line[:newest]:
            moved = new.holders(block) or new.stamp_of.get(block) != old.stamp_of[block]
            assert block in lost or moved, "a block was reused before one released earlier"


def law_19_cached_is_computed(
    config: Config, host: HostState, device: ToyDevice, known: Contents, cells: dict[bytes, bytes]
) -> None:
    """21.19, output with cache is output without: a block that can be found holds just the KV that
    its key's content alone gives. `cells` remembers that KV from call to call."""
    size = config.block_size * CELL
    for digest, block in host.blocks.block_of.items():
        if digest not in cells and digest in known:
            _, version, _, _, *tokens = known[digest]
            cells[digest] = context_of(tokens, config.weights, version)[-size:]
        wanted = cells.get(digest)
        assert wanted in (None, device.blocks.get(block)), f"block {block} holds something else"


def law_20_no_hit_crosses_versions(host: HostState) -> None:
    """21.20: what a row holds under a key is its own chain, of its own adapter's version; and all
    blocks before one that has a key have one, or never had."""
    for row, key in enumerate(host.rows.ids):
        digests = chain(host.rows, row, host.requests[key])
        for k, block in enumerate(host.rows.tables[row].tolist()):
            found = host.blocks.digest_of.get(block)
            assert found is None or digests[k] == found, f"{key} holds another's block {block}"


def law_in_flight_blocks_are_held(host: HostState) -> None:
    """A block that a plan in flight reads or writes is held until its commit, whoever leaves."""
    for plan in host.in_flight:
        named = {block for table in plan.tables for block in table.tolist()}
        named |= {block for copy in plan.copies for block in copy}
        free = named - set(held_blocks(host.blocks))
        assert not free, f"blocks {sorted(free)} are free, and step {plan.step} still uses them"


def law_in_flight_nothing_is_handed_out(config: Config, before: HostState, plan: StepPlan) -> None:
    """No block and no adapter row that a plan in flight uses is handed out by another."""
    size = config.block_size
    first_R = (-(-plan.start_R // size)).tolist()
    new = {b for table, k in zip(plan.tables, first_R, strict=True) for b in table[k:].tolist()}
    for flying in before.in_flight:
        named = {block for table in flying.tables for block in table.tolist()}
        named |= {block for copy in flying.copies for block in copy}
        assert not new & named, f"blocks {sorted(new & named)} are in flight and handed out"
        for place in plan.uploads:
            for other in flying.residents:
                assert place.slot != other.slot, f"slot {place.slot} is in flight and handed out"
                shared = set(place.row_blocks) & set(other.row_blocks)
                assert not shared, f"row blocks {sorted(shared)} are in flight and handed out"


def law_in_flight_ids_are_the_rows_own(before: HostState, plan: StepPlan) -> None:
    """An id that nobody knows yet is taken from the row's own draw in the plan in flight, and only
    such an id is."""
    drawn: list[str] = []
    for flying in before.in_flight:
        rows = zip(flying.row_ids, flying.sampled_R.tolist(), strict=True)
        drawn = [key for key, draws in rows if draws]
    gone = {key for _, key, _ in before.departed}
    ends = np.cumsum(plan.count_R) - 1
    for key, end in zip(plan.row_ids, ends.tolist(), strict=True):
        known = key not in before.rows.ids or key in gone or key not in drawn
        place = int(plan.gathered_T[end])
        assert place == (-1 if known else drawn.index(key)), f"{key} takes another row's token"
        assert known or plan.tokens_T[end] == -1
    assert (plan.gathered_T >= 0).sum() == (plan.gathered_T[ends] >= 0).sum()


def law_m_budgets(config: Config, plan: StepPlan) -> None:
    """A step encodes within its budget, nothing twice, and nothing if no row merges any."""
    names = [item.identifier for item in plan.encodes]
    assert len(set(names)) == len(names)
    assert sum(item.num_embeds for item in plan.encodes) <= config.max_encoder_tokens
    assert plan.merges or not names, "encoded for nobody"


def law_m_outputs_are_there(before: HostState, plan: StepPlan) -> None:
    """Each output that a step merges is there before it and not dropped, or encoded by it; and none
    is encoded that is there and stays."""
    there = {name for name, output in before.encoder.outputs.items() if output.computed}
    there |= {item.identifier for flying in before.in_flight for item in flying.encodes}
    there &= set(before.encoder.outputs)
    there -= set(plan.drops)
    made = {item.identifier for item in plan.encodes}
    used = {span.identifier for span in plan.merges}
    assert used <= there | made, f"no output: {sorted(used - there - made)}"
    assert not made & there, f"encoded again: {sorted(made & there)}"


def law_m_what_is_needed_stays(
    after: HostState, plan: StepPlan, gone: Collection[str] = ()
) -> None:
    """A row that stops within an item refers to its output, if the cache could hold that at all: as
    soon as the step is planned, and still when it has landed. `gone` are those whose rows have left
    since."""
    ends = (plan.start_R + plan.count_R).tolist()
    for key, start, end in zip(plan.row_ids, plan.start_R.tolist(), ends, strict=True):
        if key not in after.rows.ids or key in gone:
            continue
        features = after.requests[key].features
        for group in overlap_groups(features):
            if group_embeds(features, group) > after.encoder.capacity:
                continue
            for i in group:
                first, last = rows_in_window(features[i], start, end)
                if first < last and features[i].end > end:
                    holders = after.encoder.holders.get(features[i].identifier, ())
                    assert (key, i) in holders, f"{key} let go of item {i}"


def law_m_least_recently_released(before: HostState, after: HostState, plan: StepPlan) -> None:
    """Of outputs that nobody needs those go first that were released first.

    A row that finds an output and is preempted in the same step has released it last of all, as
    one that held it for longer has: it comes back first, and will look for it again.
    """
    order, gone = before.encoder.evictable, set(plan.drops)
    used = {span.identifier for span in plan.merges} | set(after.encoder.holders)
    for key, computed in zip(before.rows.ids, before.rows.num_computed_R.tolist(), strict=True):
        if key not in after.rows.ids:
            features = before.requests[key].features
            used |= {feature.identifier for feature in features if feature.end > computed}
    places = [k for k, name in enumerate(order) if name in gone]
    older = set(order[: places[-1]]) if places else set()
    assert older <= gone | used, f"{sorted(older - gone - used)} were released before"


def law_m_references_are_of_items_ahead(host: HostState) -> None:
    """I1 to I6; and who refers to an item has tokens of it still to compute."""
    check_encoder(host.encoder, encoder_items(host))
    computed = dict(zip(host.rows.ids, host.rows.num_computed_R.tolist(), strict=True))
    for flying in host.in_flight[:1]:  # they let go as it lands
        computed |= zip(flying.row_ids, flying.start_R.tolist(), strict=True)
    for holders in host.encoder.holders.values():
        for key, i in holders:
            end = host.requests[key].features[i].end
            assert computed[key] < end, f"{key} refers to item {i}, which it has passed"


def law_m_whole_items(config: Config, before: HostState, plan: StepPlan) -> None:
    """Where items may not be split no step begins or ends within one."""
    if not config.disable_chunked_mm_input:
        return
    ends = (plan.start_R + plan.count_R).tolist()
    for key, start, end in zip(plan.row_ids, plan.start_R.tolist(), ends, strict=True):
        features = before.requests[key].features
        for group in overlap_groups(features):
            runs = [run for i in group for run in embed_runs(features[i])]
            first, last = min(run[0] for run in runs), max(run[1] for run in runs)
            assert not first < start <= last, f"{key} begins within an item"
            assert not first < end <= last, f"{key} stops within an item"


def law_m_nobody_takes_from_the_first(
    config: Config, before: HostState, after: HostState, plan: StepPlan, order: Order
) -> None:
    """Behind whoever waits for an encoding nothing is encoded for others."""
    first = _first_without_encoding(config, before, after, plan, order)
    if first is None:
        return
    line = [*order.running, *order.waiting]
    behind = set(line[line.index(first) + 1 :])
    spots = np.repeat(np.arange(len(plan.row_ids)), plan.count_R)
    served = {s.identifier for s in plan.merges if plan.row_ids[spots[s.index_E[0]]] not in behind}
    wanted = {
        features.identifier
        for key in plan.row_ids
        if key not in behind
        for features in before.requests[key].features
    }
    made = {item.identifier for item in plan.encodes}
    assert made <= served | wanted, f"{first} waits, and {sorted(made - served)} are encoded"


def _first_without_encoding(
    config: Config, before: HostState, after: HostState, plan: StepPlan, order: Order
) -> str | None:
    """Who certainly gets less than there is room for since an encoding is missing: a row that stops
    in its prompt with tokens of the step left, or a request that is passed over, has a place for
    its adapter and needs an output that nobody holds. None also where other reasons are possible.
    """
    rows, ended = before.rows, {completion.key for completion in plan.ended}
    left = config.max_batched_tokens - len(plan.tokens_T)
    if left and not (config.disable_chunked_mm_input or plan.num_preempted or ended):
        counts = dict(zip(plan.row_ids, plan.count_R.tolist(), strict=True))
        chunk = config.long_prefill_threshold or config.max_batched_tokens
        for key in order.running:
            row = rows.ids.index(key)
            inside = rows.num_computed_R[row] < rows.media_end_R[row]
            rest = int(rows.num_tokens_R[row] - rows.num_computed_R[row])
            if inside and counts.get(key, 0) < min(rest, chunk):
                return key
    admitted = [key for key in order.waiting if key in plan.row_ids]
    if not admitted:
        return None
    passed = order.waiting[: order.waiting.index(admitted[-1])]
    promises = before.adapters.reservations or after.adapters.reservations
    for key in passed:
        record = before.requests[key]
        if key in plan.row_ids or key in ended or record.loading:
            continue
        known = record.version is None or not (promises or config.adapter_block_quota)
        if known and _finds_place(after, record.version) and _lacks_outputs(before, key):
            return key
    return None


def _lacks_outputs(before: HostState, key: str) -> bool:
    """Whether a request may have to wait for an encoding: an output that nobody holds may give its
    place to another in the very step."""
    features = before.requests[key].features
    return any(f.num_embeds and f.identifier not in before.encoder.holders for f in features)
