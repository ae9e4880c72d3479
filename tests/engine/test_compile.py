"""compile=True: the same bits, few graphs, none after a warm-up; and a plain warning without a
compiler."""

import shutil
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from purestep.engine import Program, Request, digest, fork, init, warm_up
from tests.engine.tiny import prompt, request, run, submit_all, tiny_program, with_adapters

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
OPTIONS = {"max_rows": 33, "num_blocks": 600, "max_batched_tokens": 64, "max_active_adapters": 5}


def mixed(seed: int, count: int, adapters: str = "abcd") -> list[Request]:
    """Prompts of 1 to 19 tokens, 1 to 33 more of each; each fifth is without an adapter."""
    wishes = [None, *adapters]
    return [
        request(
            str(n),
            prompt(seed + n, 1 + (seed + 7 * n) % 19),
            wishes[(seed + n) % len(wishes)],
            max_tokens=1 + (seed + 5 * n) % 33,
        )
        for n in range(count)
    ]


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    torch._dynamo.utils.counters.clear()


def assert_equal_bits(program: Program, eager: Program, requests: list[Request]) -> None:
    names = "abcd" if any(item.adapter for item in requests) else ""
    _, got = run(program, with_adapters(program, names), requests)
    _, want = run(eager, with_adapters(eager, names), requests)
    for name, completion in want.items():
        assert got[name].tokens.tolist() == completion.tokens.tolist()
        assert got[name].logprobs.tolist() == completion.logprobs.tolist()


@needs_compiler
@pytest.mark.usefixtures("backend")
def test_two_graphs_serve_every_batch_with_the_same_bits() -> None:
    """Rows, tokens, tiles, table widths and pools vary, and nothing is compiled anew."""
    program, eager = tiny_program(compile=True, **OPTIONS), tiny_program(**OPTIONS)
    assert program.fused
    state = submit_all(init(program), mixed(4, 3, adapters=""))
    before = digest(state.host)
    warm_up(program, state, adapters=(0, 1))
    assert digest(state.host) == before
    assert graphs() == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, count in ((0, 33), (1, 1), (2, 2), (3, 7)):
            assert_equal_bits(program, eager, mixed(seed, count))
        twin = fork(program, state, num_blocks=70)
        assert len(run(program, twin)[1]) == len(run(program, state)[1]) == 3
    assert graphs() == 2


@needs_compiler
def test_steps_that_are_replayed_have_two_more(
    monkeypatch: pytest.MonkeyPatch, eager_graphs: list
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    options = OPTIONS | {"row_buckets": (1, 2, 8), "token_buckets": (32, 128)}
    program, eager = (
        replace(tiny_program(compile=on, **options), graphs=True) for on in (True, False)
    )
    for count, adapters in ((9, "abcd"), (3, "")):
        assert_equal_bits(program, eager, mixed(0, count, adapters))
    assert {1, 2, 8} <= {shape.num_rows for shape in eager_graphs}
    assert 32 in {shape.num_tokens for shape in eager_graphs if not shape.uniform_decode}
    assert graphs() == 4


@needs_compiler
@pytest.mark.parametrize(("family", "num_graphs"), [("mistral", 1), ("qwen3-window", 2)])
def test_each_window_has_one_graph(
    monkeypatch: pytest.MonkeyPatch, family: str, num_graphs: int
) -> None:
    """Not one for each layer; and what a warm-up leaves out is compiled when it is met."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    program, eager = tiny_program(family, compile=True, **OPTIONS), tiny_program(family, **OPTIONS)
    for seed, count in ((1, 1), (0, 9)):
        assert_equal_bits(program, eager, mixed(seed, count, adapters=""))
        assert graphs() == num_graphs


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
