"""Number formats, long prompts, and how large the pool is."""

import copy
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from purestep.engine import Program, init, load_adapter, load_program, memory
from purestep.engine.memory import kv_block_bytes, pool_bytes
from purestep.engine.platform import available_bytes, resolve_dtype
from purestep.engine.pool import allocate_pool
from purestep.models.adapter_files import read_adapter
from purestep.state.errors import AdapterError
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
    with_adapters,
)
from tests.models.peft_fixtures import save, wrap

STATM = Path("/proc/self/statm")


def errors(program: Program, oracle: object, name: str | None) -> np.ndarray:
    """Distance of the engine's logprobs from an fp32 oracle, on the engine's own tokens."""
    found = []
    for seed in range(6):
        state = with_adapters(program, [name] if name else [])
        item = request("x", prompt(seed, 12), name)
        tokens = run(program, state, [item])[1]["x"]
        want = oracle_logprobs(oracle, item.tokens, tokens.tokens)
        found.append(np.abs(tokens.logprobs - want))
    return np.concatenate(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [None, "b"])
def test_half_formats_err_no_more_than_twice_what_transformers_does(
    dtype: str, name: str | None
) -> None:
    """LK-07: an fp32 adapter on a 16-bit base, against PEFT in fp32 and in the same format."""
    oracle = checkpoint()[1] if name is None else peft_model(name)
    ours = errors(tiny_program(dtype=dtype), oracle, name)
    half = wrap_half(name, getattr(torch, dtype))
    theirs = []
    for seed in range(6):
        tokens = oracle_tokens(oracle, prompt(seed, 12), 8)
        want = oracle_logprobs(oracle, prompt(seed, 12), tokens)
        theirs.append(np.abs(oracle_logprobs(half, prompt(seed, 12), tokens) - want))
    assert np.isfinite(ours).all()
    assert ours.max() <= 2 * np.concatenate(theirs).max()
    assert ours.max() > 1e-5, "the format was not used"


def wrap_half(name: str | None, dtype: torch.dtype) -> object:
    model = checkpoint()[1] if name is None else peft_model(name)
    return copy.deepcopy(model).to(dtype)


def test_an_adapter_that_overflows_the_format_is_refused() -> None:
    """LK-07: values above 65504 after scaling, in float16."""
    huge = wrap(checkpoint()[1], seed=1)
    with torch.no_grad():
        for parameter_name, parameter in huge.named_parameters():
            if "lora_B" in parameter_name:
                parameter.fill_(60_000.0)
    program = tiny_program(dtype="float16")
    with pytest.raises(AdapterError, match="float16"):
        load_adapter(init(program), save(huge), name="huge")
    read_adapter(save(huge), program.config.model, dtype=torch.float32, max_rank=None)


def test_long_prompts_with_a_high_rank_stay_finite_and_equal_peft() -> None:
    """LK-06: rank 64 and prompts around 128, 400 and 1024 tokens, in one batch of chunks."""
    sizes = {"hidden_size": 64, "max_position_embeddings": 2048}
    program = tiny_program(sizes=sizes, num_blocks=700, max_batched_tokens=256)
    oracle = wrap(checkpoint(**sizes)[1], seed=1, r=64, lora_alpha=64, target_modules="all-linear")
    state = load_adapter(init(program), save(oracle), name="wide")
    lengths = (64, 127, 128, 129, 400, 401, 1024)
    requests = [request(str(n), prompt(n, n), "wide", max_tokens=2) for n in lengths]
    _, done = run(program, state, requests)
    for item in requests:
        got = done[item.id]
        assert got.tokens.tolist() == oracle_tokens(oracle, item.tokens, 2)
        want = oracle_logprobs(oracle, item.tokens, got.tokens)
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)


def test_a_checkpoint_folder_loads_with_automatic_choices() -> None:
    program = load_program(checkpoint()[0], max_rows=2, device="cpu")
    config = program.config
    assert config.dtype == "float32"
    assert config.num_blocks == 2 * 256 // 16, "two rows of full context"
    state = load_adapter(init(program), adapter_folder("a"), name="a")
    _, done = run(program, state, [request("x", prompt(1, 9), "a")])
    assert done["x"].tokens.tolist() == oracle_tokens(peft_model("a"), prompt(1, 9), 8)
    assert f"{config.num_blocks} blocks of 16 tokens" in memory.memory_summary(config)


def test_the_pool_takes_what_it_says() -> None:
    program = tiny_program(num_blocks=None, kv_bytes=100_000, lora_vocab=False)
    config = program.config
    assert config.num_blocks == 100_000 // kv_block_bytes(config)
    pool = init(program).device.pool
    tensors = (*pool.kv, *pool.a_LSPD.values(), *pool.b_LPO.values())
    assert sum(t.nbytes for t in tensors) == pool_bytes(config, config.num_blocks)
    assert sum(t.nbytes for t in pool.kv) <= 100_000


@pytest.mark.skipif(not STATM.exists(), reason="reads the process's memory from /proc")
def test_memory_that_nobody_wrote_is_not_taken() -> None:
    """On a CPU, where a pool is as large as it may ever have to be."""

    def resident_bytes() -> int:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    config = tiny_program(num_blocks=200_000).config
    assert pool_bytes(config, config.num_blocks) > 200e6
    before = resident_bytes()
    pool = allocate_pool(config)
    assert resident_bytes() - before < 20e6
    for tensor in (*pool.kv, *pool.a_LSPD.values(), *pool.b_LPO.values()):
        assert tensor.data_ptr() % 64 == 0, "as aligned as torch's own"
        assert not tensor[:, :, -1].any()


def test_automatic_size_is_capped_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes() > 2**20
    config = tiny_program().config
    monkeypatch.setattr(memory, "available_bytes", lambda: 40 * kv_block_bytes(config))
    assert memory.choose_num_blocks(config, None, None).num_blocks == 10
    few = replace(config, max_rows=1, max_context=16)
    assert memory.choose_num_blocks(few, None, None).num_blocks == 4


def test_automatic_dtype() -> None:
    """bfloat16 only where the CPU multiplies it; float16 checkpoints run in float32 on a CPU."""
    assert resolve_dtype("auto", "cpu", "float32") == "float32"
    assert resolve_dtype("auto", "cpu", "float16") == "float32"
    assert resolve_dtype("auto", "cpu", "bfloat16") in ("float32", "bfloat16")
    assert resolve_dtype("bfloat16", "cpu", "float32") == "bfloat16"
    assert resolve_dtype("auto", "cuda", "bfloat16") == "bfloat16"
