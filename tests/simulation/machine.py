"""An engine on the toy device and a caller who knows what it must say: fed with events as data.

An event is `(kind, arguments)` in plain JSON types, so that a list of them is a run that anyone can
store, shorten and repeat. Whom an event means is a number counted round those there are; an event
that has no object does nothing, so any part of a list is a run too.

| event | arguments |
|---|---|
| `submit` | `id`, `tokens`, `embeds` (number of them), `media`, `sampling`, fields of Request |
| `step`, `ahead` | a step, or the rest of the one in flight; one that leaves a plan in flight |
| `fail` | a step whose execute raises after it has written, then recovery |
| `lose` | the step in flight is lost, with one `behind` it or not, then recovery |
| `spoil` | in the step that lands next the logits of a row (`pick`) are not finite |
| `misfit` | in the step that lands next an output (`pick`) is not as long as requests say |
| `abort`, `branch` | `pick`; `pick`, `count` |
| `register`, `load` | `name`; `name`, `version`, `again` (from a file, or from tensors) |
| `load_returns`, `load_fails` | `pick` among the loads asked for, `version`; `pick` |
| `unload`, `pin` | `name`, `running`; `name` (or unpin it) |
| `flush`, `adopt` | forget cached prefixes; other `weights` |
| `restore`, `fork` | through canonical JSON; into a pool of `num_blocks` |
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TextIO

import torch
from immutables import Map

from purestep.engine.adapters import (
    AdapterFailed,
    deliver,
    deliver_loaded,
    pin_adapter,
    register_adapter,
    unload_adapter,
    unpin_adapter,
)
from purestep.engine.branch import branch
from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.fork import renumbered
from purestep.engine.policy import Order, Policy, fcfs
from purestep.engine.recording import (
    begin_recording,
    plan_event,
    record,
    result_event,
    write_event,
)
from purestep.engine.renewal import adopt, flush
from purestep.engine.requests import abort, submit
from purestep.engine.schedule import plan_ahead, schedule
from purestep.engine.step import without_flown, without_overwritten
from purestep.simulation.device import execute, misfit, spoil, tear
from purestep.simulation.laws import (
    check_state,
    check_step,
    law_3_pins_stay,
    law_16_keys_are_contents,
    law_19_cached_is_computed,
    law_19_reuse_order,
    law_m_what_is_needed_stays,
)
from purestep.simulation.media import Item, too_large, with_media
from purestep.simulation.told import (
    Told,
    bind,
    branched,
    expected_end,
    expected_token,
    judge_completion,
    must,
    prompt_read,
    told_of,
)
from purestep.simulation.world import RANKS, loaded, toy_state
from purestep.state.canonical import digest, from_plain, to_plain
from purestep.state.engine import EngineState, HostState, drop_blobs, progress
from purestep.state.errors import (
    AdapterError,
    ConfigError,
    RequestError,
    StepError,
    UnknownAdapterError,
)
from purestep.state.hashing import request_seed
from purestep.state.plan import Outputs, StepPlan, StepResult
from purestep.state.request import Request
from purestep.state.sampling import SamplingParams

Event = tuple[str, Mapping[str, Any]]
Sees = Callable[[Event, EngineState, EngineState, StepPlan | None], object]
STEPS_TO_DRAIN = 1500


@dataclass(frozen=True)
class _Program:
    """As much of a program as `adopt` looks at."""

    config: Config


class Machine:
    """The engine's state, and what its caller knows; `do` is the only way to go on.

    `laws` off leaves the output law alone. Every `keep`-th host state is kept with its digest and
    compared at the end. `sees` is told each event with the states around it. On a `tape` the run is
    recorded (`purestep.engine.record`; all events but `fork`).
    """

    def __init__(
        self,
        config: Config,
        policy: Policy = fcfs,
        *,
        laws: bool = True,
        keep: int = 1,
        sees: Sees | None = None,
        tape: TextIO | None = None,
    ) -> None:
        self.policy, self.laws, self.keep, self.sees = policy, laws, keep, sees
        self.tape = tape
        self.state: EngineState = toy_state(config)
        self.results: list[StepResult] = []  # of the plans in flight
        self.live: dict[str, Told] = {}
        self.number, self.last = 0, ""  # events so far, and the kind of the newest
        self.aborted = ""  # the last request that was
        # A row and an output of the step that lands next, by their `pick`.
        self.spoils: int | None = None
        self.misfits: int | None = None
        self.asked: list[tuple[str, str]] = []  # loads the engine wants and has not got
        self.kept: list[tuple[HostState, str]] = []
        self.known: dict[bytes, tuple] = {}
        self.names: dict[tuple, bytes] = {}
        self.cells: dict[bytes, bytes] = {}
        if tape is not None:
            begin_recording(tape, self.state)

    @property
    def config(self) -> Config:
        return self.state.config

    @property
    def bound(self) -> Map[str, str]:
        return self.state.host.adapters.names

    def do(self, event: Event) -> None:
        """Let an event happen. Raises Astray where the output law breaks, AssertionError where
        another law does."""
        kind, arguments = event
        before, self.plan = self.state, None
        getattr(self, f"_{kind}")(**arguments)
        self.number, self.last = self.number + 1, kind
        if self.laws:
            self._check_laws(kind, before)
        if self.sees is not None:
            self.sees(event, before, self.state, self.plan)
        if self.keep and self.number % self.keep == 0:
            self.kept.append((self.state.host, digest(self.state.host)))

    def _call(self, verb: Callable, *args: Any, **kwargs: Any) -> EngineState:
        if self.tape is None:
            return verb(*args, **kwargs)
        return record(self.tape, verb, *args, **kwargs)

    def drain(self) -> None:
        """Without new requests everything ends, in a bounded number of steps, and nothing stays
        held; no host state that was kept has changed."""
        for _ in range(STEPS_TO_DRAIN):
            if self.state.host.idle:
                break
            self.do(("ahead" if self.number % 5 else "step", {}))
            while self.asked:
                self.do(("load_returns", {"pick": 0, "version": "v1"}))
        must(self.state.host.idle and not self.live, f"still live: {sorted(self.live)}")
        if self.laws:
            assert self.state.host.blocks.num_free == self.config.num_blocks
            assert not self.state.host.adapters.users
            assert not self.state.host.encoder.holders
        for host, name in self.kept:
            assert digest(host) == name, "an old state has changed"

    def _check_laws(self, kind: str, before: EngineState) -> None:
        host, old = self.state.host, before.host
        check_state(self.config, host, self.state.device, old if self.number > 1 else None)
        law_3_pins_stay(old, host, kind)
        sealed, before_it = (dict(zip(h.rows.ids, h.rows.sealed, strict=True)) for h in (host, old))
        for key, now in host.requests.items():
            grown = sealed.get(key) is not before_it.get(key)
            if not now.loading and (grown or old.requests.get(key) is not now):
                told = self.live[key]
                law_16_keys_are_contents(
                    self.config,
                    progress(host, key),
                    told.sequence,
                    told.request,
                    self.known,
                    self.names,
                )
        law_19_cached_is_computed(self.config, host, self.state.device, self.known, self.cells)
        prompts = {r.request.prompt_embeds for r in host.requests.values()} - {None}
        media = {f.digest for r in host.requests.values() for f in r.request.features}
        known, needed = set(self.state.blobs), {*host.adapters.registered, *prompts, *media}
        untold = [*host.ended, *(c for plan in host.in_flight for c in plan.ended)]
        assert needed <= known
        assert known == needed or untold, "a tensor is kept that nothing names"
        assert sorted([*host.requests, *(c.key for c in untold)]) == sorted(self.live)

    # --- requests

    def _submit(
        self,
        id: str,
        embeds: int | None,
        sampling: Mapping[str, Any],
        media: Sequence[Item] = (),
        **words,
    ) -> None:
        words = with_media(self.config, with_embeds(words, embeds), media)
        if isinstance(bias := sampling.get("logit_bias"), list):  # as JSON has it
            sampling = {**sampling, "logit_bias": tuple(map(tuple, bias))}
        request = Request(id=id, sampling=SamplingParams(**sampling), **words)
        name, given = request.adapter, request.sampling.seed
        known = {*self.bound, *self.state.host.adapters.sources, None}
        length = len(request.tokens) or len(request.prompt_embeds)
        blocks = -(-(length + (request.sampling.max_tokens > 0)) // self.config.block_size)
        end = min(length + request.sampling.max_tokens, self.config.max_context)
        quota = self.config.adapter_block_quota if name is not None else 0
        over = quota and -(-end // self.config.block_size) > quota
        keys = [f"{id}#{index}" if index else id for index in range(request.sampling.n)]
        taken = any(key in keys or told.request.id == id for key, told in self.live.items())
        fits = blocks <= self.config.num_blocks and not too_large(self.config, request)
        if name not in known or not fits or taken or over:
            with refused(RequestError):
                submit(self.state, request)
            return
        self.state = self._call(submit, self.state, request)
        seed = request_seed(self.config.seed, request.id) if given is None else given
        version, bound = self.bound.get(name), name is None or name in self.bound
        for index, key in enumerate(keys):
            self.live[key] = told_of(self.config, request, version, seed, bound, index)

    def _abort(self, pick: int) -> None:
        requests = sorted(self.state.host.requests)
        if not requests:
            return
        request_id = requests[pick % len(requests)]
        samples = [k for k, told in self.live.items() if request_id in (k, told.request.id)]
        for key in samples:
            told = self.live.pop(key)
            if key in self.state.host.requests:
                found = progress(self.state.host, key).generated.tolist()
                must(found == told.tokens, f"{key} has other tokens than it was told")
        self.state = self._call(abort, self.state, request_id)
        self.aborted = request_id

    def _branch(self, pick: int, count: int) -> None:
        host = self.state.host
        choice = host.rows.ids or sorted(host.requests)
        if not choice:
            return
        request_id = choice[pick % len(choice)]
        new_ids = [f"{request_id[:40]}.{self.number}.{i}" for i in range(count)]
        if host.in_flight:
            with refused(StepError):
                branch(self.state, request_id, new_ids)
            return
        self.state = self._call(branch, self.state, request_id, new_ids)
        for new_id in new_ids:
            self.live[new_id] = branched(self.live[request_id], new_id)

    # --- adapters

    def _register(self, name: str) -> None:
        try:
            self.state = self._call(register_adapter, self.state, f"/{name}", name=name)
        except AdapterError:
            pinned = name in self.state.host.adapters.pins
            must(pinned and name not in self.state.host.adapters.sources, f"{name} is not pinned")

    def _load(self, name: str, version: str, again: bool) -> None:
        event = loaded(name, version, RANKS[version], f"/{name}" if again else None)
        try:
            self.state = self._call(deliver_loaded, self.state, event)
        except AdapterError:
            return
        self._load_came_out(name, version)

    def _load_came_out(self, name: str, version: str) -> None:
        must(self.bound.get(name) == version, f"{name} is bound to {self.bound.get(name)}")
        for told in self.live.values():
            if not told.bound and told.request.adapter == name:
                bind(self.config, told, version)

    def _load_returns(self, pick: int, version: str) -> None:
        if not self.asked:
            return
        name, source = self.asked.pop(pick % len(self.asked))
        event = loaded(name, version, RANKS[version], source)
        self.state = self._call(deliver, self.state, event)
        if self.bound.get(name) == version:
            self._load_came_out(name, version)

    def _load_fails(self, pick: int) -> None:
        if self.asked:
            name, source = self.asked.pop(pick % len(self.asked))
            failed = AdapterFailed(name=name, error="gone", source=source)
            self.state = self._call(deliver, self.state, failed)

    def _unload(self, name: str, running: str) -> None:
        if name not in self.state.host.adapters.sources and name not in self.bound:
            with refused(UnknownAdapterError):
                unload_adapter(self.state, name)
            return
        mine = [self.live.get(key) for key in self.state.host.requests]
        mine = [told for told in mine if told is not None and told.request.adapter == name]
        if running == "refuse" and mine:
            with refused(AdapterError):
                unload_adapter(self.state, name, running=running)
            return
        self.state = self._call(unload_adapter, self.state, name, running=running)
        must(name not in self.bound, f"{name} is unloaded and yet bound")
        for told in mine:
            drains = told.bound and told.version is not None and running == "drain"
            must(not drains or told.version in self.state.blobs, f"{told.version} is still in use")

    def _pin(self, name: str) -> None:
        if name in self.state.host.adapters.pins:
            self.state = self._call(unpin_adapter, self.state, name)
            return
        try:
            self.state = self._call(pin_adapter, self.state, name)
        except UnknownAdapterError:
            must(name not in self.bound, f"{name} is loaded and yet unknown")
        except AdapterError:
            must(name in self.bound, f"{name} is unknown and yet does not fit")

    # --- the whole state

    def _flush(self) -> None:
        if self.state.host.in_flight:
            with refused(StepError):
                flush(self.state)
            return
        self.state = self._call(flush, self.state)
        assert not self.state.host.blocks.block_of

    def _adopt(self, weights: str) -> None:
        """What was read before is told already; positions that follow are of the new weights, so
        what live requests collect over time is not compared."""
        program = _Program(replace(self.config, weights=weights))
        if self.state.host.in_flight:
            with refused(StepError):
                adopt(program, self.state)
            return
        self.state = self._call(adopt, program, self.state)
        for told in self.live.values():
            told.reread = True
            told.prompt, told.delta = prompt_read(self.config, told)

    def _restore(self) -> None:
        text = json.dumps(to_plain(self.state.host))
        again = from_plain(json.loads(text))
        must(json.dumps(to_plain(again)) == text, "the state has another form once restored")
        self.state = replace(self.state, host=again)

    def _fork(self, num_blocks: int) -> None:
        """Go on with the twin; blocks it does not take along are not on its device."""
        if self.state.host.in_flight:
            return
        try:
            host, pairs = renumbered(self.state.host, num_blocks)
        except ConfigError:
            must(self.state.host.blocks.num_held > num_blocks, "live blocks would have fitted")
            return
        for completion in host.ended:
            told = self.live[completion.key]
            told.ended_in = told.ended_in or self.config.num_blocks
        device = self.state.device
        blocks = Map({new: device.blocks.get(old, b"") for old, new in pairs})
        self.state = replace(
            self.state,
            config=replace(self.config, num_blocks=num_blocks),
            host=host,
            device=replace(device, blocks=blocks),
        )

    # --- steps

    def _step(self) -> None:
        host = self.state.host
        if host.idle:
            return
        if not host.in_flight:
            self._launch(*schedule(self.config, host, self._ordered))
        self._land()

    def _ahead(self) -> None:
        host = self.state.host
        following = None if host.idle else plan_ahead(self.config, host, self._ordered)
        if following is None:
            self._step()
            return
        self._launch(*following)
        if host.in_flight:
            self._land()

    def _launch(self, host: HostState, plan: StepPlan) -> None:
        before = self.state
        if self.tape is not None:
            write_event(self.tape, plan_event(self.order))
        device, result = execute(self.config, before.device, plan, before.blobs)
        self.state = replace(before, host=host, device=device)
        self.results.append(result)
        self.plan = plan
        if self.laws:
            check_step(self.config, before.host, host, plan, self.order)

    def _land(self) -> None:
        void = self._spoiled() | self._misfitted()
        before, result = self.state.host, self.results.pop(0)
        plan = before.in_flight[0]
        host, outputs = commit(self.config, before, plan, result)
        if self.tape is not None:
            write_event(self.tape, result_event(result))
        self.state = replace(self.state, host=host)
        if outputs.finished:
            self.state = drop_blobs(self.state)
        if self.laws:
            law_19_reuse_order(before, host)
            law_m_what_is_needed_stays(host, plan, _gone(before, plan))
        self.asked += outputs.loads
        for key, token, logprob in zip(
            outputs.ids, outputs.tokens_S.tolist(), outputs.logprobs_S.tolist(), strict=True
        ):
            must(key in self.live, f"{key} is not live")
            told = self.live[key]
            expected = expected_token(self.config, told, before.requests[key])
            must((token, logprob) == expected, f"{key} was told {token}, alone it is {expected[0]}")
            told.tokens.append(token)
            told.logprobs.append(logprob)
        for key, text in outputs.texts:
            self.live[key].streamed += text
            must(text, f"{key} was told no text")
        self._heard(outputs)
        goes_on = sorted(void.intersection(self.live))
        must(not goes_on, f"{goes_on} go on, and what they computed is void")

    def _spoil(self, pick: int) -> None:
        self.spoils = pick

    def _spoiled(self) -> set[str]:
        """Spoil the results of a row, where that was asked for, and tell of which: one that draws
        or is scored, so that the engine can see it, and that writes into no block of others, so
        that nobody else has read it."""
        if self.spoils is None:
            return set()
        pick, self.spoils = self.spoils, None
        host = self.state.host
        plan, size, blocks = host.in_flight[0], self.config.block_size, host.blocks
        seen = {probe.row for probe in plan.scored if (probe.target_N >= 0).any()}
        seen |= set(plan.sampled_R.nonzero()[0].tolist())
        rows = [
            row
            for row, start in enumerate(plan.start_R.tolist())
            if row in seen
            and all(blocks.holders(b) == 1 for b in plan.tables[row][start // size :].tolist())
        ]
        if not rows:
            return set()
        rows = [row for row in rows if not plan.sampled_R[row]] or rows  # fewer are in mid-prefill
        row = rows[pick % len(rows)]
        device, result = spoil(self.config, self.state.device, plan, self.results[0], row)
        self.results[0], self.state = result, replace(self.state, device=device)
        if plan.row_ids[row] in _gone(host, plan):
            return set()
        self.live[plan.row_ids[row]].void = True
        return {plan.row_ids[row]}

    def _misfit(self, pick: int) -> None:
        self.misfits = pick

    def _misfitted(self) -> set[str]:
        """Let an item that was encoded turn out to have other rows than requests say, where that
        was asked for, and tell who has it: their rows are void, wherever they took theirs from."""
        if self.misfits is None:
            return set()
        pick, self.misfits = self.misfits, None
        host = self.state.host
        plan = host.in_flight[0]
        made = sorted(item.identifier for item in plan.encodes)
        if not made:
            return set()
        name = made[pick % len(made)]
        device, result = misfit(self.config, self.state.device, plan, self.results[0], name)
        self.results[0], self.state = result, replace(self.state, device=device)
        features = {key: host.requests[key].features for key in host.rows.ids}
        void = {key for key, of in features.items() if any(f.identifier == name for f in of)}
        for key in void:
            self.live[key].void = True
        return void

    def _ordered(self, host: HostState) -> Order:
        self.order = self.policy(host)
        return self.order

    def _heard(self, outputs: Outputs) -> None:
        ended = {c.key: c for c in outputs.finished}
        must(len(ended) == len(outputs.finished), "a request ended twice")
        for key in outputs.ids:
            due = expected_end(self.live[key], self.config.max_context)
            must((due is None) == (key not in ended), f"{key} must end by {due}")
        for key, completion in ended.items():
            must(key in self.live, f"{key} ended and was not live")
            judge_completion(self.config, completion, self.live.pop(key), key in outputs.ids)

    def _fail(self) -> None:
        """`execute` dies after writing: the input stays good, but for what the plan named. A plan
        in flight before it has its results all the same."""
        host = self.state.host
        if host.idle:
            return
        if not host.in_flight:
            failed = schedule(self.config, host, self.policy)
        else:
            failed = plan_ahead(self.config, host, self.policy)
        if failed is not None:
            self._torn(failed[1])

    def _lose(self, behind: bool) -> None:
        """The plan in flight dies, and the one that was queued behind it."""
        host = self.state.host
        if not host.in_flight:
            return
        following = plan_ahead(self.config, host, self.policy) if behind else None
        done = replace(host.in_flight[0], uploads=(), copies=(), drops=())
        device = tear(self.config, self.state.device, done, self.state.blobs)
        rows = device.row_blocks
        for block in {b for place in host.in_flight[0].uploads for b in place.row_blocks}:
            rows = rows.delete(block)
        device = replace(device, row_blocks=rows)
        self.state = replace(self.state, host=without_flown(host), device=device)
        self.results.clear()
        if self.tape is not None:
            write_event(self.tape, ("lost",))
        if following is not None:
            self._torn(following[1])

    def _torn(self, plan: StepPlan) -> None:
        host = self.state.host
        device = tear(self.config, self.state.device, plan, self.state.blobs)
        if not plan.overwrites.empty:
            host = without_overwritten(host, plan.overwrites)
            if self.tape is not None:
                write_event(self.tape, ("recover", plan.overwrites))
        self.state = replace(self.state, host=host, device=device)


def _gone(host: HostState, plan: StepPlan) -> set[str]:
    """Who has left a plan in flight; a row of such a name is another request's."""
    there = {key for step, key, _ in host.departed if step >= plan.step}
    return there | (set(plan.row_ids) - set(host.rows.ids))


@contextmanager
def refused(kind: type[Exception]):
    """A call inside must raise `kind`."""
    try:
        yield
    except kind:
        return
    must(False, f"a call that must raise {kind.__name__} did not")


def with_embeds(words: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """The words with `count` embeddings in place of the ids; odd numbers leave ids behind them."""
    if count is None:
        return dict(words)
    tokens = [-1] * count + list(words["tokens"][:3]) if count % 2 else []
    rows = (torch.arange(8 * count).view(count, 8) // 8 + count) % 3  # a few different ones
    return {**words, "prompt_embeds": rows.float(), "tokens": tokens}
