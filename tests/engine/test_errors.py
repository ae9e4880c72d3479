"""Bad input: a typed error that names item, value and limit, before any state changes (O-CLEAN)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from purestep.engine import Request, SamplingParams, digest, init, prepare, step, submit
from purestep.engine.policy import Order
from purestep.engine.program import load_program, make_program
from purestep.state.errors import (
    CheckpointError,
    ConfigError,
    PolicyError,
    RequestError,
    SamplingError,
)
from tests.engine.tiny import alone, prompt, request, run, submit_all, tiny_program

BAD_REQUESTS: list[tuple[Any, str]] = [
    ({"tokens": []}, "empty"),
    ({"tokens": [5, 128]}, r"128 at position 1 .* 0\.\.127"),
    ({"tokens": [-1]}, "-1 at position 0"),
    ({"tokens": [1.5, 2.0]}, "integers"),
    ({"tokens": [[1, 2]]}, "flat"),
    ({"tokens": [5] * 64}, "64 tokens .* max_context=64"),
    ({"tokens": [5] * 48}, r"13 blocks of 4, .* num_blocks=12"),
    ({"id": ""}, "id ''"),
    ({"id": "live"}, "'live'"),
    ({"adapter": "nobody"}, "'nobody'"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_REQUESTS)
def test_a_bad_request_is_refused_and_hurts_nobody(changes: dict[str, Any], words: str) -> None:
    """SC-03, SC-05, SC-06, LS-04: and the live request goes on as alone."""
    program = tiny_program(num_blocks=12, max_context=64)
    good = request("live", prompt(1, 5))
    state, _ = step(program, submit(init(program), good))
    before = digest(state.host)
    with pytest.raises(RequestError, match=words):
        submit(state, Request(**{"id": "bad", "tokens": [5], **changes}))
    assert digest(state.host) == before
    _, done = run(program, state)
    assert done["live"].tokens.tolist() == alone(good).tokens.tolist()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.1}, r"top_p=1\.1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, r"top_k=2\.5"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"temperature": 0, "top_k": 5}, "top_k=5.*greedy"),
        ({"temperature": 0, "top_p": 0.5}, r"top_p=0\.5.*greedy"),
        ({"stop": "text"}, "stop="),
        ({"stop": ("",)}, "stop="),
        ({"stop": ("x",)}, "token table"),
        ({"stop_ids": (128,)}, r"stop_ids=.*0\.\.127"),
    ],
)
def test_contradictory_sampling_is_refused(params: dict[str, Any], field: str) -> None:
    """SL-05, SL-09: each by field, value and range; a setting without effect is refused too."""
    state = init(tiny_program())
    with pytest.raises(SamplingError, match=field):
        submit(state, Request(id="x", tokens=[5], sampling=SamplingParams(**params)))


def test_lengths_at_the_limits() -> None:
    """SC-05: context 64; prompts of 62 and 63 work, 63 with one token of reason length."""
    program = tiny_program(max_context=64)
    _, done = run(
        program,
        init(program),
        [request(str(n), prompt(n, n), max_tokens=5) for n in (62, 63)],
    )
    assert [len(done[n].tokens) for n in ("62", "63")] == [2, 1]
    assert {c.finish_reason for c in done.values()} == {"length"}


def test_an_answer_that_outgrows_the_pool_ends_with_capacity() -> None:
    """SC-03: the prompt fits, its answer does not; a short one behind it completes."""
    program = tiny_program(num_blocks=12)
    big, short = request("big", prompt(1, 40), max_tokens=100), request("short", prompt(2, 5))
    _, done = run(program, init(program), [big, short])
    assert done["big"].finish_reason == "capacity"
    assert len(done["big"].tokens) == 48 - 40 + 1
    want = alone(big).tokens.tolist()
    assert done["big"].tokens.tolist() == want[:9]
    assert done["short"].tokens.tolist() == alone(short).tokens.tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_rows": 64, "max_batched_tokens": 32}, "max_batched_tokens=32.*max_rows=64"),
        ({"max_context": 1000}, r"max_context=1000.*2\.\.256"),
        ({"lora_rows": 12}, "lora_rows=12.*8"),
        ({"max_lora_rank": 65}, r"max_lora_rank=65.*1\.\.lora_rows=64"),
        ({"max_active_adapters": 9, "max_registered_adapters": 8}, "max_registered_adapters=8"),
        ({"num_blocks": 4, "kv_bytes": 100}, "num_blocks=4 and kv_bytes=100"),
        ({"num_blocks": None, "kv_bytes": 100}, "kv_bytes=100"),
        ({"seed": -1}, "seed=-1"),
        ({"token_buckets": (8, 4)}, "token_buckets"),
        ({"processors": {1: abs}}, "processors: 1 must name"),
        ({"processors": {"x": 5}}, "processors: 'x' must name a function, and 5"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_program(**options)


def test_bad_checkpoints_and_devices_are_named(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_program(tmp_path)
    with pytest.raises(ConfigError, match="nonsense"):
        load_program(tmp_path, device="nonsense")
    with pytest.raises(ConfigError, match="int8"):
        load_program(tmp_path, dtype="int8")
    with pytest.raises(TypeError, match="max_row"):
        make_program(None, None, weights="", dtype="", device="", max_row=3)


def test_a_policy_may_only_reorder() -> None:
    program = tiny_program(max_rows=2)
    state = submit_all(init(program), [request(str(n), prompt(n, 4)) for n in range(4)])
    state, _ = step(program, state, lambda host: Order(running=(), waiting=host.waiting[::-1]))
    assert state.host.rows.ids == ("3", "2")
    before = digest(state.host)
    for running, waiting in (
        (("3",), ("0", "1")),
        (("3", "2"), ("0", "x")),
        (("3", "3"), ("0", "1")),
    ):
        with pytest.raises(PolicyError):
            step(program, state, lambda host, r=running, w=waiting: Order(running=r, waiting=w))
    assert digest(state.host) == before
    run(program, state)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        prepare(tiny_program(), "hello", id="x")


def test_numpy_and_list_prompts_are_the_same() -> None:
    program = tiny_program()
    tokens = prompt(1, 7)
    forms = [tokens, tuple(tokens), np.array(tokens), np.array(tokens, np.uint8)]
    digests = {digest(submit(init(program), Request(id="x", tokens=t)).host) for t in forms}
    assert len(digests) == 1


@pytest.mark.parametrize("chunk", [32, 5])
def test_what_is_not_finite_is_cached_for_nobody(chunk: int) -> None:
    """A token whose embedding is NaN spoils the KV of tokens before it in its step."""
    sound = tiny_program()
    table = sound.params.embed_VD.clone()
    table[127] = np.nan
    params = replace(sound.params, embed_VD=table, head_VD=sound.params.head_VD)
    program = make_program(
        sound.config.model, params, weights="w", dtype="float32", device="cpu", block_size=4,
        num_blocks=64, max_rows=4, max_batched_tokens=chunk,
    )  # fmt: skip
    shared = prompt(1, 10)
    state, done = run(program, submit(init(program), request("bad", [*shared, 127, 5, 6])))
    assert done["bad"].finish_reason == "error"
    good = request("good", [*shared, 9], logit_bias={127: -np.inf})
    _, done = run(program, submit(state, good))
    _, want = run(program, submit(init(program), good))
    assert done["good"].tokens.tolist() == want["good"].tokens.tolist()
    assert len(done["good"].tokens) == 8
