"""Deliberate bugs of the engine, to see that the simulation catches them.

A bug is a piece of a function's source and what stands there instead. It is compiled in memory and
put into the function itself, so that everyone who has imported the function gets it; no file
changes, and the function is whole again afterwards.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from purestep.engine.branch import _child
from purestep.engine.commit import _filled_blocks, _not_kept, _without, commit
from purestep.engine.drawn import _next_digest
from purestep.engine.encoding import Encoding, _encoded_item, settled
from purestep.engine.ends import faulty_rows
from purestep.engine.media import plan_positions
from purestep.engine.new_row import prefix_hits, start_row
from purestep.engine.planning import _gathered, _sampling, _step_tokens, make_plan
from purestep.engine.quota import quota_room
from purestep.engine.renewal import _rebound, _recomputed
from purestep.engine.requests import abort_host, bind
from purestep.engine.running import _make_room, _served, serve_running
from purestep.engine.schedule import _lengthened, schedule
from purestep.engine.step import without_flown, without_overwritten
from purestep.engine.waiting import Queue
from purestep.simulation.events import ROOMY
from purestep.simulation.longrun import Failure, World, random_world, run_random
from purestep.state.adapter_places import activate, slot_of, victims_for
from purestep.state.blocks import BlockDraft
from purestep.state.encoder import hold, shrunk
from purestep.state.hashing import block_digests, chain_root
from purestep.state.in_flight import plan_places, released
from purestep.state.media import _feature_key, embed_indices, extra_keys, gather_plan
from purestep.state.rows import completed_record, make_row

STEPS_OF_ONE_STATE = 150  # many configs: what an item's bug needs is not in every one


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug: its name, and (function, source, source with the bug) for each place it changes. It is
    tried in random worlds; where it shows in few of them, in such that have `policy` and `config`.
    """

    name: str
    patches: tuple[tuple[Callable, str, str], ...]
    policy: str | None
    config: dict[str, Any]


def mutant(
    name: str,
    function: Callable,
    old: str,
    new: str,
    *more: tuple,
    policy: str | None = None,
    **config: Any,
) -> Mutant:
    return Mutant(name, ((function, old, new), *more), policy, config)


MUTANTS = (
    mutant(
        "a block's key leaves out its last token",
        block_digests,
        "ids[block * size : (block + 1) * size]",
        "ids[block * size : (block + 1) * size - 4]",
    ),
    mutant(
        "a shared block gets no second reference",
        BlockDraft.retain,
        "self.shared[block] = self.shared.get(block, 1) + 1",
        "pass",
    ),
    mutant(
        "only the first row block is uploaded, the others keep what they held",
        make_plan,
        "tuple(p for p in residents",
        'tuple(__import__("dataclasses").replace(p, row_blocks=p.row_blocks[:1])'
        " for p in residents",
    ),
    mutant(
        "base rows are counted to the first adapter's group",
        slot_of,
        "-1 if version is None else",
        "min((r.slot for r in ledger.resident.values()), default=-1) if version is None else",
    ),
    mutant(
        "all adapters have one chain root",
        chain_root,
        'framed("lora", adapter_version.encode())',
        'framed("lora")',
    ),
    mutant(
        "an adapter's chain root is the base model's",
        chain_root,
        'framed("base") if adapter_version is None',
        'framed("base") if True',
    ),
    mutant(
        "the salt is ignored",
        chain_root,
        'framed("unsalted") if salt is None',
        'framed("unsalted") if True',
    ),
    mutant(
        "a generated block is hashed behind the root",
        _next_digest,
        "(generated or prompt or (record.root,))[-1]",
        "record.root",
    ),
    mutant(
        "a hit includes the last token",
        prefix_hits,
        "_num_tokens(record) - 1",
        "_num_tokens(record)",
    ),
    mutant("a block stays findable once reallocated", BlockDraft._pop, "self.forget(block)", ""),
    mutant(
        "the copy of a branch's block is forgotten",
        schedule,
        "copies=copies,",
        "copies=(),",
    ),
    mutant(
        "a preempted request keeps a block too many as computed",
        start_row,
        "computed = len(hits) * B",
        "computed = len(hits) * B\n"
        "    computed += B * (record.num_preemptions > 0 and computed + B < _num_tokens(record))",
    ),
    mutant(
        "a promised place is taken by others",
        Queue._victims,
        "return None if version in promised else ()",
        "return ()",
    ),
    mutant(
        "pins are ignored",
        victims_for,
        "{*protected, *pinned_versions(ledger)}",
        "{*protected}",
    ),
    mutant(
        "the source of a copy is handed out before it is read",
        schedule,
        "draft, encoding = BlockDraft(host.blocks), Encoding(config, host.encoder)",
        "draft, encoding = BlockDraft(host.blocks), Encoding(config, host.encoder)\n"
        "    [draft.release([s]) for s, _ in host.copies]",
        (schedule, "for source, _ in copies]", "for source, _ in ()]"),
    ),
    mutant(
        "blocks of a row that leaves are free while a plan in flight uses them",
        released,
        "if key in ids:",
        "if False:",
    ),
    mutant(
        "an unknown id is taken from the row beside",
        _gathered,
        "drawn_R[rows]",
        "np.roll(drawn_R[rows], 1)",
    ),
    mutant(
        "a stopped row's token is kept: the next request of its name gets it",
        plan_places,
        "row_of.pop(key, None)",
        "pass",
    ),
    mutant(
        "a row that stops is planned on and told twice",
        _without,
        "rows=take_rows(rows, np.flatnonzero(stays)),",
        "rows=rows,",
    ),
    mutant(
        "a block is findable before its last id is known",
        serve_running,
        "fills_R &= drawn_R < 0",
        "pass",
    ),
    mutant(
        "a block that is filled in flight gets another block's key",
        _filled_blocks,
        "length // config.block_size - 1",
        "length // config.block_size - 2",
    ),
    mutant(
        "an adapter that a plan in flight reads is evicted",
        Queue._victims,
        "self.counts.keys() | self._flying",
        "self.counts.keys()",
    ),
    mutant(
        "an adapter that was dropped while a plan in flight reads it leaves its place",
        _lengthened,
        "for place in flying.residents:",
        "for place in ():",
        max_active_adapters=1,
        adapter_age_limit=0,
        max_encoder_tokens=0,
    ),
    mutant(
        "a row is planned beyond its last token",
        _served,
        "service = service[~ending_R[service]]",
        "pass",
    ),
    mutant(
        "a penalty does not count the token in flight",
        _lengthened,
        "drawn & rows.edited_R &",
        "drawn & False &",
    ),
    mutant(
        "rows are preempted while a plan in flight uses their blocks",
        _make_room,
        "if host.in_flight:",
        "if False:",
    ),
    mutant(
        "what a lost step should have written is still found",
        without_flown,
        "draft.forget(block)",
        "pass",
    ),
    mutant(
        "an adapter that a lost step should have uploaded counts as there",
        without_flown,
        "adapters = evict(adapters, version)",
        "pass",
    ),
    mutant(
        "an end that a lost step should have told is forgotten",
        without_flown,
        "(*plan.ended, *host.ended)",
        "host.ended",
    ),
    mutant(
        "a chain is released head first",
        BlockDraft.release,
        "reversed([int(b) for b in blocks])",
        "[int(b) for b in blocks]",
    ),
    mutant(
        "an aborted row keeps its last block",
        abort_host,
        "[rows.tables[row]]",
        "[rows.tables[row][:-1]]",
    ),
    mutant(
        "a decoding row reads the token beside its own",
        _step_tokens,
        "_gaps(rows.newest_R, gathered_T)",
        "_gaps(np.roll(rows.newest_R, 1), gathered_T)",
    ),
    mutant(
        "the noise is of the position before",
        _sampling,
        "position_S=drawing.num_tokens_R",
        "position_S=drawing.num_tokens_R - 1",
    ),
    mutant(
        "a branch draws its parent's noise",
        _child,
        "random_stream(parent.seed, parent.index, path)",
        "random_stream(parent.seed, parent.index, parent.branch_path)",
    ),
    mutant(
        "stops count one token late",
        make_row,
        "num_prompt + sampling.min_tokens,",
        "num_prompt + sampling.min_tokens + 1,",
    ),
    mutant(
        "an adapter in use is evicted",
        victims_for,
        "{*protected, *pinned_versions(ledger)}",
        "{*pinned_versions(ledger)}",
    ),
    mutant(
        "two adapters share row blocks",
        activate,
        "tuple(free_row_blocks(ledger)[: info.num_row_blocks])",
        "tuple(range(info.num_row_blocks))",
    ),
    mutant(
        "embeddings are left out of a block's key",
        block_digests,
        'extras[block] if block < len(extras) else b""',
        'b""',
    ),
    mutant("a hit goes on behind a gap", BlockDraft.lookup, "break", "continue"),
    mutant(
        "what a failed step overwrote is still found",
        without_overwritten,
        "draft.forget(block)",
        "pass",
    ),
    mutant(
        "rows that a failed step hurt go on",
        without_overwritten,
        "if not gone.isdisjoint(table.tolist()) or",
        "if",
    ),
    mutant(
        "blocks are keyed as before once the weights are others",
        _rebound,
        "record = bind(config, ledger, record, record.version)",
        "pass",
    ),
    mutant(
        "encoder rows are taken one too far",
        gather_plan,
        "embed_indices(feature, low, high)[0]",
        "embed_indices(feature, low, high)[0] + 1",
    ),
    mutant(
        "a chunk within an item begins with the item's first row",
        gather_plan,
        "embed_indices(feature, low, high)[0]",
        "0",
    ),
    mutant(
        "places without a row are counted as rows",
        embed_indices,
        "first = int(np.count_nonzero(feature.is_embed[:start]))",
        "first = start",
    ),
    mutant(
        "a row lets go of the item that it stands in",
        settled,
        "holds_of(record, end)",
        "holds_of(record)",
    ),
    mutant(
        "the most recently released output goes first",
        shrunk,
        "for identifier in ledger.evictable if",
        "for identifier in reversed(ledger.evictable) if",
    ),
    mutant(
        "an output goes that a row still needs",
        shrunk,
        "for identifier in ledger.evictable if",
        "for identifier in sorted(ledger.outputs) if",
    ),
    mutant(
        "the reference of a row that ends is forgotten",
        settled,
        "dict.fromkeys(left)",
        "{}",
        max_encoder_tokens=15,
        encoder_cache_tokens=30,
        long_prefill_threshold=3,
    ),
    mutant(
        "the reference of a preempted row is forgotten",
        Encoding.leave,
        "let_go(self.ledger, holds_of(record))",
        "self.ledger",
    ),
    mutant(
        "the encoding of a preempted row is taken for done",
        Encoding.leave,
        "del self._encodes[name]",
        "del self._encodes[name]; self.ledger = planned(self.ledger, name, item.num_embeds)",
    ),
    mutant(
        "an adapter that changes the tower gets the base model's outputs",
        bind,
        "encoder_version=encoder_version(ledger, version),",
        "encoder_version=None,",
    ),
    mutant(
        "an item is encoded without its adapter",
        _encoded_item,
        "version=record.encoder_version,",
        "version=None,",
    ),
    mutant(
        "a second reference to an output replaces the first",
        hold,
        "tuple(sorted((*holders, holder)))",
        "(holder,)",
    ),
    mutant(
        "the device is not told what to drop",
        make_plan,
        "        drops=drops,",
        "        drops=(),",
    ),
    mutant(
        "a failed step's drops are not taken back",
        without_overwritten,
        "lost.outputs)",
        "())",
    ),
    mutant(
        "outputs of the old weights are used with the new ones",
        _recomputed,
        "dropped(host.encoder, sorted(host.encoder.outputs))",
        "host.encoder",
    ),
    mutant(
        "where an item begins is left out of the key",
        extra_keys,
        "(f.offset - start, f.length, _feature_key(f))",
        "(0, f.length, _feature_key(f))",
    ),
    mutant(
        "only the first of the items in a block is in its key",
        extra_keys,
        "for offset, length, k in found",
        "for offset, length, k in found[:1]",
    ),
    mutant(
        "the places without a row are left out of the key",
        _feature_key,
        "feature.is_embed.tobytes()",
        'b""',
    ),
    mutant(
        "an item's identifier is left out of the key",
        _feature_key,
        "feature.identifier.encode()",
        'b""',
    ),
    mutant(
        "media of the prompt move no position behind it",
        plan_positions,
        "rows.num_computed_R + rows.delta_R - first_R",
        "rows.num_computed_R - first_R",
    ),
    mutant(
        "whoever comes later takes the encoder's budget first",
        Encoding._note,
        'self._closed |= choice.short_of == "encoder"',
        "pass",
        max_encoder_tokens=9,
        encoder_cache_tokens=4,
        **ROOMY,
    ),
    mutant(
        "the last in the queue is served first",
        Queue.__init__,
        "enumerate(order.waiting)",
        "enumerate(reversed(order.waiting))",
    ),
    mutant(
        "the first row makes room for the others",
        _make_room,
        "row = remaining.pop()",
        "row = remaining.pop(0)",
    ),
    mutant(
        "an adapter at its quota takes what others have cached",
        BlockDraft._pop_for,
        "if idle and self.owned[owner] >= self.quota:",
        "if False:",
    ),
    mutant(
        "rows that will grow are left out of a quota",
        quota_room,
        "growth += last - int(rows.tables.length_R[row])",
        "growth += 0",
    ),
    mutant(
        "who was skipped is not asked again once a place opens",
        Queue.look_again,
        "self._asks_again = True",
        "self._asks_again = False",
        policy="by_priority",
        max_active_adapters=2,
        adapter_age_limit=3,
        adapter_block_quota=0,
        max_encoder_tokens=0,
        **ROOMY,
    ),
    mutant(
        "rows that make way count as waiting, so the queue is left too early",
        Queue.__init__,
        "n - rows[v]",
        "n - self.counts[v]",
        policy="fcfs",
        adapter_preemption=True,
        adapter_age_limit=3,
        adapter_block_quota=0,
        max_active_adapters=2,
        max_encoder_tokens=0,
        **ROOMY,
    ),
    mutant(
        "what a row wrote whose logits are not finite is still found",
        _without,
        "for row in untrusted_rows(ends):",
        "for row in ():",
    ),
    mutant(
        "what left in flight is found though something in its step went wrong",
        _without,
        "if doubt else ()",
        "if False else ()",
        max_encoder_tokens=15,
        encoder_cache_tokens=30,
    ),
    mutant(
        "an output of another size ends nobody whose encoder has an adapter",
        faulty_rows,
        ".features",
        ".request.features",
        max_encoder_tokens=15,
        encoder_cache_tokens=30,
    ),
    mutant(
        "an output of another size is kept for whoever comes next",
        _not_kept,
        " in wrong",
        " in ()",
        max_encoder_tokens=15,
        encoder_cache_tokens=30,
    ),
    mutant(
        "a row whose logits are not finite goes on",
        commit,
        " & np.isfinite(logprob_S)",
        "",
    ),
    mutant(
        "the end of a preempted row's tokens is forgotten",
        completed_record,
        "np.concatenate((record.generated, *tokens))",
        "np.concatenate((record.generated, *tokens[:-1], tokens[-1][:-1]))",
    ),
)


@contextmanager
def applied(bug: Mutant) -> Iterator[None]:
    """The engine with a bug, as long as the context lasts."""
    functions = {function: function.__code__ for function, _, _ in bug.patches}
    try:
        for function in functions:
            source = textwrap.dedent(inspect.getsource(function))
            for target, old, new in bug.patches:
                if target is function:
                    assert source.count(old) == 1, f"{bug.name}: {old!r} stands not once"
                    source = source.replace(old, new)
            names = dict(function.__globals__)
            exec(compile(source, inspect.getfile(function), "exec"), names)
            function.__code__ = names[function.__name__].__code__
        yield
    finally:
        for function, code in functions.items():
            function.__code__ = code


def caught(bug: Mutant, num_steps: int, seed: int, *, laws: bool) -> tuple[str, int] | None:
    """(what caught the bug, in how many events), or None. The output law is called `output law`,
    another law by its name, an exception of the engine by its class."""
    with applied(bug):
        for number in range(-(-num_steps // STEPS_OF_ONE_STATE)):
            rng, world = np.random.default_rng((seed, number)), random_world(seed, number)
            policy, config = bug.policy or world.policy, world.config | bug.config
            world = World(config=config, policy=policy)
            try:
                run_random(world, rng, STEPS_OF_ONE_STATE, laws=laws, keep=0)
            except Failure as failure:
                return failure.law, len(failure.events) + number * STEPS_OF_ONE_STATE
    return None
