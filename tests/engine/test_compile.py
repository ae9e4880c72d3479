"""compile=True, layers and embedding, head and sampler: the same bits, few graphs, none after a
warm-up; and a plain warning without a compiler."""

import shutil
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from purestep.engine import EngineState, Program, Request, digest, fork, init, warm_up
from purestep.models.decoder import decoder_layer
from tests.engine import test_head_adapters as vocabulary
from tests.engine import test_vision as vision
from tests.engine.tiny import prompt, request, run, submit_all, tiny_program, with_adapters

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
ENDS = 8  # graphs of embedding, head and sampler: two of draws, one of each other function
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 5, "seed": 1},
    {"temperature": 0.9, "top_p": 0.7},
    {"logprobs": 3},
    {"temperature": 1.1, "min_p": 0.1, "top_k": 900, "logprobs": 0},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.1},
    {"prompt_logprobs": 2},
    {"repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    {"temperature": 1.0, "min_tokens": 3, "allowed_ids": (5, 6, 7, 9)},
]
FIELDS = ("tokens", "logprobs", "top_ids", "top_logprobs", "prompt_logprobs", "prompt_top_ids")
OPTIONS = {"max_rows": 33, "num_blocks": 600, "max_batched_tokens": 64, "max_active_adapters": 5}


def mixed(seed: int, count: int, adapters: str = "abcd") -> list[Request]:
    """Prompts of 1 to 19 tokens, 1 to 33 more of each, drawn and told of in all ways; each fifth is
    without an adapter."""
    wishes = [None, *adapters]
    return [
        request(
            str(n),
            prompt(seed + n, 1 + (seed + 7 * n) % 19),
            wishes[(seed + n) % len(wishes)],
            max_tokens=4 + (seed + 5 * n) % 30,
            **KINDS[(seed + n) % len(KINDS)],
        )
        for n in range(count)
    ]


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    torch._dynamo.utils.counters.clear()


def known(program: Program, requests: list[Request]) -> EngineState:
    """A state that knows the adapters of these requests."""
    return with_adapters(program, sorted({item.adapter for item in requests} - {None}))


def assert_equal_bits(program: Program, eager: Program, requests: list[Request]) -> None:
    _, got = run(program, known(program, requests), requests)
    _, want = run(eager, known(eager, requests), requests)
    assert_same(got, want)


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, done in want.items():
        assert got[name].error == done.error
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(got[name], field), getattr(done, field), name)


@needs_compiler
@pytest.mark.usefixtures("backend")
def test_few_graphs_serve_every_batch_with_the_same_bits() -> None:
    """Rows, tokens, tiles, table widths, pools and what is drawn vary, and nothing is compiled
    anew."""
    program, eager = tiny_program(compile=True, **OPTIONS), tiny_program(**OPTIONS)
    assert program.fused
    state = submit_all(init(program), mixed(4, 3, adapters=""))
    before = digest(state.host)
    warm_up(program, state, adapters=(0, 1))
    assert digest(state.host) == before
    assert graphs() == 2 + ENDS
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, count in ((0, 33), (1, 1), (2, 2), (3, 7)):
            assert_equal_bits(program, eager, mixed(seed, count))
        twin = fork(program, state, num_blocks=70)
        assert len(run(program, twin)[1]) == len(run(program, state)[1]) == 3
    assert graphs() == 2 + ENDS


@needs_compiler
def test_plain_torch_is_warm_too_and_its_ends_keep_their_bits() -> None:
    """Its layer's own bits are inductor's, so it is left out where they are compared."""
    torch._dynamo.utils.counters.clear()
    options = OPTIONS | {"dtype": "bfloat16"}
    program, eager = tiny_program(compile=True, **options), tiny_program(**options)
    assert not program.fused
    warm_up(program, init(program), adapters=(0, 1))
    assert graphs() == 2 + ENDS
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, count in ((0, 20), (2, 1)):
            requests = mixed(seed, count)
            assert len(run(program, known(program, requests), requests)[1]) == count
            assert_equal_bits(replace(program, layer=decoder_layer), eager, requests)
    assert graphs() == 2 + ENDS


@needs_compiler
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_on_embedding_and_head_have_a_graph_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled when they are met, once: counts, ranks and which of them there are vary."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    family, options = "llama-tied", {"max_batched_tokens": 256, "num_blocks": 200}
    program, eager = (tiny_program(family, compile=on, **options) for on in (True, False))
    state, plain = vocabulary.with_all(program, family), vocabulary.with_all(eager, family)
    warm_up(program, state, adapters=(0, 1))
    first, *others = (
        vocabulary.mixed(17, prompt_logprobs=2, max_tokens=3),
        vocabulary.mixed(3, max_tokens=2, temperature=1.0)[2:3],
        vocabulary.mixed(1)[4:],
    )
    for requests in (first, *others):
        stance = "default" if requests is first else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            state, got = run(program, state, requests)
        plain, want = run(eager, plain, requests)
        assert_same(got, want)
    assert graphs() == 2 + ENDS + 2


@needs_compiler
def test_steps_that_are_replayed_have_three_more(
    monkeypatch: pytest.MonkeyPatch, eager_graphs: list
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    options = OPTIONS | {"row_buckets": (1, 2, 8), "token_buckets": (32, 128)}
    program, eager = (
        replace(tiny_program(compile=on, **options), graphs=True) for on in (True, False)
    )
    for count, adapters in ((9, "abcd"), (3, ""), (1, "")):
        assert_equal_bits(program, eager, mixed(0, count, adapters))
    assert {1, 2, 8} <= {shape.num_rows for shape in eager_graphs}
    assert 32 in {shape.num_tokens for shape in eager_graphs if not shape.uniform_decode}
    assert graphs() == 4 + ENDS + 1


@needs_compiler
@pytest.mark.parametrize(("family", "num_graphs"), [("mistral", 1), ("qwen3-window", 2)])
def test_each_window_has_one_graph(
    monkeypatch: pytest.MonkeyPatch, family: str, num_graphs: int
) -> None:
    """Not one for each layer; and what a warm-up leaves out is compiled when it is met."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    program, eager = tiny_program(family, compile=True, **OPTIONS), tiny_program(family, **OPTIONS)
    for seed, count in ((9, 1), (1, 1), (0, 9)):
        assert_equal_bits(program, eager, mixed(seed, count, adapters=""))
    assert graphs() == num_graphs + ENDS


@needs_compiler
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_images_that_see_both_ways_are_warm_too(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """Two windows, each with such tokens and without, and a scale of the embedding."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    program = replace(vision.program.__wrapped__("gemma3", compile=True), fused=fused)
    warm_up(program, init(program))
    assert graphs() == 2 * 2 + ENDS
    with torch.compiler.set_stance("fail_on_recompile"):
        items = [vision.asked("gemma3", name) for name in vision.PROMPTS]
        _, found = run(program, init(program), items)
    vision.check("gemma3", found)


@needs_compiler
def test_without_a_warm_up_a_step_fails_that_may_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    program = tiny_program(compile=True)
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="fail_on_recompile"),
    ):
        run(program, init(program), mixed(0, 1))


def test_without_a_compiler_one_warning_and_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler") as caught:
        program = tiny_program(compile=True)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, done = run(program, init(program), [request("x", prompt(1, 5))])
    eager = tiny_program()
    _, want = run(eager, init(eager), [request("x", prompt(1, 5))])
    assert done["x"].tokens.tolist() == want["x"].tokens.tolist()
