"""What a request may say: typed refusals that name field, value and limit; nothing half-accepted.

Cases SC-01, SC-05, SC-06, SL-05, SL-09, LS-04, AU-05, BC-09.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from purestep.engine.requests import submit
from purestep.simulation.device import toy_step
from purestep.simulation.world import VOCAB, toy_config, toy_state
from purestep.state.canonical import digest
from purestep.state.engine import EngineState
from purestep.state.errors import RequestError, SamplingError, UnknownAdapterError
from purestep.state.request import (
    Completion,
    FinishReason,
    Request,
    SamplingParams,
    check_sampling,
    checked_tokens,
)

NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # an int that no float can hold

# field -> (refused: (value, words of the message)), accepted
SAMPLING: dict[str, tuple[list[tuple[Any, str]], list[Any]]] = {
    "temperature": (
        [(v, "finite and at least 0") for v in (-1e-9, -1, NAN, INF, -INF, "1", None)],
        [0, 0.0, 1e-45, 1e-12, 1.0, 2, 1e6],
    ),
    "top_k": (
        [(v, "0 for no limit or at least 1") for v in (-1, 1.0, "3", None, True)],
        [0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1],
    ),
    "top_p": (
        [(v, "above 0 and at most 1") for v in (0, 0.0, -0.1, 1.0001, NAN, INF, "0.5", None)],
        [1e-12, 0.5, 1, 1.0],
    ),
    "seed": (
        [(v, "0..2**64-1") for v in (-1, 2**64, 1.0, "1", True)],
        [None, 0, 2**63, 2**64 - 1],
    ),
    "max_tokens": (
        [(v, "at least 1") for v in (0, -1, 1.0, "3", None, True)],
        [1, 2**31, 2**40],
    ),
    "stop": (
        [(v, "non-empty strings") for v in ("", "a", ("",), ("a", ""), (1,), (b"a",), (None,))],
        [(), ("a",), ("a", "é", "\U0001f600"), ("a" * 1000,), ("a", "a")],
    ),
    "stop_ids": (
        [(v, f"in 0..{VOCAB - 1}") for v in ((-1,), (VOCAB,), (1.0,), ("a",), (0, VOCAB), (True,))],
        [(), (0,), (VOCAB - 1,), (3, 3)],
    ),
    "ignore_eos": ([], [False, True]),
}
# Accepted or refused by a SamplingError, but never an accident later on.
DOUBTFUL = [
    ("temperature", HUGE),
    ("temperature", 1e39),
    ("temperature", True),
    ("temperature", np.float32(0.5)),
    ("temperature", np.float64(0.5)),
    ("top_p", np.float64(0.5)),
    ("top_k", 2**31),
    ("top_k", 2**70),
    ("top_k", np.int64(3)),
    ("seed", np.uint64(3)),
    ("max_tokens", np.int32(3)),
    ("max_tokens", HUGE),
    ("stop", ["a"]),
    ("stop", None),
    ("stop", 5),
    ("stop", ("\ud800",)),
    ("stop", {"a"}),
    ("stop_ids", [3]),
    ("stop_ids", None),
    ("stop_ids", 5),
    ("stop_ids", "3"),
    ("stop_ids", (np.int64(3),)),
    ("stop_ids", np.array([3])),
    ("ignore_eos", "no"),
    ("ignore_eos", None),
]


def with_field(name: str, value: Any) -> Request:
    return Request(id="r7", tokens=[1, 3], sampling=SamplingParams(**{name: value}))


def test_every_field_is_tested() -> None:
    """A new field needs rows here, and then it cannot be silently ignored (SL-09)."""
    assert {f.name for f in fields(SamplingParams)} == set(SAMPLING)
    assert {f.name for f in fields(Request)} == {"id", "tokens", "adapter", "salt", "sampling"}


REFUSED = [(n, v, w) for n, (bad, _) in SAMPLING.items() for v, w in bad]
ACCEPTED = [(n, v) for n, (_, good) in SAMPLING.items() for v in good]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_bad_sampling_is_refused_by_name_value_and_limit(name: str, value: Any, words: str) -> None:
    with pytest.raises(SamplingError) as caught:
        check_sampling(with_field(name, value), VOCAB, has_text=True)
    assert str(caught.value).startswith(f"request 'r7': {name}={value!r}, but ")
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_what_is_accepted_works(name: str, value: Any) -> None:
    """Boundary values go through a step, and the state keeps its digest."""
    check_sampling(with_field(name, value), VOCAB, has_text=True)
    assert runs(with_field(name, value))


@pytest.mark.parametrize(("name", "value"), DOUBTFUL)
def test_odd_values_are_refused_or_work(name: str, value: Any) -> None:
    """A value that passes `submit` and breaks a later step hurts every other request."""
    try:
        submit(toy_state(toy_config()), with_field(name, value))
    except SamplingError as refusal:
        words = str(refusal)
    else:
        assert runs(with_field(name, value))
        return
    assert name in words


def runs(request: Request) -> bool:
    state = submit(toy_state(toy_config()), request)
    digest(state.host)
    with np.errstate(over="raise"):
        state, outputs = toy_step(state)
    digest(state.host)
    return outputs.ids == (request.id,)


@pytest.mark.parametrize(("name", "value"), [("top_k", 2), ("top_p", 0.5)])
def test_greedy_refuses_what_would_have_no_effect(name: str, value: Any) -> None:
    request = Request(id="r7", tokens=[1], sampling=SamplingParams(temperature=0, **{name: value}))
    with pytest.raises(SamplingError, match=f"{name}=.*temperature=0 is greedy"):
        check_sampling(request, VOCAB, has_text=True)


def test_stop_strings_need_a_token_table() -> None:
    request = with_field("stop", ("a",))
    with pytest.raises(SamplingError, match=r"stop=\('a',\), but .*no token table.*stop_ids"):
        check_sampling(request, VOCAB, has_text=False)
    check_sampling(with_field("stop_ids", (3,)), VOCAB, has_text=False)


BAD_PROMPTS = [
    ([], "the prompt is empty; at least 1 token"),
    (np.zeros(0, np.int64), "the prompt is empty"),
    ([0, -1, 3], "token id -1 at position 1 is outside 0..11"),
    ([0, 1, VOCAB], "token id 12 at position 2 is outside 0..11"),
    ([2**62], f"token id {2**62} at position 0"),
    ([2**70], "flat sequence of integers"),
    ([1.0], "flat sequence of integers, got shape (1,) of float64"),
    ([[1, 2]], "flat sequence of integers, got shape (1, 2)"),
    ([[1], [2, 3]], "flat sequence of integers"),
    (5, "flat sequence of integers, got shape ()"),
    (None, "flat sequence of integers"),
    ("ab", "flat sequence of integers"),
    (b"ab", "flat sequence of integers"),
    (["a"], "flat sequence of integers"),
    ([True], "flat sequence of integers"),
    ([None], "flat sequence of integers"),
    ([1] * 28, "a prompt of 28 tokens and one generated token exceed max_context=28"),
    ([1] * 200, "a prompt of 200 tokens and one generated token exceed max_context=28"),
]


@pytest.mark.parametrize(("tokens", "words"), BAD_PROMPTS)
def test_bad_prompts_are_refused(tokens: Any, words: str) -> None:
    """SC-05, SC-06: the message says what is wrong; the state stays as it was."""
    state = submit(toy_state(toy_config()), Request(id="other", tokens=[1]))
    before = digest(state.host)
    with pytest.raises(RequestError) as caught:
        submit(state, Request(id="r7", tokens=tokens))
    assert str(caught.value).startswith("request 'r7': ")
    assert words in str(caught.value)
    assert digest(state.host) == before


@pytest.mark.parametrize(
    "tokens",
    [
        [0],
        [VOCAB - 1],
        (1, 2),
        range(3),
        [1] * 27,
        np.array([1, 2], np.uint64),
        np.array([1, 2], ">i2"),
        np.array([1, 9, 2, 9])[::2],
        torch.tensor([1, 2]),
    ],
)
def test_good_prompts_are_copied_and_locked(tokens: Any) -> None:
    checked = checked_tokens(Request(id="r", tokens=tokens), VOCAB, 28)
    assert checked.tolist() == [int(t) for t in tokens]
    assert checked.dtype == np.int32
    assert not checked.flags.writeable
    assert not np.shares_memory(checked, np.asarray(tokens))


def test_the_callers_array_may_change_afterwards() -> None:
    tokens = np.array([1, 3, 4], np.int32)
    state = submit(toy_state(toy_config()), Request(id="r", tokens=tokens))
    before = digest(state.host)
    tokens[:] = 0
    assert digest(state.host) == before


def test_a_prompt_must_fit_the_pool_with_one_token_more() -> None:
    """SC-03: refused at submit, with the needed and the available blocks."""
    state = toy_state(toy_config(num_blocks=2))
    submit(state, Request(id="r", tokens=[1] * 7))
    with pytest.raises(RequestError, match=r"'r': 8 prompt tokens .* need 3 blocks of 4.*=2"):
        submit(state, Request(id="r", tokens=[1] * 8))


ODD_REQUESTS = [
    {"id": ""},
    {"id": None},
    {"id": 5},
    {"id": b"x"},
    {"id": "\ud800"},
    {"salt": 5},
    {"salt": b"x"},
    {"salt": "\ud800"},
    {"sampling": None},
    {"sampling": {"temperature": 1.0}},
]


@pytest.mark.parametrize("odd", ODD_REQUESTS)
def test_odd_ids_salts_and_params_are_refused(odd: dict[str, Any]) -> None:
    """BC-09: whatever JSON can hold, a lone surrogate too, ends in a typed refusal."""
    words = {"id": "r7", "tokens": [1], **odd}
    with pytest.raises(RequestError):
        submit(toy_state(toy_config()), Request(**words))


@pytest.mark.parametrize("salt", ["", "x", "é\0"])
def test_any_text_may_be_a_salt(salt: str) -> None:
    assert runs(Request(id="r", tokens=[1], salt=salt))


@pytest.mark.parametrize("adapter", ["", "nobody", 5, ["a"], b"a"])
def test_unknown_adapters_are_refused(adapter: Any) -> None:
    """LS-04."""
    with pytest.raises(UnknownAdapterError, match="request 'r': no adapter is called"):
        submit(toy_state(toy_config()), Request(id="r", tokens=[1], adapter=adapter))


def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    """SC-01."""
    once = SamplingParams(max_tokens=1)
    state = submit(toy_state(toy_config()), Request(id="x", tokens=[1], sampling=once))
    with pytest.raises(RequestError, match="'x': a live request has this id"):
        submit(state, Request(id="x", tokens=[3], sampling=once))
    state, first = toy_step(state)
    state, second = toy_step(submit(state, Request(id="x", tokens=[3], sampling=once)))
    assert [c.id for c in (*first.finished, *second.finished)] == ["x", "x"]
    (alone,) = run_alone(Request(id="x", tokens=[3], sampling=once))
    assert second.finished[0].tokens.tolist() == alone.tokens.tolist()


def run_alone(request: Request) -> list[Completion]:
    state: EngineState = submit(toy_state(toy_config()), request)
    found: list[Completion] = []
    while not state.host.idle:
        state, outputs = toy_step(state)
        found += outputs.finished
    return found


@pytest.mark.parametrize("length", [26, 27])
def test_a_context_that_is_nearly_full_ends_with_length(length: int) -> None:
    """SC-05: room for 2 and for 1."""
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=50)
    (completion,) = run_alone(Request(id="r", tokens=[3] * length, sampling=sampling))
    assert completion.finish_reason == FinishReason.LENGTH
    assert len(completion.tokens) == 28 - length


def test_the_stopping_token_is_kept_and_a_stop_wins_over_length() -> None:
    """A stop id and the limit at once: the reason is stop, and it says which."""
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)
    (free,) = run_alone(Request(id="r", tokens=[3], sampling=greedy))
    token = int(free.tokens[0])
    stopped = SamplingParams(temperature=0, max_tokens=1, stop_ids=(token,))
    (completion,) = run_alone(Request(id="r", tokens=[3], sampling=stopped))
    assert completion.tokens.tolist() == [token]
    assert (completion.finish_reason, completion.stop) == (FinishReason.STOP, token)
    assert completion.text == ""
