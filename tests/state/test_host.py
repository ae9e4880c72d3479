"""The law of design.md, section 6, on the whole host side: whatever happens in whatever order,

    tokens(engine) == tokens(each request alone, infinite memory, one chunk, no cache)

and every state ever seen keeps its value, obeys its laws and survives the canonical form
(multi_lora.md, 21: 1 to 5, 14, 16 to 20; cases SC-01, SC-03, SC-04, SC-09, LS-01, LS-03, LS-05,
LS-08, PC-01, PC-03, DT-03, MO-03).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
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
from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.policy import Policy, by_priority, fcfs
from purestep.engine.renewal import adopt, flush
from purestep.engine.requests import abort, branch, submit
from purestep.engine.schedule import schedule
from purestep.engine.step import without_overwritten
from purestep.simulation.device import (
    cell_after,
    embedding_number,
    next_token,
    scores_of,
    state_of,
    tear,
    toy_step,
)
from purestep.simulation.world import EOS, TABLE, loaded, toy_config, toy_state
from purestep.state.adapters import pinned_versions
from purestep.state.canonical import digest, from_plain, to_plain
from purestep.state.engine import EngineState, HostState, check_host, progress
from purestep.state.errors import AdapterError, RequestError, UnknownAdapterError
from purestep.state.hashing import random_stream, request_seed
from purestep.state.plan import Outputs, StepPlan, StepResult
from purestep.state.request import Completion, FinishReason, Request, RequestState, frozen
from purestep.state.sampling import SamplingParams
from purestep.state.text import TokenTable

NAMES = ("sql", "chat", "fr")
RANKS = {"v1": 8, "v2": 4, "v3": 16, "v4": 1, "v5": 16}
STEPS_TO_DRAIN = 1500


@dataclass
class Told:
    """What the caller knows of one request: its words and what it was told so far."""

    request: Request
    version: str | None
    seed: int
    bound: bool
    index: int = 0
    path: tuple[int, ...] = ()
    branches: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    streamed: str = ""

    @property
    def prompt(self) -> list[int]:
        """Ids, and the toy's numbers of the embeddings between them."""
        embeds = self.request.prompt_embeds
        tokens = list(self.request.tokens) or [-1] * len(embeds)
        rows = iter(() if embeds is None else embeds)
        return [embedding_number(next(rows)) if t == -1 else t for t in tokens]

    @property
    def scores(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    @property
    def text(self) -> bytes:
        return TABLE.join(np.array(self.tokens, np.int32))


def expected_token(config: Config, told: Told, record: RequestState) -> tuple[int, float]:
    """`record` is the engine's, for the checked form of the parameters alone."""
    stream = random_stream(told.seed, told.index, told.path)
    alone = replace(record, generated=frozen(told.tokens), stream=stream)
    return next_token(config, told.sequence, told.version, alone)


def expected_end(told: Told, max_context: int) -> tuple[FinishReason, str | int | None] | None:
    """Why the request must end with its newest token; None while it must go on."""
    sampling, token = told.request.sampling, told.tokens[-1]
    if len(told.tokens) >= sampling.min_tokens and (found := newest_stop(told)):
        return FinishReason.STOP, found[2]
    ends = token in sampling.stop_ids or (token == EOS and not sampling.ignore_eos)
    if ends and len(told.tokens) >= sampling.min_tokens:
        return FinishReason.STOP, token
    full = len(told.tokens) == sampling.max_tokens or len(told.sequence) == max_context
    return (FinishReason.LENGTH, None) if full else None


def newest_stop(told: Told) -> tuple[int, int, str] | None:
    """(where it begins, ...) of the first stop string that ends within the newest token."""
    text, before = told.text, len(TABLE.join(np.array(told.tokens[:-1], np.int32)))
    found = [
        (at, -len(stop.encode()), stop)
        for stop in told.request.sampling.stop
        for at in range(len(text))
        if text.startswith(stop.encode(), at) and at + len(stop.encode()) > before
    ]
    return min(found, default=None)


def expected_text(told: Told, completion: Completion) -> str:
    """All of it, but for what a stop cuts off."""
    text, keeps = told.text, told.request.sampling.include_stop
    if isinstance(completion.stop, str):
        at, _, stop = newest_stop(told)
        text = text[: at + len(stop.encode()) * keeps]
    elif isinstance(completion.stop, int) and not keeps:
        text = TABLE.join(np.array(told.tokens[:-1], np.int32))
    return text.decode(errors="replace")


PROMPTS = ((1, 3, 4, 5, 1, 3, 5, 6, 3, 3, 0, 1, 4, 5, 6, 7, 10, 0), (1, 3, 4, 5, 0, 0, 0, 0, 1, 1))
prompts = st.builds(
    lambda base, length, last: (*base[: length - 1], last),
    st.sampled_from(PROMPTS),
    st.integers(1, 18),
    st.sampled_from((5, 5, 9)),
)
drawn = {
    "temperature": st.just(0.7),
    "top_k": st.sampled_from((0, 3)),
    "min_p": st.sampled_from((0.0, 0.1)),
    "n": st.sampled_from((1, 1, 3)),
}
common = {
    "seed": st.sampled_from((None, 0, 2**64 - 1)),
    "max_tokens": st.integers(1, 14),
    "stop": st.sampled_from(((), (), ("aba",), ("é", "ab"))),
    "stop_ids": st.sampled_from(((), (), (7, 10))),
    "ignore_eos": st.booleans(),
}
rare = {
    "min_tokens": st.integers(0, 1) | st.integers(0, 3),
    "include_stop": st.booleans(),
    "stream": st.booleans(),
    "logprobs": st.sampled_from((None, 0, 2)),
    "prompt_logprobs": st.sampled_from((None, None, 0, 2)),
    "repetition_penalty": st.sampled_from((1.0, 1.5)),
    "presence_penalty": st.sampled_from((0.0, 0.5)),
    "frequency_penalty": st.sampled_from((0.0, -0.5)),
    "logit_bias": st.sampled_from(((), {3: 2.0, 1: -1.0})),
    "banned_ids": st.sampled_from(((), (5, 4))),
    "allowed_ids": st.sampled_from((None, (1, 3))),
}


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    return SamplingParams(**{"temperature": 0.0} | fields)


samplings = st.builds(
    sampling_params,
    st.fixed_dictionaries(common, optional=rare)
    | st.fixed_dictionaries(common | drawn, optional=rare)
    | st.just({"max_tokens": 0, "prompt_logprobs": 1}),
)

words = st.fixed_dictionaries(
    {
        "tokens": prompts,
        "adapter": st.sampled_from((None, *NAMES, *NAMES, "nobody")),
        "salt": st.sampled_from((None, None, "x", "sql")),
        "priority": st.sampled_from((0, 0, -1, 2)),
        "sampling": samplings,
        "hidden_layers": st.sampled_from(((), (), (0,), (1, -1, 0, -2))),
        "prompt_embeds": st.none() | st.none() | st.integers(1, 9),
    }
)


def with_embeds(chosen: dict[str, Any]) -> dict[str, Any]:
    """In place of a number of embeddings, those; some prompts hold ids between them."""
    count = chosen["prompt_embeds"]
    if count is None:
        return chosen
    tokens = [-1] * count + list(chosen["tokens"][:3]) if count % 2 else []
    rows = torch.arange(8 * count).view(count, 8) // 8 % 3  # a few different ones
    return chosen | {"prompt_embeds": rows.float(), "tokens": tokens}


@dataclass(frozen=True)
class _Program:
    """As much of a program as `adopt` looks at."""

    config: Config


class HostMachine(RuleBasedStateMachine):
    """Everything a caller can do, in any order, on a pool that is far too small."""

    config_changes: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {
            "block_size": st.sampled_from((2, 4)),
            "num_blocks": st.integers(4, 14),
            "max_rows": st.integers(1, 4) | st.just(4),
            "max_batched_tokens": st.integers(4, 12),
            "max_active_adapters": st.integers(1, 3),
            "lora_rows": st.sampled_from((16, 24)),
            "prefix_caching": st.sampled_from((True, True, False)),
            "long_prefill_threshold": st.sampled_from((0, 3)),
            "adapter_age_limit": st.sampled_from((0, 3, 12)),
            "adapter_preemption": st.booleans(),
            "tokens": st.just(TABLE),
        }
    )

    adapters = st.fixed_dictionaries(
        {}, optional={name: st.none() | st.sampled_from(sorted(RANKS)) for name in NAMES}
    )

    @initialize(
        changes=config_changes, known=adapters, policy=st.sampled_from((fcfs, fcfs, by_priority))
    )
    def begin(self, changes: dict[str, Any], known: dict[str, str | None], policy: Policy) -> None:
        self.policy = policy
        self.config = toy_config(**changes)
        self.state: EngineState = toy_state(self.config)
        self.live: dict[str, Told] = {}
        self.number = 0
        self.asked: list[tuple[str, str]] = []
        self.bound: dict[str, str] = {}
        self.kept: list[tuple[HostState, str]] = []
        for name, version in known.items():
            self.state = register_adapter(self.state, f"/{name}", name=name)
            if version is not None:
                self.load(name, version, True)

    # --- what the caller does

    @rule(several=st.lists(words, min_size=1, max_size=3))
    def submit(self, several: list[dict[str, Any]]) -> None:
        for chosen in several:
            self.number += 1
            self.submit_one(Request(id=f"r{self.number}", **with_embeds(chosen)))

    def submit_one(self, request: Request) -> None:
        name, given = request.adapter, request.sampling.seed
        known = {*self.bound, *self.state.host.adapters.sources, None}
        length = len(request.tokens) or len(request.prompt_embeds)
        blocks = -(-(length + (request.sampling.max_tokens > 0)) // self.config.block_size)
        if name not in known or blocks > self.config.num_blocks:
            self.refused(RequestError, lambda: submit(self.state, request))
            return
        self.state = submit(self.state, request)
        seed = request_seed(self.config.seed, request.id) if given is None else given
        bound = name is None or name in self.bound
        for index in range(request.sampling.n):
            key = f"{request.id}#{index}" if index else request.id
            self.live[key] = Told(request, self.bound.get(name), seed, bound, index=index)
        self.refused(RequestError, lambda: submit(self.state, request))

    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.step()

    @precondition(lambda self: self.state.host.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.state.host.requests)))
        samples = [k for k, told in self.live.items() if request_id in (k, told.request.id)]
        for key in samples:
            told = self.live.pop(key)
            if key in self.state.host.requests:
                assert progress(self.state.host, key).generated.tolist() == told.tokens
        self.state = abort(self.state, request_id)

    @precondition(lambda self: self.state.host.requests)
    @rule(data=st.data(), count=st.integers(1, 2))
    def branch(self, data: st.DataObject, count: int) -> None:
        host = self.state.host
        request_id = data.draw(st.sampled_from(host.rows.ids or sorted(host.requests)))
        new_ids = [f"{request_id}.{self.number + i}" for i in range(count)]
        self.number += count
        self.state = branch(self.state, request_id, new_ids)
        parent = self.live[request_id]
        for new_id in new_ids:
            parent.branches += 1
            self.live[new_id] = replace(
                parent,
                request=replace(parent.request, id=new_id),
                path=(*parent.path, parent.branches),
                branches=0,
                tokens=list(parent.tokens),
                logprobs=list(parent.logprobs),
            )

    # --- adapters

    @rule(name=st.sampled_from(NAMES), version=st.sampled_from(sorted(RANKS)), again=st.booleans())
    def load(self, name: str, version: str, again: bool) -> None:
        """From a file, which can be read again, or from tensors, which cannot."""
        event = loaded(name, version, RANKS[version], f"/{name}" if again else None)
        try:
            state = deliver_loaded(self.state, event)
        except AdapterError:
            self.refused(AdapterError, lambda: deliver_loaded(self.state, event))
            return
        self.state = state
        self.load_came_out(name, version)

    def load_came_out(self, name: str, version: str) -> None:
        self.bound = dict(self.state.host.adapters.names)
        assert self.bound[name] == version
        for told in self.live.values():
            if not told.bound and told.request.adapter == name:
                told.version, told.bound = version, True

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), version=st.sampled_from(sorted(RANKS)), works=st.booleans())
    def a_load_comes_back(self, data: st.DataObject, version: str, works: bool) -> None:
        name, source = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        if not works:
            self.state = deliver(self.state, AdapterFailed(name=name, error="gone"))
            return
        self.state = deliver(self.state, loaded(name, version, RANKS[version], source))
        if self.state.host.adapters.names.get(name) == version:
            self.load_came_out(name, version)

    @rule(name=st.sampled_from(NAMES), running=st.sampled_from(("drain", "abort", "refuse")))
    def unload(self, name: str, running: str) -> None:
        if name not in self.state.host.adapters.sources and name not in self.bound:
            self.refused(UnknownAdapterError, lambda: unload_adapter(self.state, name))
            return
        mine = [told for told in self.live.values() if told.request.adapter == name]
        live = [t for t in mine if any(t is self.live.get(k) for k in self.state.host.requests)]
        if running == "refuse" and live:
            self.refused(AdapterError, lambda: unload_adapter(self.state, name, running=running))
            return
        self.state = unload_adapter(self.state, name, running=running)
        self.bound = dict(self.state.host.adapters.names)
        assert name not in self.bound
        for told in live:
            assert not told.bound or running == "abort" or told.version in self.state.blobs

    @rule()
    def flush(self) -> None:
        self.state = flush(self.state)
        assert not self.state.host.blocks.block_of

    @rule()
    def other_weights(self) -> None:
        """What was read before is told already; positions that follow are of the new weights, so
        only requests that collect nothing over time are compared."""
        watched = [t for t in self.live.values() if t.request.hidden_layers or t.scores]
        if watched:
            return
        self.number += 1
        self.config = replace(self.config, weights=f"weights {self.number}")
        self.state = adopt(_Program(self.config), self.state)

    @rule(name=st.sampled_from(NAMES))
    def pin_or_unpin(self, name: str) -> None:
        if name in self.state.host.adapters.pins:
            self.state = unpin_adapter(self.state, name)
            return
        self.refused(UnknownAdapterError, lambda: unpin_adapter(self.state, name))
        try:
            self.state = pin_adapter(self.state, name)
        except AdapterError:
            assert name in self.bound
        except UnknownAdapterError:
            assert name not in self.bound

    # --- the engine

    def step(self) -> None:
        before, plans = self.state, []
        if before.host.idle:
            return
        self.state, outputs = toy_step(before, plans.append, self.policy)
        self.asked += outputs.loads
        self.bound = dict(self.state.host.adapters.names)
        check_plan(before, plans[0])
        front = self.state.host.waiting[: plans[0].num_preempted]
        order = self.policy(before.host).running
        assert front == tuple(i for i in order if i in front), "preempted out of turn"
        for request_id, token, logprob in zip(
            outputs.ids, outputs.tokens_S.tolist(), outputs.logprobs_S.tolist(), strict=True
        ):
            told = self.live[request_id]
            expected = expected_token(self.config, told, before.host.requests[request_id])
            assert (token, logprob) == expected, f"{request_id} went astray"
            told.tokens.append(token)
            told.logprobs.append(logprob)
        for key, text in outputs.texts:
            self.live[key].streamed += text
            assert text
        self.heard(outputs)

    def heard(self, outputs: Outputs) -> None:
        ended = {c.key: c for c in outputs.finished}
        assert len(ended) == len(outputs.finished), "a request ended twice"
        for request_id in outputs.ids:
            due = expected_end(self.live[request_id], self.config.max_context)
            assert (due is None) == (request_id not in ended), f"{request_id}: {due}"
        for key, completion in ended.items():
            self.check_completion(completion, key in outputs.ids)
            check_extras(self.config, completion, self.live.pop(key))

    def check_completion(self, completion: Completion, has_news: bool) -> None:
        told = self.live[completion.key]
        assert completion.tokens.tolist() == told.tokens
        assert completion.logprobs.tolist() == told.logprobs
        assert completion.num_prompt_tokens == len(told.prompt)
        assert completion.num_cached_tokens < len(told.prompt) or told.tokens
        if has_news:
            due = expected_end(told, self.config.max_context)
            assert (completion.finish_reason, completion.stop) == due
            assert completion.text == expected_text(told, completion)
        elif completion.finish_reason == FinishReason.LENGTH:
            assert told.request.sampling.max_tokens == 0
        elif completion.finish_reason == FinishReason.CAPACITY:
            needed = -(-len(told.sequence) // self.config.block_size)
            assert needed > self.config.num_blocks, "the pool could have held it"
        else:
            assert completion.finish_reason == FinishReason.ERROR
            assert completion.error

    @precondition(lambda self: not self.state.host.idle)
    @rule()
    def a_step_fails(self) -> None:
        """`execute` dies after writing: the input stays good, but for what the plan named."""
        host = self.state.host
        _, plan = schedule(self.config, host, self.policy)
        device = tear(self.config, self.state.device, plan, self.state.blobs)
        if not plan.overwrites.empty:
            host = without_overwritten(host, plan.overwrites)
        self.state = replace(self.state, host=host, device=device)

    def refused(self, kind: type[Exception], call: Callable[[], object]) -> None:
        """A call that is refused changes nothing."""
        before = digest(self.state.host)
        with pytest.raises(kind):
            call()
        assert digest(self.state.host) == before

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "state"):
            return
        check_host(self.state.host, self.config.block_size)
        host = self.state.host
        prompts = {r.request.prompt_embeds for r in host.requests.values()} - {None}
        assert set(self.state.blobs) == {*host.adapters.registered, *prompts}
        assert sorted([*host.requests, *(c.key for c in host.ended)]) == sorted(self.live)
        self.kept.append((self.state.host, digest(self.state.host)))

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self.drain()
        assert self.state.host.idle
        assert not self.live
        assert self.state.host.blocks.num_free == self.config.num_blocks
        assert not self.state.host.adapters.users
        check_host(self.state.host, self.config.block_size)
        for host, name in self.kept:
            assert digest(host) == name, "an old state has changed"
        for host, name in self.kept[:: max(1, len(self.kept) // 5)]:
            text = json.dumps(to_plain(host))
            assert digest(from_plain(json.loads(text))) == name

    def drain(self) -> None:
        """Without new requests everything ends, in a bounded number of steps."""
        for _ in range(STEPS_TO_DRAIN):
            if self.state.host.idle:
                return
            self.step()
            while self.asked:
                name, source = self.asked.pop()
                self.state = deliver(self.state, loaded(name, "v1", RANKS["v1"], source))
                if name in self.state.host.adapters.names:
                    self.load_came_out(name, self.state.host.adapters.names[name])
        raise AssertionError(f"after {STEPS_TO_DRAIN} steps these still live: {sorted(self.live)}")


def check_extras(config: Config, completion: Completion, told: Told) -> None:
    """Texts, scores and hidden states of a request that ended, whatever happened on the way."""
    sampling, prompt = told.request.sampling, told.prompt
    if sampling.stream and completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert told.streamed == completion.text
    assert completion.text.startswith(told.streamed)
    if sampling.logprobs is None:
        assert completion.top_ids is None
    else:
        wanted = [[t + k for k in range(sampling.logprobs)] for t in told.tokens]
        assert completion.top_ids.tolist() == wanted
    if completion.finish_reason in (FinishReason.CAPACITY, FinishReason.ERROR):
        return
    contexts: list[list[bytes]] = [[]]
    for token in told.sequence:
        cell = cell_after(contexts[-1], config.weights, told.version, token)
        contexts.append([*contexts[-1], cell])
    if sampling.prompt_logprobs is not None and told.index == 0:
        scores = [
            scores_of(context, max(token, -1), sampling.prompt_logprobs)
            for context, token in zip(contexts[1:], prompt[1:], strict=False)
        ]
        assert completion.prompt_logprobs.tolist()[1:] == [logprob for logprob, _ in scores]
        assert completion.prompt_top_ids.tolist()[1:] == [ids for _, ids in scores]
    for layer in told.request.hidden_layers:
        read = contexts[1 : len(prompt) + max(len(told.tokens) - 1, 0) + 1]
        wanted = [[state_of(context, layer)] for context in read]
        assert completion.hidden_states[layer].tolist() == wanted


def check_plan(before: EngineState, plan: StepPlan) -> None:
    """Limits of one step, and that it touches only what it may (9.4, 21.14; design, section 3)."""
    config, ledger = before.config, before.host.adapters
    assert len(plan.tokens_T) == plan.count_R.sum() <= config.max_batched_tokens
    assert len(plan.row_ids) <= config.max_rows
    assert all(plan.count_R > 0)
    active = {place.version for place in plan.residents}
    assert len(active) <= config.max_active_adapters
    running = {v for v in before.host.rows.versions if v is not None}
    lost = set(plan.overwrites.adapters)
    assert not lost & active or lost & active <= {u.version for u in plan.uploads}
    assert not lost & pinned_versions(ledger), "a pinned adapter was evicted"
    if not plan.num_preempted and not plan.ended:
        assert not lost & running, "a running request's adapter was evicted"
    uploaded = [place.version for place in plan.uploads]
    assert len(set(uploaded)) == len(uploaded)
    assert set(uploaded) <= active


def test_every_request_gets_what_it_gets_alone() -> None:
    run_state_machine_as_test(
        HostMachine, settings=settings(max_examples=60, stateful_step_count=40)
    )


def ran(state: EngineState, steps: int = 60) -> tuple[EngineState, dict[str, Completion]]:
    """The state after these steps, and who has ended."""
    ended: dict[str, Completion] = {}
    for _ in range(steps):
        if state.host.idle:
            break
        state, outputs = toy_step(state)
        ended |= {c.id: c for c in outputs.finished}
    return state, ended


LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_a_branch_that_outgrew_the_pool_ends() -> None:
    """SC-03, MO-03: the parent's next token needs a block more than there are; so does the copy's,
    which must end too and not be retried for ever."""
    state = submit(
        toy_state(toy_config(num_blocks=2)), Request(id="a", tokens=[1] * 7, sampling=LONG)
    )
    while state.host.rows.num_tokens_R.tolist() != [9]:
        state, _ = toy_step(state)
    state, ended = ran(branch(state, "a", ["b"]))
    assert state.host.idle
    assert {c.id: c.finish_reason for c in ended.values()} == dict.fromkeys(
        "ab", FinishReason.CAPACITY
    )
    assert ended["a"].tokens.tolist() == ended["b"].tokens.tolist()


def test_a_failed_step_does_not_spoil_a_branch_whose_parent_is_gone() -> None:
    """Design, section 3: the block to copy from is free once the parent is aborted, and the plan
    may hand it out; a second try would copy what the first one wrote there."""
    config = toy_config(max_batched_tokens=20)
    state = submit(toy_state(config), Request(id="p", tokens=[1] * 6, sampling=LONG))
    state, _ = toy_step(state)
    state = abort(branch(state, "p", ["c"]), "p")
    state = submit(state, Request(id="q", tokens=[3] * 6, sampling=LONG))
    _, right = ran(state)
    _, plan = schedule(config, state.host)
    host = state.host
    if not plan.overwrites.empty:
        host = without_overwritten(host, plan.overwrites)
    device = tear(config, state.device, plan, state.blobs)
    _, again = ran(replace(state, host=host, device=device))
    assert {i: c.tokens.tolist() for i, c in again.items()} == {
        i: c.tokens.tolist() for i, c in right.items()
    }


def test_a_failed_step_does_not_spoil_a_chain_of_copies() -> None:
    """A freed source may be the target of a later copy: doing both again would mix them up."""
    config = toy_config(max_batched_tokens=20)
    state = toy_state(config)
    for request_id, token in (("p", 1), ("q", 3)):
        request = Request(id=request_id, tokens=[token] * 6, sampling=LONG)
        state = submit(state, request)
    state, _ = toy_step(state)
    state = abort(branch(state, "p", ["c"]), "p")
    state = branch(state, "q", ["d"])
    _, right = ran(state)
    _, plan = schedule(config, state.host)
    assert plan.copies[0][0] != plan.copies[1][1], "a block that is still to be read was taken"
    host = state.host
    if not plan.overwrites.empty:
        host = without_overwritten(host, plan.overwrites)
    device = tear(config, state.device, plan, state.blobs)
    _, again = ran(replace(state, host=host, device=device))
    assert {i: c.tokens.tolist() for i, c in again.items()} == {
        i: c.tokens.tolist() for i, c in right.items()
    }


def test_equal_prompts_of_one_step_share_blocks() -> None:
    """12.3, PC-03: blocks are findable once they are scheduled, also later in the same step."""
    config = toy_config(max_batched_tokens=24, max_rows=3)
    state = toy_state(config)
    for request_id in "abc":
        state = submit(state, Request(id=request_id, tokens=[1] * 10, sampling=LONG))
    _, plan = schedule(config, state.host)
    assert (plan.num_hit_tokens, plan.count_R.tolist()) == (16, [10, 2, 2])
    _, ended = ran(state, 80)
    assert len({tuple(c.tokens.tolist()) for c in ended.values()}) == 1


def test_aborting_the_last_user_frees_the_tensors() -> None:
    """MO-03, MO-06: also when nothing else is left to step."""
    state = deliver_loaded(toy_state(toy_config()), loaded("a", "v1", 8, None))
    state = submit(state, Request(id="r", tokens=[1], adapter="a"))
    state = deliver_loaded(state, loaded("a", "v2", 8, None))
    assert set(state.blobs) == {"v1", "v2"}
    state = abort(state, "r")
    assert set(state.host.adapters.registered) == set(state.blobs) == {"v2"}


def test_an_idle_engine_stays_what_it_is() -> None:
    """SC-09: nothing to do three times; scheduling nothing is no accident either."""
    state = toy_state(toy_config())
    assert state.host.idle
    for _ in range(3):
        _, plan = schedule(state.config, state.host)
        assert plan.row_ids == ()
        assert plan.overwrites.empty
        state, outputs = toy_step(state)
        assert (outputs.ids, outputs.finished) == ((), ())
    state, ended = ran(submit(state, Request(id="a", tokens=[1], sampling=LONG)))
    assert set(ended) == {"a"}
    assert state.host.idle


def test_generated_blocks_are_found_by_who_asks_for_their_tokens() -> None:
    """12.1: generated tokens extend the chain just as a prompt would; a next turn hits them all."""
    config = toy_config(num_blocks=12)
    first = Request(id="1", tokens=[1] * 6, sampling=LONG)
    state, ended = ran(submit(toy_state(config), first))
    said = ended["1"].tokens.tolist()
    assert len(said) == 20
    turn = Request(id="2", tokens=([1] * 6 + said)[:25], sampling=LONG)
    state, ended = ran(submit(state, turn))
    assert ended["2"].num_cached_tokens == 24
    assert ended["2"].tokens[0] == said[19]


def test_a_cached_block_that_a_failed_step_took_is_not_found_again() -> None:
    """Design, section 3: `overwrites` names cached blocks too, and `recover` forgets them."""
    config = toy_config(num_blocks=3, max_batched_tokens=12)
    once = SamplingParams(temperature=0, max_tokens=1)
    state, ended = ran(submit(toy_state(config), Request(id="1", tokens=[1] * 9, sampling=once)))
    state = submit(state, Request(id="2", tokens=[3] * 11, sampling=once))
    _, plan = schedule(config, state.host)
    assert set(plan.overwrites.blocks) == set(state.host.blocks.digest_of)
    device = tear(config, state.device, plan, state.blobs)
    state = replace(state, device=device, host=without_overwritten(state.host, plan.overwrites))
    state = abort(state, "2")
    _, again = ran(submit(state, Request(id="1", tokens=[1] * 9, sampling=once)))
    assert again["1"].num_cached_tokens == 0
    assert again["1"].tokens.tolist() == ended["1"].tokens.tolist()


def test_a_block_held_for_a_copy_does_not_end_the_branch() -> None:
    """SC-03: capacity is what the pool can hold, not what is free in the one step that copies."""
    config = toy_config(num_blocks=3)
    state = submit(toy_state(config), Request(id="p", tokens=[1] * 11, sampling=LONG))
    state, _ = toy_step(state)
    assert state.host.rows.num_computed_R.tolist() == [6]
    state = abort(branch(state, "p", ["c"]), "p")
    check_host(state.host, config.block_size)
    _, ended = ran(state)
    assert ended["c"].finish_reason == FinishReason.CAPACITY
    assert len(ended["c"].tokens) == 2, "11 prompt tokens and one more fit three blocks of four"


@pytest.mark.parametrize("gone", ["c", "d", "cd", "dc", "p", "pc", "pd", "pcd", "dcp"])
def test_a_branch_of_a_branch_may_lose_any_of_its_ancestors(gone: str) -> None:
    """MO-03: copies wait for copies; whoever leaves, the laws hold and nothing stays held."""
    config = toy_config()
    state = submit(toy_state(config), Request(id="p", tokens=[1] * 6, sampling=LONG))
    state, _ = toy_step(state)
    _, right = ran(state)
    state = branch(branch(state, "p", ["c"]), "c", ["d"])
    for request_id in gone:
        state = abort(state, request_id)
        check_host(state.host, config.block_size)
    state, ended = ran(state)
    assert set(ended) == set("pcd") - set(gone)
    for completion in ended.values():
        assert completion.tokens.tolist() == right["p"].tokens.tolist()
    assert state.host.blocks.num_free == config.num_blocks


def test_a_step_does_not_evict_what_it_also_admits() -> None:
    """9.4: a and b are resident, a the older one; requests for c and a are admitted together. b has
    to go, since evicting a would only upload it again."""
    state = toy_state(toy_config())
    once = SamplingParams(temperature=0, max_tokens=1)
    for name in "abc":
        state = deliver_loaded(state, loaded(name, name, 8, None))
    for name in "ab":
        state, _ = ran(submit(state, Request(id=name, tokens=[1], adapter=name, sampling=once)))
    for name in "ca":
        state = submit(state, Request(id=name, tokens=[1], adapter=name, sampling=once))
    _, plan = schedule(state.config, state.host)
    assert plan.row_ids == ("c", "a")
    assert [place.version for place in plan.uploads] == ["c"]


def failed(state: EngineState) -> EngineState:
    """The state after a step that wrote everything wrong, and `recover`."""
    _, plan = schedule(state.config, state.host)
    device = tear(state.config, state.device, plan, state.blobs)
    host = without_overwritten(state.host, plan.overwrites)
    check_host(host, state.config.block_size)
    return replace(state, host=host, device=device)


def test_a_held_block_that_a_failed_step_took_is_computed_again() -> None:
    """The failed plan preempted b and gave its half-filled block to a; then a is aborted."""
    config = toy_config(num_blocks=4, max_batched_tokens=12, max_rows=2)
    state = toy_state(config)
    state = submit(state, Request(id="a", tokens=[1] * 6, sampling=LONG))
    state = submit(state, Request(id="b", tokens=[3] * 5, sampling=LONG))
    _, right = ran(submit(toy_state(config), Request(id="b", tokens=[3] * 5, sampling=LONG)))
    while not (plan := schedule(config, state.host)[1]).num_preempted:
        state, _ = toy_step(state)
    assert plan.overwrites.blocks == (state.host.rows.tables[1][1],)
    _, ended = ran(abort(failed(state), "a"))
    assert ended["b"].tokens.tolist() == right["b"].tokens.tolist()


def test_preempted_requests_keep_their_order() -> None:
    """11.4: they wait in front, the one that came first before the other."""
    config = toy_config(num_blocks=4, max_batched_tokens=16, max_rows=4)
    state = toy_state(config)
    for i, request_id in enumerate("abcde"):
        state = submit(state, Request(id=request_id, tokens=[3 + i] * 4, sampling=LONG))
    state, _ = toy_step(state)
    assert state.host.rows.ids == ("a", "b", "c", "d")
    host, plan = schedule(config, state.host)
    assert (plan.row_ids, plan.num_preempted) == (("a", "b"), 2)
    assert host.waiting == ("c", "d", "e")


def test_a_row_whose_adapter_a_failed_step_took_is_computed_again() -> None:
    """x has outgrown the pool and ends in the plan, which gives its adapter's place to y's. After
    the failure x is live again, so it waits until its adapter is back."""
    config = toy_config(num_blocks=2, max_active_adapters=1, lora_rows=16)
    state = toy_state(config)
    for name in "xy":
        state = deliver_loaded(state, loaded(name, name, 8, None))
        request = Request(id=name, tokens=[1] * 7, adapter=name, sampling=LONG)
        state = submit(state, request)
    _, right = ran(state)
    while not (plan := schedule(config, state.host)[1]).ended:
        state, _ = toy_step(state)
    assert plan.overwrites.adapters == ("x",)
    _, ended = ran(failed(state))
    assert {i: c.tokens.tolist() for i, c in ended.items()} == {
        i: c.tokens.tolist() for i, c in right.items()
    }


def made_up(
    config: Config, state: EngineState, pieces: tuple[bytes, ...], tokens: list[int]
) -> tuple[EngineState, list[Outputs]]:
    """Steps whose tokens are given; nothing is computed."""
    state = replace(state, config=replace(config, tokens=TokenTable(pieces)))
    news = []
    for token in tokens:
        host, plan = schedule(state.config, state.host)
        result = StepResult(token_S=frozen([token]), logprob_S=frozen([-1.0], np.float32))
        host, outputs = commit(state.config, host, plan, result)
        state = replace(state, host=host)
        news.append(outputs)
    return state, news


PIECES = ("x", "é", "y", "ab", *"abcdefgh")


@pytest.mark.parametrize(
    ("words", "tokens", "want"),
    [
        ({"stop": ("é",), "include_stop": True}, [0, 1], ("xé", "é")),
        ({"stop": ("éy",), "include_stop": True}, [0, 1, 2], ("xéy", "éy")),
        ({"stop": ("b",), "include_stop": True}, [0, 3], ("xab", "b")),
        ({"stop": ("ab",), "stop_ids": (3,)}, [0, 3], ("x", "ab")),
        ({"stop": ("b",), "stop_ids": (3,)}, [0, 3], ("xa", "b")),
    ],
)
def test_where_a_stop_string_ends_the_text(
    words: dict[str, Any], tokens: list[int], want: tuple[str, str]
) -> None:
    """SL-01: behind its last byte where it is kept; it goes before a stop id of the same token."""
    config = toy_config()
    state = submit(toy_state(config), Request(id="a", tokens=[1], sampling=SamplingParams(**words)))
    _, news = made_up(config, state, tuple(p.encode() for p in PIECES), tokens)
    (completion,) = news[-1].finished
    assert (completion.text, completion.stop) == want


def test_a_branch_streams_on_from_where_its_parent_stood() -> None:
    """SL-03: parent and branch are told every byte of their texts once, the shared ones by the
    parent."""
    config = toy_config()
    streams = SamplingParams(stream=True, max_tokens=9, temperature=0, ignore_eos=True)
    state = submit(toy_state(config), Request(id="p", tokens=[1, 3], sampling=streams))
    told: dict[str, str] = {"p": "", "c": ""}
    shared, ended = 0, {}
    while not state.host.idle:
        if not shared and len(told["p"]) >= 3:
            state, shared = branch(state, "p", ["c"]), len(told["p"])
        state, outputs = toy_step(state)
        for key, text in outputs.texts:
            told[key] += text
        ended |= {c.id: c for c in outputs.finished}
    assert shared
    assert told["p"] == ended["p"].text
    assert told["c"] == ended["c"].text[shared:] != ""


@pytest.mark.parametrize("layers", [(), (0,)])
def test_a_preempted_row_finds_its_blocks_once_its_prompt_is_scored(layers: tuple[int]) -> None:
    """PC-04: what was told need not be computed for that again."""
    config = toy_config(num_blocks=12, max_batched_tokens=12)
    sampling = replace(LONG, prompt_logprobs=1, max_tokens=9)
    request = Request(id="a", tokens=[1] * 10, sampling=sampling, hidden_layers=layers)
    state = submit(toy_state(config), request)
    _, right = ran(state)
    while state.host.rows.num_tokens_R.tolist() != [14]:
        state, _ = toy_step(state)
    record = progress(state.host, "a")
    host = replace(abort(state, "a").host, requests=Map({"a": record}), waiting=("a",))
    state = replace(state, host=host)
    _, plan = schedule(config, state.host)
    assert plan.num_hit_tokens == 12
    _, ended = ran(state)
    assert ended["a"].tokens.tolist() == right["a"].tokens.tolist()
    assert ended["a"].prompt_logprobs[1:].tolist() == right["a"].prompt_logprobs[1:].tolist()
    for layer in layers:
        got, want = ended["a"].hidden_states[layer], right["a"].hidden_states[layer]
        assert got.tolist() == want.tolist()


def test_a_scored_prompt_may_fill_the_pool() -> None:
    """SC-03: nothing is generated, so no block more is needed."""
    config = toy_config(num_blocks=2)
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    _, ended = ran(submit(toy_state(config), Request(id="a", tokens=[1] * 8, sampling=score)))
    assert ended["a"].finish_reason == FinishReason.LENGTH
    with pytest.raises(RequestError, match="9 prompt tokens need 3 blocks of 4"):
        submit(toy_state(config), Request(id="a", tokens=[1] * 9, sampling=score))


@pytest.mark.parametrize("place", range(8))
def test_embeddings_that_differ_anywhere_share_no_block_from_there(place: int) -> None:
    """AU-03."""
    config, rows = toy_config(), torch.zeros(9, 8)
    other = rows.clone()
    other[place] = 1
    state, _ = ran(submit(toy_state(config), Request(id="a", prompt_embeds=rows, sampling=LONG)))
    _, ended = ran(submit(state, Request(id="b", prompt_embeds=other, sampling=LONG)))
    assert ended["b"].num_cached_tokens == place // 4 * 4


def test_what_rows_ask_for_moves_into_records_a_chunk_a_block() -> None:
    """A chunk for each token would be copied with every token: quadratic in the answer's length."""
    config = toy_config(num_blocks=12)
    sampling = replace(LONG, logprobs=1)
    request = Request(id="a", tokens=[1] * 3, sampling=sampling, hidden_layers=(0,))
    state = submit(toy_state(config), request)
    for _ in range(18):
        state, _ = toy_step(state)
        record = state.host.requests["a"]
        assert len(record.tops) <= 1 + len(record.generated) // 4
        assert len(record.hidden) <= 1 + len(record.generated) // 4
        assert len(state.host.rows.tail_tops[0]) < 4
        assert len(state.host.rows.tail_hidden[0]) < 5
    assert len(progress(state.host, "a").generated) == 18
