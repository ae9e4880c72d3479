"""The encoder's budget in the schedule: the worked cases of spec/multimodal.md, 10.2 and 10.3.

Where a case shows a fault of vLLM (W1 to W5, W7, W8) the test asserts what is required and its name
or comment tells both values.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.encoding import EncoderChoice, plan_encoder
from purestep.engine.policy import by_priority
from purestep.engine.requests import abort, submit
from purestep.engine.schedule import schedule
from purestep.simulation.device import execute, toy_step
from purestep.simulation.media import toy_feature, with_media
from purestep.simulation.world import toy_config, toy_state
from purestep.state.checks import check_host
from purestep.state.encoder import (
    EncoderLedger,
    computed,
    empty_encoder,
    hold,
    let_go,
    planned,
    shrunk,
    told,
)
from purestep.state.engine import EngineState
from purestep.state.media import Feature, overlap_groups
from purestep.state.request import Request
from purestep.state.sampling import SamplingParams


def item(name: str, offset: int, length: int, mask: str | None = None) -> Feature:
    return Feature(
        modality="image",
        digest=name,
        identifier=name,
        offset=offset,
        length=length,
        is_embed=None if mask is None else np.array([c == "1" for c in mask]),
    )


A, B = item("A", 10, 30), item("B", 50, 40)
TWICE = (item("A", 0, 10), item("A", 20, 10))
MASKED = (item("A", 10, 6, "001110"),)


def ledger_with(capacity: int = 100, **outputs: int) -> EncoderLedger:
    """Computed outputs that nobody refers to."""
    ledger = empty_encoder(capacity)
    for name, size in outputs.items():
        ledger = computed(planned(ledger, name, size), [name])
    return ledger


def planned_for(
    features: Sequence[Feature], start: int, count: int, budget: int, **more: Any
) -> EncoderChoice:
    return plan_encoder(features, start, count, budget=budget, **{"ledger": ledger_with(), **more})


@pytest.mark.parametrize(
    ("features", "window", "more", "want"),
    [
        ((A, B), (0, 100, 100), {}, ((0, 1), 100, 30)),
        ((A, B), (0, 100, 60), {}, ((0,), 50, 30)),
        ((A, B), (0, 100, 20), {}, ((), 10, 20)),
        ((A, B), (0, 100, 100), {"ledger": ledger_with(60)}, ((0,), 50, 70)),
        ((A,), (16, 40, 0), {}, ((), 0, 0)),
        ((A,), (0, 20, 100), {}, ((0,), 20, 70)),
        ((A,), (20, 40, 100), {"ledger": ledger_with(A=30)}, ((), 40, 100)),
        ((A,), (0, 20, 100), {"atomic": True}, ((), 10, 100)),
        ((A,), (0, 40, 100), {"atomic": True}, ((0,), 40, 70)),
        # W4: vLLM computes 20 tokens from the item's beginning on, and from a cached item.
        ((A,), (10, 20, 100), {"atomic": True}, ((), 0, 100)),
        ((A,), (0, 20, 100), {"atomic": True, "ledger": ledger_with(A=30)}, ((), 10, 100)),
        ((A,), (0, 20, 100), {"atomic": True, "shift": 1}, ((), 9, 100)),
        ((A,), (0, 10, 100), {"shift": 1}, ((), 10, 100)),
        ((A,), (0, 10, 0), {"shift": 1}, ((), 9, 0)),
        # W1: vLLM computes nothing at 9, for ever.
        ((A,), (9, 1, 0), {"shift": 1}, ((), 1, 0)),
        (MASKED, (0, 12, 100), {}, ((), 12, 100)),
        # W7: one encoding; vLLM refers to it for the first item alone.
        (TWICE, (0, 40, 100), {}, ((0,), 40, 90)),
    ],
)
def test_worked_cases(
    features: tuple[Feature, ...],
    window: tuple[int, int, int],
    more: dict[str, Any],
    want: tuple[tuple[int, ...], int, int],
) -> None:
    """10.2: (start, count, budget) -> (items to encode, count', budget')."""
    choice = planned_for(features, *window, **more)
    assert (choice.encode, choice.count, choice.budget) == want


def test_an_item_that_is_there_twice_has_two_references() -> None:
    """W7: until the second is passed, not the first."""
    choice = planned_for(TWICE, 0, 40, 100)
    assert (choice.encode, choice.found) == ((0,), (1,))


def test_looking_changes_nothing() -> None:
    """W8: B is needed by the look-ahead alone, so A stays, where vLLM evicts A for it; and it is
    not asked for again by others in this step."""
    ledger = ledger_with(10, A=8)
    choice = planned_for((item("B", 10, 8),), 0, 10, 100, ledger=ledger, shift=1)
    assert choice == EncoderChoice(count=10, budget=100)
    assert set(ledger.outputs) == {"A"}


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_two_items_and_a_look_ahead_go_on(gap: int) -> None:
    """W1: two items of 6 and a cache of 10. vLLM stops for ever at 5 without a gap, at 6 with one
    of 1."""
    features = (item("A", 0, 6), item("B", 6 + gap, 6))
    assert steps_of(features, 20, capacity=10, budget=10, most=20, shift=1) <= 5


def test_an_item_as_long_as_a_step_goes_on() -> None:
    """W2: 32 tokens of 32, not to be split, with a look-ahead. vLLM stops for ever at 9."""
    counts = steps_of((item("A", 10, 32),), 50, 100, 32, most=32, shift=1, atomic=True)
    assert counts <= 4


def test_overlapping_items_larger_than_the_cache_pass_it_by() -> None:
    """W3: 8 and 4 embeddings in one range, a cache of 10. vLLM holds the first and never gets the
    second."""
    features = (item("V", 2, 12, "110110110110"), item("S", 2, 12, "001001001001"))
    choice = planned_for(features, 0, 8, 12, ledger=ledger_with(10))
    assert (choice.passing, choice.encode, choice.count) == ((0, 1), (), 8)
    assert planned_for(features, 0, 8, 11, ledger=ledger_with(10)).count == 2
    assert steps_of(features, 16, capacity=10, budget=12, most=4) == 4


def steps_of(
    features: Sequence[Feature],
    num_tokens: int,
    capacity: int,
    budget: int,
    most: int,
    **flags: Any,
) -> int:
    """How many steps of `most` tokens a prompt takes alone."""
    ledger, at, steps = empty_encoder(capacity), 0, 0
    while at < num_tokens:
        count = min(most, num_tokens - at)
        choice = plan_encoder(features, at, count, ledger=ledger, budget=budget, **flags)
        assert choice.count >= 1, f"no token after {steps} steps, at {at}"
        for i in choice.encode:
            name, size = features[i].identifier, features[i].num_embeds
            ledger = hold(planned(ledger, name, size), name, ("r", i))
        for i in choice.found:
            ledger = hold(ledger, features[i].identifier, ("r", i))
        at, steps = at + choice.count, steps + 1
        passed = [(f.identifier, ("r", i)) for i, f in enumerate(features) if f.end <= at]
        ledger = let_go(ledger, passed)
        assert ledger.held <= capacity
        ledger = told(shrunk(ledger))[0]
    return steps


SHAPES = st.tuples(
    st.integers(0, 4), st.integers(0, 24), st.sampled_from((0, 0, 1)), st.sampled_from((0, 2))
)


@given(
    shapes=st.lists(SHAPES, max_size=4),
    capacity=st.integers(0, 20),
    spare=st.integers(0, 6),
    most=st.integers(1, 12),
    shift=st.sampled_from((0, 1)),
    atomic=st.booleans(),
)
def test_a_request_alone_always_goes_on(
    shapes: list[tuple[int, int, int, int]],
    capacity: int,
    spare: int,
    most: int,
    shift: int,
    atomic: bool,
) -> None:
    """10.5, for whatever items submission lets pass: their groups fit the budget, and a step where
    they may not be split."""
    words = with_media(toy_config(), {"tokens": [1] * 36}, shapes)
    features = sorted(words["features"], key=lambda f: f.offset)
    groups = overlap_groups(features)
    sizes = [
        sum({features[i].identifier: features[i].num_embeds for i in g}.values()) for g in groups
    ]
    spans = [max(features[i].end for i in g) - features[g[0]].offset for g in groups]
    most = max([most, *spans]) if atomic else most
    budget = max([*sizes, 0]) + spare
    flags = {"shift": shift, "atomic": atomic}
    steps = steps_of(features, 36, capacity, budget, most, **flags)
    assert steps <= 36


# --- the whole schedule

LONG = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def media_config(**changes: Any) -> Config:
    budgets = {"max_encoder_tokens": 9, "encoder_cache_tokens": 9, "max_batched_tokens": 12}
    return toy_config(**{**budgets, "num_blocks": 20, **changes})


def asked(name: str, length: int, *features: Feature, **words: Any) -> Request:
    tokens = [1 + i % 3 for i in range(length)]
    return Request(id=name, tokens=tokens, features=features, sampling=LONG, **words)


def submitted(config: Config, *requests: Request) -> EngineState:
    state = toy_state(config)
    for request in requests:
        state = submit(state, request)
    return state


def drained(state: EngineState, **options: Any) -> int:
    steps = 0
    while not state.host.idle:
        state, _ = toy_step(state, **options)
        check_host(state.host, state.config.block_size)
        steps += 1
        assert steps < 300
    return steps


def test_a_row_that_is_preempted_leaves_no_encoding_behind() -> None:
    """W5: b is planned to be encoded and then makes way, within one step. vLLM takes its output for
    cached, and dies once it is asked for."""
    config = media_config(num_blocks=7, max_batched_tokens=8, max_rows=2, prefix_caching=False)
    state = submitted(
        config,
        asked("a", 11, priority=0),
        asked("b", 12, toy_feature(3, 5), priority=1),
    )
    seen = False
    for _ in range(60):
        if state.host.idle:
            break
        host, plan = schedule(config, state.host, by_priority)
        names = {span.identifier for span in plan.merges}
        assert {i.identifier for i in plan.encodes} <= names
        if plan.num_preempted and "b" in host.waiting:
            seen = True
            assert "picture 3" not in host.encoder.holders
        state, _ = toy_step(state, policy=by_priority)
    assert state.host.idle
    assert seen


def test_a_request_of_the_same_name_keeps_what_it_refers_to() -> None:
    """The one before it, aborted with its plan in flight, had come past the item."""
    config = media_config(max_batched_tokens=8)
    state, _ = toy_step(submitted(config, asked("x", 12, toy_feature(3, 1))))
    host, plan = schedule(config, state.host)
    device, result = execute(config, state.device, plan, state.blobs)
    state = abort(replace(state, host=host, device=device), "x")
    state = submit(state, asked("x", 20, toy_feature(3, 3)))
    host, _ = schedule(config, state.host)
    assert host.rows.num_computed_R.tolist() == [8], "within the item"
    host, _ = commit(config, host, plan, result)
    assert host.encoder.holders["picture 3"] == (("x", 0),)


def test_two_live_requests_encode_a_shared_image_once() -> None:
    state = submitted(
        media_config(), asked("a", 8, toy_feature(3, 1)), asked("b", 9, toy_feature(3, 2))
    )
    encodes = []
    while not state.host.idle:
        state, _ = toy_step(state, lambda plan, result: encodes.extend(plan.encodes))
    assert [item.identifier for item in encodes] == ["picture 3"]


def test_a_request_that_waits_for_its_item_lets_text_pass() -> None:
    """W32: b's item finds no budget beside a's; c needs none and comes in, d needs some and does
    not go before b."""
    config = media_config(max_rows=4, max_batched_tokens=40)
    state = submitted(
        config,
        asked("a", 10, toy_feature(3, 0)),
        asked("b", 10, toy_feature(4, 0)),
        asked("c", 5),
        asked("d", 5, toy_feature(0, 0)),
    )
    _, plan = schedule(config, state.host)
    assert plan.row_ids == ("a", "c")
    drained(state)


def test_items_that_are_not_split_do_not_starve_behind_decoding_rows() -> None:
    """An item as long as a step: others that decode would leave it too few tokens for ever."""
    config = media_config(
        disable_chunked_mm_input=True, max_batched_tokens=9, max_rows=3, num_blocks=20
    )
    state = submitted(config, asked("t", 3), asked("a", 12, toy_feature(4, 0)))
    for number in range(4):
        state = submit(state, asked(f"t{number}", 2))
    started = None
    for number in range(30):
        state, _ = toy_step(state)
        if "a" in state.host.rows.ids:
            started = number
            break
    assert started is not None
    assert started <= 5, "only who came before it was waited for"


def test_decoding_rows_wait_for_no_more_than_the_budget() -> None:
    """W26: however many items arrive at once, each step encodes at most what the user allows, and
    rows that decode get a token in each."""
    config = media_config(max_batched_tokens=30, max_rows=4, encoder_cache_tokens=40)
    state = submitted(config, asked("text", 2))
    state, _ = toy_step(state)
    items = [toy_feature(picture, offset) for picture, offset in ((4, 0), (3, 9), (2, 15))]
    for name in "ab":
        state = submit(state, asked(name, 20, *items, salt=name))
    while "text" in state.host.requests:
        sizes: list[int] = []
        state, outputs = toy_step(
            state,
            lambda plan, _, sizes=sizes: sizes.extend(item.num_embeds for item in plan.encodes),
        )
        assert "text" in outputs.ids
        assert sum(sizes) <= 9


def test_a_pure_decode_step_tells_nothing_of_media() -> None:
    """W27."""
    state = submitted(media_config(), asked("a", 8, toy_feature(3, 1)))
    state, _ = toy_step(state)
    _, plan = schedule(state.config, state.host)
    assert plan.sampled_R.all()
    assert (plan.encodes, plan.merges, plan.drops) == ((), (), ())
