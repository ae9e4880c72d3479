"""compile=True on a CPU: few graphs, the same tokens, and a plain warning without a compiler."""

import shutil
import warnings

import numpy as np
import pytest
import torch

from purestep.engine import init
from tests.engine.tiny import prompt, request, run, tiny_program, with_adapters

HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_a_mixed_batch_makes_at_most_four_graphs() -> None:
    """Row counts 1 to 33, five adapters or none, chunks and decodes; tokens equal eager."""
    options = {"max_rows": 33, "num_blocks": 600, "max_batched_tokens": 64,
               "max_active_adapters": 5}  # fmt: skip
    torch._dynamo.reset()
    program = tiny_program(compile=True, **options)
    wishes = [None, "a", "b", "c", "d"]
    requests = [
        request(str(n), prompt(n, 1 + n % 19), wishes[n % 5], max_tokens=1 + n) for n in range(33)
    ]
    counters = torch._dynamo.utils.counters
    counters.clear()
    _, got = run(program, with_adapters(program), requests)
    _, base = run(program, init(program), requests[:1])
    assert 1 <= counters["stats"]["unique_graphs"] <= 4
    eager = tiny_program(**options)
    _, want = run(eager, with_adapters(eager), requests)
    for name, completion in want.items():
        assert got[name].tokens.tolist() == completion.tokens.tolist()
        np.testing.assert_allclose(got[name].logprobs, completion.logprobs, atol=1e-5)
    assert base["0"].tokens.tolist() == want["0"].tokens.tolist()


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
