"""The law of design.md, section 6, on the whole host side: whatever happens in whatever order,

    tokens(engine) == tokens(each request alone, infinite memory, one chunk, no cache)

and every state ever seen keeps its value, obeys its laws and survives the canonical form
(multi_lora.md, 21: 1 to 5, 14, 16 to 20; cases SC-01, SC-03, SC-04, SC-09, LS-01, LS-03, LS-05,
LS-08, PC-01, PC-03, DT-03, MO-03).
"""

import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from immutables import Map

from purestep.engine.adapters import deliver_loaded
from purestep.engine.branch import branch
from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.policy import Policy, by_priority, fcfs
from purestep.engine.requests import abort, submit
from purestep.engine.schedule import schedule
from purestep.engine.step import without_overwritten
from purestep.simulation.device import tear, toy_step
from purestep.simulation.machine import Machine
from purestep.simulation.strategies import (
    config_changes,
    known_adapters,
    names,
    picks,
    versions,
    words,
)
from purestep.simulation.world import loaded, toy_config, toy_state
from purestep.state.canonical import digest, from_plain, to_plain
from purestep.state.checks import check_host
from purestep.state.engine import EngineState, progress
from purestep.state.errors import RequestError
from purestep.state.plan import Outputs, StepResult
from purestep.state.request import Completion, FinishReason, Request, frozen
from purestep.state.sampling import SamplingParams
from purestep.state.text import TokenTable


class HostMachine(RuleBasedStateMachine):
    """Everything a caller can do, in any order, on a pool that is far too small."""

    @initialize(
        changes=config_changes,
        known=known_adapters,
        policy=st.sampled_from((fcfs, fcfs, by_priority)),
    )
    def begin(self, changes: dict[str, Any], known: dict[str, str | None], policy: Policy) -> None:
        self.machine = Machine(toy_config(**changes), policy)
        self.number = 0
        for name, version in known.items():
            self.machine.do(("register", {"name": name}))
            if version is not None:
                self.machine.do(("load", {"name": name, "version": version, "again": True}))

    @rule(several=st.lists(words, min_size=1, max_size=3), twice=st.booleans())
    def submit(self, several: list[dict[str, Any]], twice: bool) -> None:
        for chosen in several:
            self.number += 1
            for _ in range(1 + twice):
                self.machine.do(("submit", {"id": f"r{self.number}", **chosen}))

    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.machine.do(("step", {}))

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.machine.do(("abort", {"pick": pick}))

    @rule(pick=picks, count=st.integers(1, 2))
    def branch(self, pick: int, count: int) -> None:
        self.machine.do(("branch", {"pick": pick, "count": count}))

    @rule(name=names, version=versions, again=st.booleans())
    def load(self, name: str, version: str, again: bool) -> None:
        self.machine.do(("load", {"name": name, "version": version, "again": again}))

    @precondition(lambda self: self.machine.asked)
    @rule(pick=picks, version=versions, works=st.booleans())
    def a_load_comes_back(self, pick: int, version: str, works: bool) -> None:
        returns = ("load_returns", {"pick": pick, "version": version})
        self.machine.do(returns if works else ("load_fails", {"pick": pick}))

    @rule(name=names, running=st.sampled_from(("drain", "abort", "refuse")))
    def unload(self, name: str, running: str) -> None:
        self.machine.do(("unload", {"name": name, "running": running}))

    @rule(name=names)
    def pin_or_unpin(self, name: str) -> None:
        self.machine.do(("pin", {"name": name}))

    @rule(kind=st.sampled_from(("flush", "restore", "fail")))
    def whole_state(self, kind: str) -> None:
        self.machine.do((kind, {}))

    @rule(pick=picks, kind=st.sampled_from(("spoil", "misfit")))
    def results_are_void(self, pick: int, kind: str) -> None:
        self.machine.do((kind, {"pick": pick}))

    @rule()
    def other_weights(self) -> None:
        self.number += 1
        self.machine.do(("adopt", {"weights": f"weights {self.number}"}))

    @rule(num_blocks=st.integers(4, 14))
    def fork(self, num_blocks: int) -> None:
        self.machine.do(("fork", {"num_blocks": num_blocks}))

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.machine.drain()
        kept = self.machine.kept
        for host, name in kept[:: max(1, len(kept) // 5)]:
            text = json.dumps(to_plain(host))
            assert digest(from_plain(json.loads(text))) == name


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


def test_a_block_that_a_plan_in_flight_copies_is_held_though_its_row_has_no_token_in_it() -> None:
    machine = Machine(toy_config(max_batched_tokens=3, max_rows=3))
    sampling = {"temperature": 0.0, "max_tokens": 6}
    machine.do(("submit", {"id": "p", "tokens": [1] * 9, "embeds": None, "sampling": sampling}))
    machine.do(("step", {}))
    machine.do(("branch", {"pick": 0, "count": 1}))
    machine.do(("ahead", {}))
    plan = machine.state.host.in_flight[0]
    assert plan.copies
    assert plan.row_ids == ("p",)
    machine.do(("abort", {"pick": 1}))
    machine.drain()


@pytest.mark.parametrize("kind", ["spoil", "misfit"])
def test_what_left_in_flight_is_not_found_if_its_step_went_wrong(kind: str) -> None:
    """Its blocks were findable from when they were planned, and nobody else ends with an error."""
    machine = Machine(toy_config(max_batched_tokens=20, max_encoder_tokens=9))
    item = {"media": [(4, 2, 0, 0)] if kind == "misfit" else [], "embeds": None}
    words = {"tokens": [1] * 13, "sampling": {"temperature": 0.0, "max_tokens": 4}, **item}
    machine.do(("submit", {"id": "a", **words}))
    machine.do(("ahead", {}))
    machine.do(("abort", {"pick": 0}))
    machine.do((kind, {"pick": 0}))
    machine.do(("step", {}))
    machine.do(("submit", {"id": "b", **words}))
    machine.drain()
    assert not machine.live


def test_an_output_of_another_size_ends_those_whose_encoder_has_an_adapter() -> None:
    """Such outputs have names of their own."""
    machine = Machine(toy_config(max_batched_tokens=26, max_encoder_tokens=18))
    machine.do(("load", {"name": "fr", "version": "v2", "again": False}))
    sampling = {"temperature": 0.0, "max_tokens": 4}
    words = {"tokens": [1] * 13, "media": [(4, 2, 0, 0)], "embeds": None, "sampling": sampling}
    machine.do(("submit", {"id": "a", "adapter": "fr", **words}))
    machine.do(("submit", {"id": "b", **words}))
    machine.do(("ahead", {}))
    assert len(machine.state.host.in_flight[0].encodes) == 2
    machine.do(("misfit", {"pick": 0}))
    machine.do(("step", {}))
    assert len(machine.live) == 1, "one of the two has the item as it should be"
    machine.drain()


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
        num_full = len(state.host.rows.sealed[0])
        assert len(record.tops) <= num_full
        assert len(record.hidden) <= num_full
        assert len(state.host.rows.tail_tops[0]) < 4
        assert len(state.host.rows.tail_hidden[0]) < 5
    assert len(progress(state.host, "a").generated) == 18
