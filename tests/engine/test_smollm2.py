"""The real model: SmolLM2-135M-Instruct against transformers, and the demo's adapters."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from purestep.engine import Program, Request, SamplingParams, generate, prepare
from purestep.engine.demo_model import smollm2_dir
from tests.examples.demo import ADAPTERS, demo_program
from tests.examples.prompts import HELD_OUT, messages

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS: tuple[str | list[dict[str, str]], ...] = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "import numpy as np\n\nx = np.",
    "Q: What is 7 times 8?\nA:",
    "The quick brown fox jumps over",
    "Water boils at",
    "Liebe Freunde, heute",
    "La vie est",
    "{\"name\": \"Ada\", \"age\":",
    "   leading spaces and\ttabs",
    "ALL CAPITALS HERE",
    "🙂 emoji and ünïcödé",
    "a",
    "To be, or not to be, that is the question:\n" * 6,
    messages("What is the capital of Japan?"),
    messages("Write a haiku about rain."),
    messages("List three fruits."),
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What colour is grass?"},
    ],
)  # fmt: skip


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@cache
def program() -> Program:
    return demo_program()


@cache
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32).eval()


def oracle_tokens(tokens: Sequence[int], count: int) -> list[int]:
    """transformers' greedy answer of at most `count` tokens, one request at a time."""
    with torch.no_grad():
        out = oracle().generate(
            input_ids=torch.tensor([list(tokens)]), max_new_tokens=count, do_sample=False
        )
    return out[0, len(tokens) :].tolist()


def assert_equal_or_tied(tokens: Sequence[int], got: list[int], want: list[int]) -> bool:
    """Tokens equal; the first that differs only where the oracle's best two lie within 1e-5."""
    if got == want:
        return False
    at = next(i for i, (g, w) in enumerate(zip(got, want, strict=False)) if g != w)
    with torch.no_grad():
        logits = oracle()(input_ids=torch.tensor([[*tokens, *want[:at]]])).logits[0, -1]
    best = logits.topk(2)
    assert set(best.indices.tolist()) == {got[at], want[at]}
    assert float(best.values[0] - best.values[1]) < 1e-5
    return True


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


def test_twenty_prompts_equal_transformers() -> None:
    requests = [
        prepare(program(), text, id=str(n), sampling=greedy(16)) for n, text in enumerate(PROMPTS)
    ]
    done = {c.id: c for c in generate(program(), requests)}
    ties = 0
    for item in requests:
        want = oracle_tokens(item.tokens, 16)
        ties += assert_equal_or_tied(item.tokens, done[item.id].tokens.tolist(), want)
    print(f"{ties} of {len(requests)} prompts differ, at ties of the oracle")
    assert ties == 0, "the pinned prompts have no tie"


def held_out_requests() -> list[Request]:
    return [
        prepare(
            program(),
            messages(question),
            id=f"{adapter}-{n}",
            adapter=adapter,
            sampling=greedy(16 if adapter is None else 80),
        )
        for n, question in enumerate(HELD_OUT)
        for adapter in (None, *ADAPTERS)
    ]


def test_adapters_do_their_work_in_one_mixed_batch() -> None:
    """40 prompts that training never saw, each to the base model, `shout` and `json` at once."""
    requests = held_out_requests()
    done = {c.id: c for c in generate(program(), requests, adapters=ADAPTERS)}
    assert len(done) == 120
    shouted = [is_upper(done[f"shout-{n}"].text) for n in range(40)]
    parsed = [is_answer(done[f"json-{n}"].text) for n in range(40)]
    print(f"upper case {sum(shouted)}/40, JSON {sum(parsed)}/40")
    assert sum(shouted) >= 38
    assert sum(parsed) >= 38
    for item in requests:
        if item.adapter is None:
            got = done[item.id].tokens.tolist()
            assert_equal_or_tied(item.tokens, got, oracle_tokens(item.tokens, 16))


def is_upper(text: str) -> bool:
    return text == text.upper() and any(c.isalpha() for c in text)


def is_answer(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == {"answer"}
