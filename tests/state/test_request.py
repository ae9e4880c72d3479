"""What a request may say: typed refusals that name field, value and limit; nothing half-accepted.

Cases SC-01, SC-05, SC-06, SL-05, SL-08, SL-09, LS-04, AU-01, AU-03, AU-05, AU-06, BC-09.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from purestep.engine.adapters import AdapterFailed, deliver, register_adapter
from purestep.engine.branch import branch
from purestep.engine.commit import commit
from purestep.engine.requests import abort, abort_host, submit
from purestep.engine.schedule import schedule
from purestep.simulation.device import execute, toy_step
from purestep.simulation.world import VOCAB, toy_config, toy_state
from purestep.state.canonical import digest
from purestep.state.checks import check_host
from purestep.state.engine import EngineState
from purestep.state.errors import RequestError, SamplingError, UnknownAdapterError
from purestep.state.request import (
    Completion,
    FinishReason,
    Request,
    for_adapters,
    logprob_dicts,
    prompt_logprob_dicts,
)
from purestep.state.request_rules import checked_tokens
from purestep.state.sampling import SamplingParams, shown
from purestep.state.sampling_rules import check_sampling

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
        [(v, "at least 1, or 0 to score") for v in (-1, 1.0, "3", None, True)],
        [1, 2**31, 2**40],
    ),
    "min_p": (
        [(v, "at least 0 and at most 1") for v in (-1e-9, 1.0001, NAN, INF, "0.5", None)],
        [0, 0.0, 1e-12, 0.5, 1],
    ),
    "repetition_penalty": (
        [(v, "above 0 and at most") for v in (0, 0.0, -1, NAN, INF, 1e7, "1", None)],
        [1e-6, 0.5, 1, 1.5, 1e6],
    ),
    "presence_penalty": (
        [(v, "must be a number in") for v in (NAN, INF, -INF, 1e7, "1", None)],
        [-2, 0, 0.5, 1e6],
    ),
    "frequency_penalty": (
        [(v, "must be a number in") for v in (NAN, INF, -INF, 1e7, "1", None)],
        [-2, 0, 0.5, 1e6],
    ),
    "logit_bias": (
        [
            *[(v, f"map ids in 0..{VOCAB - 1} to numbers") for v in ({VOCAB: 5.0}, {-1: 5.0})],
            *[(v, "map ids") for v in ({"a": 1.0}, 5, None, "ab", ((1, 2.0), (1, 3.0)), {True: 1})],
            *[(v, "each must be -inf or") for v in ({3: NAN}, {3: INF}, {3: "x"}, {3: 1e7})],
        ],
        [{}, {3: 5}, {3: -INF, 0: -1e6}, ((3, 1.0),), [(3, 1.0)]],
    ),
    "allowed_ids": (
        [
            *[
                (v, f"in 0..{VOCAB - 1}")
                for v in ((-1,), (VOCAB,), (1.0,), ("a",), "3", 5, (None,))
            ],
            ((), "at least 1 id"),
        ],
        [None, (3,), [3, 3, 1], tuple(range(VOCAB))],
    ),
    "banned_ids": (
        [(v, f"in 0..{VOCAB - 1}") for v in ((-1,), (VOCAB,), (1.0,), ("a",), None)],
        [(), (3,), [3, 3], np.array([1])],
    ),
    "processor": ([(v, "the program has []") for v in ("mine", 5, b"x")], [None]),
    "processor_args": (
        [
            (v, "tuple of None, bool, int")
            for v in ([1], ({},), (np.int64(1),), ("\ud800",), 5, None)
        ],
        [()],
    ),
    "n": ([(v, "in 1..1024") for v in (0, -1, 1025, 1.0, True, None)], [1, 3]),
    "min_tokens": (
        [
            *[(v, "at least 0") for v in (-1, 1.0, True, None)],
            (257, "max_tokens=256"),
        ],
        [0, 3, 256],
    ),
    "include_stop": ([(v, "True or False") for v in (None, 1, "no")], [False, True]),
    "stream": ([(v, "True or False") for v in (None, 1, "no")], [False, True]),
    "logprobs": (
        [(v, f"None or in 0..{VOCAB}") for v in (-1, VOCAB + 1, 1.0, True, "3")],
        [None, 0, 1, 5, VOCAB],
    ),
    "prompt_logprobs": (
        [(v, f"None or in 0..{VOCAB}") for v in (-1, VOCAB + 1, 1.0, True, "3")],
        [None, 0, 1, 5, VOCAB],
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
    ("ignore_eos", np.True_),
    ("banned_ids", np.array([[1, 2]])),
    ("stop_ids", np.array(3)),
]


def with_field(name: str, value: Any) -> Request:
    return with_fields(**{name: value})


def with_fields(**fields: Any) -> Request:
    return Request(id="r7", tokens=[1, 3], sampling=SamplingParams(**fields))


def test_every_field_is_tested() -> None:
    """A new field needs rows here, and then it cannot be silently ignored (SL-09)."""
    assert {f.name for f in fields(SamplingParams)} == set(SAMPLING)
    words = "id tokens adapter salt sampling priority hidden_layers prompt_embeds features"
    assert {f.name for f in fields(Request)} == set(words.split())


REFUSED = [(n, v, w) for n, (bad, _) in SAMPLING.items() for v, w in bad]
ACCEPTED = [(n, v) for n, (_, good) in SAMPLING.items() for v in good]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_bad_sampling_is_refused_by_name_value_and_limit(name: str, value: Any, words: str) -> None:
    with pytest.raises(SamplingError) as caught:
        checked(with_field(name, value))
    assert str(caught.value).startswith(f"request 'r7': {name}={shown(value)}, but ")
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_what_is_accepted_works(name: str, value: Any) -> None:
    """Boundary values go through a step, and the state keeps its digest."""
    checked(with_field(name, value))
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
    return request.id in outputs.ids


def checked(request: Request, has_text: bool = True) -> SamplingParams:
    who = f"request {request.id!r}"
    return check_sampling(request.sampling, who, vocab_size=VOCAB, has_text=has_text, processors=())


@pytest.mark.parametrize("temperature", [0, 9e-6])
@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 2), ("top_p", 0.5), ("min_p", 0.1), ("n", 2)]
)
def test_greedy_refuses_what_would_have_no_effect(
    name: str, value: Any, temperature: float
) -> None:
    with pytest.raises(SamplingError, match=f"{name}=.*temperature={temperature} is greedy"):
        checked(with_fields(temperature=temperature, **{name: value}))
    checked(with_fields(temperature=1e-5, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 0),
        ("stop", ("a",)),
        ("stop_ids", (3,)),
        ("include_stop", True),
        ("stream", True),
    ],
)
def test_scoring_refuses_what_would_have_no_effect(name: str, value: Any) -> None:
    """SL-09. How tokens would be chosen may stay: a checkpoint's defaults bring it."""
    with pytest.raises(SamplingError, match=f"{name}=.*max_tokens=0 generates nothing"):
        checked(with_fields(max_tokens=0, prompt_logprobs=1, **{name: value}))
    checked(with_fields(max_tokens=0, prompt_logprobs=1, top_k=3, temperature=0.5))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("banned_ids", [*range(12)] * 1000 + [77]),
        ("allowed_ids", np.array([*range(12)] * 1000 + [77])),
        ("stop_ids", [*range(12)] * 1000 + [77]),
        ("logit_bias", dict.fromkeys([*range(12), 77, *range(100, 9000)], 1.0)),
    ],
)
def test_a_long_list_is_not_printed_whole_and_the_bad_id_is_named(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=f"{name}=.*77") as caught:
        checked(with_field(name, value))
    assert len(str(caught.value)) < 300


def test_ids_are_plain_sorted_and_unique() -> None:
    sampling = checked(with_fields(stop_ids=[5, 3, 5], banned_ids=np.array([4, 1, 4])))
    assert (sampling.stop_ids, sampling.banned_ids) == ((3, 5), (1, 4))
    assert checked(with_field("ignore_eos", np.True_)).ignore_eos is True


def test_stop_strings_need_a_token_table() -> None:
    request = with_field("stop", ("a",))
    with pytest.raises(SamplingError, match=r"stop=\('a',\), but .*no token table.*stop_ids"):
        checked(request, has_text=False)
    checked(with_field("stop_ids", (3,)), has_text=False)


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
    {"priority": 0.5},
    {"priority": "high"},
    {"priority": 2**31},
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


@pytest.mark.parametrize("adapter", ["", "nobody"])
def test_unknown_adapters_are_refused(adapter: str) -> None:
    """LS-04."""
    with pytest.raises(UnknownAdapterError, match="request 'r': no adapter is called"):
        submit(toy_state(toy_config()), Request(id="r", tokens=[1], adapter=adapter))


@pytest.mark.parametrize("adapter", [5, ["a", "b"], ("a", 0.5), {"a": 0.5}, b"a"])
def test_several_adapters_and_strengths_are_refused_by_name(adapter: Any) -> None:
    """AU-06."""
    words = "one adapter's name or None; several adapters on one request, or a strength, are not"
    with pytest.raises(RequestError, match=words):
        submit(toy_state(toy_config()), Request(id="r", tokens=[1], adapter=adapter))


def test_one_prompt_for_many_adapters() -> None:
    """AU-06: what was prepared is shared; ids tell the adapters apart."""
    request = Request(id="q", tokens=np.array([1, 3]), sampling=SamplingParams(max_tokens=3))
    several = for_adapters(request, [None, "a", "b"])
    assert [(r.id, r.adapter) for r in several] == [("q/", None), ("q/a", "a"), ("q/b", "b")]
    assert all(r.tokens is request.tokens for r in several)


@pytest.mark.parametrize("layers", [(2,), (-3,), (0, 0), (0.5,), (True,), 3, None, "0"])
def test_odd_hidden_layers_are_refused(layers: Any) -> None:
    """AU-01: the toy has one layer, so 0 and 1 are there."""
    with pytest.raises(RequestError, match=r"hidden_layers=.* must be different integers in -2..1"):
        submit(toy_state(toy_config()), Request(id="r", tokens=[1], hidden_layers=layers))


def test_scoring_alone_must_score_something() -> None:
    nothing = SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match=r"max_tokens=0 .* needs prompt_logprobs or hidden_lay"):
        submit(toy_state(toy_config()), Request(id="r", tokens=[1], sampling=nothing))
    with pytest.raises(SamplingError, match="n=2, but max_tokens=0 generates nothing"):
        checked(with_fields(n=2, max_tokens=0, prompt_logprobs=0))
    full = Request(
        id="r", tokens=[1] * 28, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0)
    )
    (completion,) = run_alone(full)  # a prompt that fills the context leaves room for no token
    assert len(completion.prompt_logprobs) == 28
    assert completion.tokens.tolist() == []


GOOD_EMBEDS = torch.zeros(3, 8)
BAD_EMBEDS = [
    (torch.zeros(3, 7), (), r"floats of shape \[n, 8\], got \(3, 7\)"),
    (torch.zeros(0, 8), (), r"floats of shape \[n, 8\], got \(0, 8\)"),
    (torch.zeros(8), (), "floats of shape"),
    (torch.zeros(3, 8, dtype=torch.int32), (), "floats of shape .* of torch.int32"),
    ([[0.0] * 8], (), "must be a tensor or array"),
    ("digest", (), "must be a tensor or array"),
    (np.zeros((3, 8), object), (), "floats of shape .* of object"),
    (np.zeros((3, 8), np.longdouble), (), "floats of shape"),
    (np.zeros((3, 8), np.complex64), (), "floats of shape .* of complex64"),
    (np.array(1.0), (), r"floats of shape \[n, 8\], got \(\)"),
    (torch.zeros(3, 8, device="meta"), (), "must be a dense tensor, this one is meta"),
    (torch.zeros(3, 8).to_sparse(), (), "must be a dense tensor, this one is torch.sparse_coo"),
    (GOOD_EMBEDS, np.array(5), r"tokens must be a flat sequence of integers, got shape \(\)"),
    (GOOD_EMBEDS, torch.tensor(5), "tokens must be a flat sequence of integers"),
    (GOOD_EMBEDS, None, "tokens must be a flat sequence of integers"),
    (torch.full((3, 8), NAN), (), "hold NaN or infinity"),
    (GOOD_EMBEDS, [1, 2], "has 3 rows, but tokens have 0 places"),
    (GOOD_EMBEDS, [-1, 2, -1], "has 3 rows, but tokens have 2 places"),
    (GOOD_EMBEDS, [-1, -2, -1], "token id -2 at position 1"),
    (torch.zeros(28, 8), (), "a prompt of 28 tokens and one generated token exceed"),
]


@pytest.mark.parametrize(("embeds", "tokens", "words"), BAD_EMBEDS)
def test_odd_embeddings_are_refused(embeds: Any, tokens: Any, words: str) -> None:
    """AU-03: before any change."""
    state = submit(toy_state(toy_config()), Request(id="other", tokens=[1]))
    before = digest(state.host)
    with pytest.raises(RequestError, match=words):
        submit(state, Request(id="r7", tokens=tokens, prompt_embeds=embeds))
    assert digest(state.host) == before
    assert not state.blobs


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: rows.astype(">f4"),
        lambda rows: rows[::-1].copy()[::-1],
        lambda rows: rows.astype(np.float64),
        np.asfortranarray,
        lambda rows: torch.from_numpy(rows).requires_grad_(),
        lambda rows: torch.from_numpy(rows).T.contiguous().T,
    ],
)
def test_equal_embeddings_are_one_blob_and_a_copy(form: Any) -> None:
    """AU-03: whatever the strides and the order of bytes; the caller's rows may change later."""
    rows = np.arange(24, dtype=np.float32).reshape(3, 8)
    wanted = submit(toy_state(toy_config()), Request(id="r", prompt_embeds=rows))
    given = form(rows.copy())
    state = submit(toy_state(toy_config()), Request(id="r", prompt_embeds=given))
    assert digest(state.host) == digest(wanted.host)
    given = given.detach() if isinstance(given, torch.Tensor) else given
    given[:] = 0
    (name,) = state.blobs
    assert torch.equal(state.blobs[name], torch.from_numpy(rows))


def test_logprobs_as_dictionaries() -> None:
    """SL-08: the chosen token always, count + 1 entries at most, None for the first of a prompt."""
    request = Request(id="r", tokens=[1, 3, 4], sampling=SamplingParams(logprobs=2, max_tokens=3))
    (completion,) = run_alone(request)
    for token, entry in zip(completion.tokens.tolist(), logprob_dicts(completion), strict=True):
        assert token in entry
        assert len(entry) <= 3
    with pytest.raises(RequestError, match="no prompt_logprobs: they were not asked for"):
        prompt_logprob_dicts(completion, [1, 3, 4])
    (plain,) = run_alone(Request(id="r", tokens=[1, 3, 4]))
    assert [list(entry) for entry in logprob_dicts(plain)] == [[t] for t in plain.tokens.tolist()]
    scored = SamplingParams(prompt_logprobs=1, max_tokens=0)
    tokens = [1, -1, 4]
    mixed = Request(id="r", tokens=tokens, prompt_embeds=torch.ones(1, 8), sampling=scored)
    (completion,) = run_alone(mixed)
    first, _, last = prompt_logprob_dicts(completion, tokens)
    assert first is None
    assert 4 in last
    for others in ((), [1, 4], [1, 3, 4, 5]):
        with pytest.raises(RequestError, match=f"{len(others)} tokens given, but the prompt has 3"):
            prompt_logprob_dicts(completion, others)


def test_prompt_logprobs_are_whole_or_absent() -> None:
    """SL-08: a request that ends before its prompt is read has none, and the message says why."""
    scored = SamplingParams(prompt_logprobs=1, n=2)
    state = register_adapter(toy_state(toy_config()), "/a", name="a")
    state = submit(state, Request(id="r", tokens=[1, 3, 4], adapter="a", sampling=scored))
    state, outputs = toy_step(deliver(state, AdapterFailed(name="a", error="no such folder")))
    first, second = outputs.finished
    assert first.prompt_logprobs is first.prompt_top_ids is first.prompt_top_logprobs is None
    with pytest.raises(RequestError, match=r"before its prompt was scored.*: no such folder"):
        prompt_logprob_dicts(first, [1, 3, 4])
    with pytest.raises(RequestError, match="sample 1 carries none, sample 0 does"):
        prompt_logprob_dicts(second, [1, 3, 4])


def test_a_failed_load_drops_the_embeddings_of_its_requests() -> None:
    """MO-03: nothing names them any more."""
    state = register_adapter(toy_state(toy_config()), "/a", name="a")
    state = submit(state, Request(id="r", prompt_embeds=GOOD_EMBEDS, adapter="a"))
    assert len(state.blobs) == 1
    assert not deliver(state, AdapterFailed(name="a", error="gone")).blobs


@pytest.mark.parametrize("where", ["logprob_N", "top_logprob_NK"])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_that_cannot_be_scored_ends_with_an_error(where: str, max_tokens: int) -> None:
    """SL-05: logits that are not finite; the first chunk tells, the neighbour goes on. Where an
    embedding stands, NaN is no news."""
    config = toy_config()
    scored = SamplingParams(prompt_logprobs=1, max_tokens=max_tokens)
    state = submit(toy_state(config), Request(id="good", tokens=[1]))
    rows = torch.ones(1, 8)
    state = submit(
        state, Request(id="bad", tokens=[1, -1, *[3] * 9], prompt_embeds=rows, sampling=scored)
    )
    host, plan = schedule(config, state.host)
    _, result = execute(config, state.device, plan, state.blobs)
    (scores,) = result.scored
    spoiled = getattr(scores, where).copy()
    spoiled[0] = NAN
    after, outputs = commit(
        config, host, plan, replace(result, scored=(replace(scores, **{where: spoiled}),))
    )
    if where == "logprob_N":
        assert not outputs.finished, "the first of them is an embedding"
        spoiled[2] = NAN
        result = replace(result, scored=(replace(scores, **{where: spoiled}),))
        after, outputs = commit(config, host, plan, result)
    (completion,) = outputs.finished
    assert (completion.id, completion.finish_reason) == ("bad", FinishReason.ERROR)
    assert "not finite" in completion.error
    assert completion.prompt_logprobs is None
    check_host(after, config.block_size)


def test_samples_live_under_names_of_their_own() -> None:
    """SC-01 for n > 1; aborting a request ends all of its samples, naming one ends that one."""
    three = SamplingParams(n=3)
    state = submit(toy_state(toy_config()), Request(id="x", tokens=[1], sampling=three))
    assert set(state.host.requests) == {"x", "x#1", "x#2"}
    for taken in ("x", "x#1"):
        with pytest.raises(RequestError, match=f"a live request has the id {taken!r}"):
            submit(state, Request(id=taken, tokens=[1]))
    assert set(abort(state, "x#1").host.requests) == {"x", "x#2"}
    assert abort(toy_step(state)[0], "x").host.idle


def test_an_id_is_taken_while_any_sample_of_it_lives() -> None:
    """SC-01: a second request of the name would be ended by an abort of the first."""
    state = submit(
        toy_state(toy_config()), Request(id="x", tokens=[1], sampling=SamplingParams(n=3))
    )
    state = branch(submit(state, Request(id="y", tokens=[1])), "x#2", ["z"])
    left = replace(state, host=abort_host(abort_host(state.host, "x"), "x#1"))
    assert set(left.host.requests) == {"x#2", "y", "z"}
    with pytest.raises(RequestError, match="'x': a live request has the id 'x#2'"):
        submit(left, Request(id="x", tokens=[1]))
    with pytest.raises(RequestError, match="branch of 'y': a live request has the id 'x#2'"):
        branch(left, "y", ["x"])
    gone = abort(left, "x")
    assert set(gone.host.requests) == {"y", "z"}, "a branch is a request of its own"
    own = submit(submit(gone, Request(id="x#1", tokens=[1])), Request(id="x", tokens=[1]))
    assert set(abort(own, "x").host.requests) == {"y", "z", "x#1"}


def test_an_id_is_taken_while_its_end_is_still_to_be_told() -> None:
    """SC-01: two completions of one name in one step could not be told apart."""
    state = register_adapter(toy_state(toy_config()), "/a", name="a")
    two = SamplingParams(n=2)
    state = submit(state, Request(id="x", tokens=[1], adapter="a", sampling=two))
    state = deliver(submit(state, Request(id="y", tokens=[1])), AdapterFailed(name="a", error="no"))
    for taken in ("x", "x#1"):
        with pytest.raises(RequestError, match="still to be told"):
            submit(state, Request(id=taken, tokens=[1]))
        with pytest.raises(RequestError, match="still to be told"):
            branch(state, "y", [taken])
    state, outputs = toy_step(state)
    assert [c.key for c in outputs.finished] == ["x", "x#1"]
    branch(submit(state, Request(id="x", tokens=[1])), "y", ["x#1"])


def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    """SC-01."""
    once = SamplingParams(max_tokens=1)
    state = submit(toy_state(toy_config()), Request(id="x", tokens=[1], sampling=once))
    with pytest.raises(RequestError, match="'x': a live request has the id 'x'"):
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
