"""The fused decoder, in C and on plain-torch ops, says what the plain decoder says."""

from dataclasses import replace

import numpy as np
import pytest

from purestep.engine import init
from tests.engine.tiny import prompt, request, run, tiny_program, with_adapters
from tests.ops.forms import form


@pytest.mark.parametrize("ops", ["C", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "mistral"])
def test_fused_equals_plain(family: str, ops: str) -> None:
    """Chunked prompts and decodes of several adapters and of none, tokens and logprobs."""
    program = tiny_program(family, max_batched_tokens=16)
    plain, fused = (replace(program, fused=fused) for fused in (False, True))
    wishes = [None, "a", "b", "c", "d"] if family == "llama" else [None] * 5
    requests = [request(str(n), prompt(n, 3 + 7 * n), wishes[n]) for n in range(5)]
    state = with_adapters if family == "llama" else init
    with form("torch"):
        _, want = run(plain, state(plain), requests)
    with form(ops):
        _, got = run(fused, state(fused), requests)
    for name, done in want.items():
        assert got[name].tokens.tolist() == done.tokens.tolist()
        np.testing.assert_allclose(got[name].logprobs, done.logprobs, atol=1e-5)
