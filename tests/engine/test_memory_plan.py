"""`purestep plan`: the worked example of the specification to the byte, and the engine's own sums.

Llama-3-70B, 80 layers, hidden 8192, 64 query and 8 key/value heads of 128, MLP 28672, vocabulary
128256, bf16 on 8 cards; 8 adapters of rank 16 on all seven projections.
"""

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from purestep.engine import cli_plan, init, load_program
from purestep.engine.cli import main
from purestep.engine.memory import (
    activation_bytes,
    encoder_output_bytes,
    pool_bytes,
    rows_that_fit,
    slot_bytes,
    vocab_slot_bytes,
    weight_bytes,
)
from purestep.engine.memory_measure import STATUS, largest_batch, with_adapters
from purestep.engine.memory_plan import read_model_config
from purestep.models.checkpoint import tensor_shapes
from purestep.models.families import model_config_from_hf
from purestep.state.adapters import ROW_BLOCK
from purestep.state.errors import ConfigError
from tests.engine.tiny import checkpoint, prompt, request, run, tiny_program
from tests.models.tiny import FAMILIES, make_model

LLAMA_70B = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    num_hidden_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128256,
    max_position_embeddings=8192,
)
EXAMPLE = ["--tp=8", "--request-tokens=2350", "--max-adapters=8", "--rank=16", "--block-size=16"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LLAMA_70B.save_pretrained(tmp_path)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_worked_example_comes_out_to_the_byte(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(capsys, str(folder), *EXAMPLE)
    assert plan["kv"] == {"token": 40_960, "block": 655_360, "request": 96_256_000}
    adapters = plan["adapters"]
    numbers = {name: (part["a"], part["b"]) for name, part in adapters["projections"].items()}
    assert numbers == {
        "q_proj": (131_072, 16_384),
        "k_proj": (131_072, 2_048),
        "v_proj": (131_072, 2_048),
        "o_proj": (16_384, 131_072),
        "gate_proj": (131_072, 57_344),
        "up_proj": (131_072, 57_344),
        "down_proj": (57_344, 131_072),
    }
    assert sum(a + b for a, b in numbers.values()) == 1_126_400
    assert adapters["slot"] == 180_224_000
    assert sum(part["bytes"] for part in adapters["projections"].values()) == 180_224_000
    assert adapters["total"] == 1_441_792_000
    assert adapters["as_kv_tokens"] == 35_200
    assert adapters["as_kv_blocks"] == 2_200
    assert round(adapters["as_requests"], 2) == 14.98
    assert adapters["host"] == 414_187_520
    assert plan["image"] == {
        "encoder_output": 9_437_184,  # 9,216 KiB, on every card
        "kv": 23_592_960,  # an eighth of 184,320 KiB
        "as_kv_tokens": 230.4,
    }


def test_fully_sharded_and_the_vocabulary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, str(folder / "config.json"), *EXAMPLE, "--fully-sharded")
    assert plan["adapters"]["slot"] == 51_773_440
    assert plan["adapters"]["total"] == 414_187_520
    assert plan["adapters"]["slot"] * 8 == plan["adapters"]["host"], "an adapter shared by 8 cards"
    numbers = {k: v["a"] + v["b"] for k, v in plan["adapters"]["projections"].items()}
    assert numbers["q_proj"] == 32_768
    assert numbers["k_proj"] == 18_432
    assert numbers["down_proj"] == 73_728
    plan = planned(capsys, str(folder), *EXAMPLE, "--lora-vocab")
    assert plan["adapters"]["vocab"] == 8_732_672
    assert plan["adapters"]["total"] == 1_441_792_000 + 69_861_376
    plan = planned(capsys, str(folder), *EXAMPLE[:2], "--max-adapters=8", "--rank=64")
    assert plan["adapters"]["total"] == 5_767_168_000, "linear in the rank"


def test_graphs_are_as_large_as_the_largest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By tokens and by rows, of which one with prompts has at most `max_rows`."""

    def graphs(*options: str) -> int:
        return planned(capsys, str(folder), *EXAMPLE, "--max-rows=64", *options)["graphs"]

    model = read_model_config(folder)
    assert graphs() == 0
    for rows, tokens, largest in ((8, 0, (8, 8)), (8, 512, (512, 64)), (96, 16, (96, 96))):
        found = graphs(f"--graph-rows={rows}", f"--graph-tokens={tokens}")
        assert found == activation_bytes(model, *largest, False, tp=8)


def test_what_fits_is_what_is_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, str(folder), *EXAMPLE, "--memory=80GiB")
    fits = plan["fits"]
    parts = plan["weights"] + plan["adapters"]["total"] + plan["step"] + plan["graphs"]
    assert fits["usable"] == int(0.9 * 80 * 2**30)
    assert fits["taken"] == parts
    assert 0 <= fits["usable"] - parts - fits["kv"] < plan["kv"]["block"]
    assert fits["requests"] == fits["tokens"] // 2350
    more = planned(capsys, str(folder), *EXAMPLE[:2], "--memory=80GiB", "--max-adapters=0")
    assert more["fits"]["blocks"] - fits["blocks"] in (2_200, 2_201), "8 slots are 2,200 blocks"
    assert planned(capsys, str(folder), *EXAMPLE, "--memory=1GiB")["fits"]["missing"] > 0


def test_the_table_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *EXAMPLE, "--memory=80GiB"]) == 0
    said = capsys.readouterr().out
    for words in ("180,224,000 B", "1,441,792,000 B", "35,200 tokens of KV = 14.98 requests",
                  "9,437,184 B", "23,592,960", "A 131,072 B 16,384", "left for KV"):  # fmt: skip
        assert words in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp=3"], "tp=3 must divide 64 query heads"),
        (["--tp=0"], "tp=0"),
        (["--rank=12", "--tp=8", "--fully-sharded"], "rank, 12"),
        (["--rank=0"], "rank=0"),
        (["--max-adapters=-1"], "max_adapters=-1"),
        (["--dtype=int8"], "dtype='int8'"),
    ],
)
def test_impossible_wishes_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["plan", str(folder), *options]) == 2
    assert words in capsys.readouterr().err


def test_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    (tmp_path / "config.json").write_text("[]")
    assert main(["plan", str(tmp_path)]) == 2
    assert str(tmp_path / "config.json") in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_checkpoint(family: str) -> None:
    model = model_config_from_hf(make_model(family).config)
    numbers = sum(math.prod(shape) for shape in tensor_shapes(model).values())
    assert weight_bytes(model, 2) == 2 * numbers


@settings(max_examples=30)
@given(st.sampled_from([1, 2]), st.integers(1, 64).map(lambda n: 2 * n), st.booleans())
def test_cards_together_hold_an_adapter_and_replicas(tp: int, rank: int, sharded: bool) -> None:
    """Fully sharded, the cards' parts are one adapter; else each holds at least its part. More
    cards than key/value heads replicate one."""
    model = tiny_program().config.model
    whole, part = slot_bytes(model, rank, 2), slot_bytes(model, rank, 2, tp, sharded)
    assert part * tp == whole if sharded else part * tp >= whole
    assert (part == whole) == (tp == 1)
    with pytest.raises(ConfigError, match="rank"):
        slot_bytes(model, 2 * rank + 1, 2, 2, True)


@given(st.integers(1, 10**7), st.booleans())
def test_rows_fit_the_bytes_they_are_given(nbytes: int, vocab: bool) -> None:
    model = tiny_program().config.model
    row = slot_bytes(model, 1, 4) + (vocab_slot_bytes(model, 1, 4) if vocab else 0)
    if nbytes < ROW_BLOCK * row:
        with pytest.raises(ConfigError, match=f"adapter_bytes={nbytes}"):
            rows_that_fit(model, nbytes, 4, vocab)
    else:
        rows = rows_that_fit(model, nbytes, 4, vocab)
        assert rows % ROW_BLOCK == 0
        assert rows * row <= nbytes < (rows + ROW_BLOCK) * row


def test_adapter_memory_follows_ranks_and_not_the_largest_rank() -> None:
    """MO-05: what the pool takes is said before it is taken, and max_lora_rank is not in it."""
    small = tiny_program(lora_rows=64, max_lora_rank=8).config
    large = tiny_program(lora_rows=64, max_lora_rank=64).config
    assert pool_bytes(small, 9) == pool_bytes(large, 9)
    bytes_of_8 = slot_bytes(small.model, 8, 4) + vocab_slot_bytes(small.model, 8, 4)
    config = tiny_program(lora_rows=None, adapter_bytes=3 * bytes_of_8).config
    assert config.lora_rows == 24
    with pytest.raises(ConfigError, match="give at most one"):
        tiny_program(lora_rows=8, adapter_bytes=10**6)


def test_encoder_outputs_are_rows_of_the_model() -> None:
    model = tiny_program().config.model
    assert encoder_output_bytes(model, 10, 2) == 10 * model.hidden_size * 2


@pytest.mark.skipif(not STATUS.exists(), reason="reads the process's memory from /proc")
def test_measured_beside_computed(capsys: pytest.CaptureFixture[str]) -> None:
    """MO-07 on a CPU: the declared largest step is below what was declared, beside what the
    libraries take for themselves at the first step; nothing is found where memory that others
    left is taken again."""
    folder = str(checkpoint(hidden_size=256, intermediate_size=1024)[0])
    options = ["--measure", "--device=cpu", "--dtype=float32", "--num-blocks=64", "--max-rows=8",
               "--max-batched-tokens=512", "--max-adapters=2", "--rank=16"]  # fmt: skip
    planned(capsys, folder, *options)  # whatever libraries load when they are first used
    measured = planned(capsys, folder, *options)["measured"]
    computed, found = measured["step and graphs"]
    assert 0 <= found < computed + 40e6
    assert main(["plan", folder, *options]) == 0
    assert "measured: weights" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_measured_beside_computed_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """MO-07: weights and pool are what was computed, but for tables and buffers; the largest step,
    its graphs with it, takes no more than was kept for it and cuBLAS's workspace."""
    folder = str(checkpoint(hidden_size=1024, intermediate_size=4096, vocab_size=32_000)[0])
    for options in (["--max-rows=8"], ["--max-rows=64", "--max-batched-tokens=4096"]):
        wishes = ["--measure", "--device=cuda", "--num-blocks=512", "--rank=64", *options]
        measured = planned(capsys, folder, *wishes)["measured"]
        with capsys.disabled():
            print(measured)
        for name in ("weights", "pool"):
            computed, found = measured[name]
            assert computed <= found < 1.1 * computed + 20e6, name
        computed, found = measured["step and graphs"]
        assert 0 < found < computed + 40e6


def test_a_step_that_does_not_fit_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3.00 GiB")

    monkeypatch.setattr(cli_plan, "measure", full)
    assert main(["plan", str(checkpoint()[0]), "--measure", "--device=cpu"]) == 2
    assert "tried to allocate 3.00 GiB" in capsys.readouterr().err


def test_the_largest_batch_fills_slots_and_rows() -> None:
    program = load_program(checkpoint()[0], device="cpu", dtype="float32", num_blocks=16)
    state = with_adapters(program, init(program))
    ledger = state.host.adapters
    waiting = largest_batch(program, state).host
    assert len(waiting.waiting) == program.config.max_rows
    assert all(r.request.sampling.prompt_logprobs for r in waiting.requests.values())
    rows = sum(info.num_row_blocks for info in ledger.registered.values()) * ROW_BLOCK
    assert len(ledger.names) == program.config.max_active_adapters
    assert rows == program.config.lora_rows
    assert read_model_config(checkpoint()[0]) == program.config.model


def test_engines_are_freed_and_do_not_meet() -> None:
    """MO-06: three engines of different models, two of them alive at a time, in one process."""
    alive: list[weakref.ref[Any]] = []
    alone = {}
    for turn in range(2):
        for family in ("llama", "qwen2", "mistral"):
            program, other = (
                load_program(checkpoint(name)[0], device="cpu", dtype="float32", num_blocks=64)
                for name in (family, "qwen3")
            )
            state, twin = init(program), init(other)
            state, done = run(program, state, [request("x", prompt(1, 9))])
            twin, _ = run(other, twin, [request("x", prompt(1, 9))])
            said = done["x"].tokens.tolist()
            assert alone.setdefault(family, said) == said, turn
            owned = (program.params, other.params, state.device.pool, twin.device.pool)
            alive += map(weakref.ref, owned)
            del owned, program, state, other, twin, done
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]
