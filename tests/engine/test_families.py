"""Every family in the engine: chunks, preemption and cached prefixes against transformers."""

from dataclasses import replace

import numpy as np
import pytest

from purestep.engine import Completion, Request, init, load_adapter
from tests.engine.tiny import (
    adapter_folder,
    checkpoint,
    oracle_logprobs,
    oracle_tokens,
    peft_model,
    prompt,
    request,
    run,
    tiny_program,
)
from tests.models.peft_fixtures import save, wrap
from tests.models.tiny import FAMILIES

WINDOWED = ["mistral", "qwen2-window", "qwen3-window", "phi3"]


def assert_equals(done: Completion, item: Request, oracle: object) -> None:
    """The tokens of the oracle, and its logprobs."""
    assert done.tokens.tolist() == oracle_tokens(oracle, item.tokens, len(done.tokens))
    want = oracle_logprobs(oracle, item.tokens, done.tokens)
    np.testing.assert_allclose(done.logprobs, want, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_preemptions_equal_transformers(family: str) -> None:
    """Prompts beyond every window and original context, cut in chunks of at most 16 tokens."""
    program = tiny_program(family, num_blocks=22, max_rows=4, max_batched_tokens=16)
    requests = [request(str(n), prompt(n, 18 + 5 * n), max_tokens=10) for n in range(4)]
    _, done = run(program, init(program), requests)
    assert sum(completion.num_preemptions for completion in done.values()) > 0
    for item in requests:
        assert_equals(done[item.id], item, checkpoint(family)[1])


@pytest.mark.parametrize("family", [*WINDOWED, "qwen3", "phi3-long"])
def test_a_cached_prefix_gives_what_a_cold_start_gives(family: str) -> None:
    """PC-11 without the image: cached blocks, with the window's edge before, in and after them."""
    tokens = prompt(5, 36)
    program = tiny_program(family)
    cold = tiny_program(family, prefix_caching=False)
    state = init(program)
    for length, cached in ((18, 0), (22, 16), (27, 20), (36, 24)):
        item = request(str(length), tokens[:length], max_tokens=4)
        state, done = run(program, state, [item])
        _, want = run(cold, init(cold), [item])
        assert done[item.id].num_cached_tokens == cached
        assert done[item.id].tokens.tolist() == want[item.id].tokens.tolist()
        np.testing.assert_allclose(done[item.id].logprobs, want[item.id].logprobs, atol=1e-5)
        assert_equals(done[item.id], item, checkpoint(family)[1])


@pytest.mark.parametrize("family", WINDOWED)
def test_the_windows_are_small_enough_to_matter(family: str) -> None:
    program = tiny_program(family)
    model = replace(program.config.model, windows=(0, 0))
    unlimited = replace(program, config=replace(program.config, model=model))
    item = request("x", prompt(1, 30), max_tokens=1)
    logprobs = [run(p, init(p), [item])[1]["x"].logprobs for p in (program, unlimited)]
    assert abs(logprobs[0] - logprobs[1]) > 1e-2


def test_longrope_follows_the_context_of_the_engine() -> None:
    """Short factors up to the original context of 16 tokens; the KV of the two never meets."""
    model = checkpoint("phi3-long")[1]
    long, short = tiny_program("phi3-long"), tiny_program("phi3-long", max_context=16)
    for program, length in ((long, 17), (short, 8)):
        item = request("x", prompt(1, length))
        _, done = run(program, init(program), [item])
        assert_equals(done["x"], item, model)
    assert long.config.kv_identity == short.config.kv_identity.replace("short", "long")
    assert long.config.kv_identity != short.config.kv_identity
    again = tiny_program("phi3-long", max_context=17)
    assert again.config.kv_identity == long.config.kv_identity
    plain = tiny_program("phi3").config
    assert plain.kv_identity == f"{plain.weights}/float32"


def test_adapters_on_fused_projections_equal_peft() -> None:
    """LF-21: tiny Phi-3; A is shared by q, k and v, and by gate and up."""
    model = checkpoint("phi3")[1]
    targets = {
        "fused": ["qkv_proj", "gate_up_proj"],
        "qkv": ["qkv_proj"],
        "others": ["o_proj", "down_proj"],
        "all": "all-linear",
    }
    oracles = {
        name: wrap(model, seed=n, r=3 + n, target_modules=modules)
        for n, (name, modules) in enumerate(targets.items())
    }
    program = tiny_program("phi3", max_batched_tokens=24)
    state = init(program)
    for name, oracle in oracles.items():
        state = load_adapter(state, save(oracle), name=name)
    requests = [request(name, prompt(n, 12 + n), name) for n, name in enumerate(oracles)]
    requests.append(request("base", prompt(0, 12)))
    _, done = run(program, state, requests)
    for item in requests:
        assert_equals(done[item.id], item, oracles.get(item.id, model))
    assert done["fused"].tokens.tolist() != done["base"].tokens.tolist()


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_adapters_on_split_projections_equal_peft(family: str) -> None:
    """Head norms and windows come after the deltas."""
    program = tiny_program(family)
    state = load_adapter(init(program), adapter_folder("b", family), name="b")
    item = request("x", prompt(1, 21), "b")
    _, done = run(program, state, [item, request("base", prompt(2, 15))])
    assert_equals(done["x"], item, peft_model("b", family))
