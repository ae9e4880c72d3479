"""The decoder against transformers and PEFT, and the law of equality on whole forward passes.

T token rows, R request rows, M blocks of the longest row, V vocabulary, r rank.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import PreTrainedModel

from purestep.models.checkpoint import load_checkpoint
from purestep.models.compiled import compile_layer
from purestep.models.config import ModelConfig, fused_linears
from purestep.models.decoder import (
    AdapterRows,
    LayerAdapters,
    LayerFn,
    Params,
    decoder_layer,
    forward,
    logits,
)
from purestep.models.rope import rope_for_context
from purestep.ops.lora_add import chunk_spans
from purestep.state.batch import Batch, LoraBatch
from tests.models.peft_fixtures import wrap
from tests.models.tiny import FAMILIES, save_checkpoint

NAN = float("nan")
BLOCK = 4
LORA_ROWS = 64

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"},
    "mlp": {"r": 1, "lora_alpha": 2, "target_modules": ["up_proj", "down_proj"]},
    "odd": {"r": 9, "lora_alpha": 5, "target_modules": ["k_proj", "o_proj", "gate_proj"]},
    "wide": {"r": 12, "lora_alpha": 24, "use_rslora": True, "target_modules": ["o_proj"]},
}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    config: ModelConfig
    params: Params
    oracle: PreTrainedModel


@cache
def load(family: str = "llama", dtype: torch.dtype = torch.float32) -> Loaded:
    with TemporaryDirectory() as folder:
        oracle = save_checkpoint(Path(folder), family)
        config, params, _ = load_checkpoint(folder, dtype=dtype)
    config = replace(config, rope=rope_for_context(config.rope, config.max_position))
    return Loaded(config=config, params=params, oracle=oracle.to(dtype))


@torch.inference_mode()
def expected(model: Any, ids: Sequence[int]) -> Tensor:
    """Padded to 40 tokens, as the lengths of calls decide on the factors of longrope."""
    padded = [*ids, *[0] * (40 - len(ids))]
    return model(input_ids=torch.tensor([padded])).logits[0, : len(ids)].float()


@cache
def peft_model(name: str) -> Any:
    return wrap(load().oracle, seed=len(name), **ADAPTERS[name])


@cache
def adapter_pool() -> tuple[tuple[LayerAdapters, ...], dict[str, Tensor]]:
    """Every adapter's rows, written by hand from PEFT's modules; rows of nobody are NaN."""
    config, source = load().config, torch.Generator().manual_seed(1)
    blocks = torch.randperm(LORA_ROWS // 8, generator=source).tolist()
    owned: dict[str, Tensor] = {}
    for name, fields in ADAPTERS.items():
        mine, blocks = blocks[: -(-fields["r"] // 8)], blocks[-(-fields["r"] // 8) :]
        owned[name] = torch.cat([torch.arange(8) + 8 * block for block in sorted(mine)])
    layers = tuple(
        LayerAdapters(
            **{
                linear.name: AdapterRows(
                    a_SPD=torch.full((len(linear.children), LORA_ROWS, linear.in_features), NAN),
                    b_PO=torch.full((LORA_ROWS, linear.out_features), NAN),
                )
                for linear in fused_linears(config)
            }
        )
        for _ in range(config.num_layers)
    )
    for name, rows in owned.items():
        decoder = peft_model(name).base_model.model.model
        for i, layer in enumerate(layers):
            for linear in fused_linears(config):
                pool = getattr(layer, linear.name)
                pool.a_SPD[:, rows], pool.b_PO[rows] = 0.0, 0.0
                parent = getattr(decoder.layers[i], linear.parent)
                columns = pool.b_PO.split(linear.out_sizes, -1)
                for s, child in enumerate(linear.children):
                    module = getattr(parent, child)
                    if not hasattr(module, "lora_A"):
                        continue
                    a_rD = module.lora_A["default"].weight.detach()
                    b_Or = module.lora_B["default"].weight.detach()
                    pool.a_SPD[s, rows[: len(a_rD)]] = a_rD
                    columns[s][rows[: len(a_rD)]] = module.scaling["default"] * b_Or.T
    return layers, owned


@dataclass(kw_only=True)
class Row:
    """A request: its tokens, how many are in the pages, its blocks, its adapter."""

    ids: list[int]
    blocks: list[int]
    adapter: str | None = None
    done: int = 0


@dataclass(kw_only=True)
class World:
    """The least engine: a page pool full of NaN, and steps that give each row some tokens."""

    model: Loaded
    rows: list[Row]
    kv: list[Tensor] = field(init=False)
    layer_fn: LayerFn = decoder_layer
    use_lora: bool = True

    def __post_init__(self) -> None:
        config, size = self.model.config, (BLOCK, self.model.config.num_kv_heads)
        blocks = 1 + max(b for row in self.rows for b in row.blocks)
        dtype = self.model.params.norm_D.dtype
        shape = (2, blocks, *size, config.head_dim)
        self.kv = [torch.full(shape, NAN, dtype=dtype) for _ in range(config.num_layers)]

    def step(self, counts: Sequence[int], padding: int = 0, filler: int = 0) -> list[Tensor]:
        """Advance row r by counts[r] tokens; returns the logits of each, [counts[r], V]."""
        batch = self.pack(counts, padding, filler)
        adapters = adapter_pool()[0] if batch.lora is not None else None
        with torch.inference_mode():
            hidden_TD = forward(
                self.model.params, adapters, self.kv, batch, self.model.config, self.layer_fn
            )
            out_SV = logits(self.model.params, hidden_TD, batch.logits_index_S)
        for row, count in zip(self.rows, counts, strict=True):
            row.done += count
        return list(out_SV.split(list(counts)))

    def pack(self, counts: Sequence[int], padding: int, filler: int) -> Batch:
        """`padding` more token rows of id `filler`, and as many request rows without a query."""
        spans = [range(r.done, r.done + n) for r, n in zip(self.rows, counts, strict=True)]
        pairs = [(row, p) for row, span in zip(self.rows, spans, strict=True) for p in span]
        places = [row.blocks[p // BLOCK] * BLOCK + p % BLOCK for row, p in pairs]
        total, width = len(pairs), max(len(row.blocks) for row in self.rows)
        table = [row.blocks + [0] * (width - len(row.blocks)) for row in self.rows]
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        ends = [span.stop for span in spans]
        return Batch(
            token_T=torch.tensor([row.ids[p] for row, p in pairs] + [filler] * padding),
            position_T=torch.tensor([p for _, p in pairs] + [filler] * padding),
            kv_index_T=torch.tensor(places + [-1] * padding),
            query_start_R1=torch.tensor(starts + [total] * padding, dtype=torch.int32),
            context_len_R=torch.tensor(ends + [0] * padding, dtype=torch.int32),
            block_table_RM=torch.tensor(table + [[0] * width] * padding, dtype=torch.int32),
            logits_index_S=torch.arange(total),
            lora=self.pack_lora([row.adapter for row, _ in pairs], total + padding),
        )

    def pack_lora(self, names: list[str | None], T: int) -> LoraBatch | None:
        active = sorted({name for name in names if name})
        if not active or not self.use_lora:
            return None
        rows = sorted((row, name) for name in active for row in adapter_pool()[1][name].tolist())
        padded = names + [None] * (T - len(names))
        foreign_TR = torch.tensor([[name != owner for _, owner in rows] for name in padded])
        return LoraBatch(
            row_R=torch.tensor([row for row, _ in rows]),
            foreign_TR=foreign_TR,
            span_C2=chunk_spans(foreign_TR),
        )


def world(
    prompts: Sequence[int | tuple[int, str | None]],
    family: str = "llama",
    seed: int = 0,
    **fields: Any,
) -> World:
    """Rows of the given lengths (with an adapter), on scattered blocks."""
    source = torch.Generator().manual_seed(seed)
    pairs = [p if isinstance(p, tuple) else (p, None) for p in prompts]
    needs = [-(-n // BLOCK) for n, _ in pairs]
    free = torch.randperm(sum(needs) + 2, generator=source).tolist()
    rows = []
    for (n, adapter), need in zip(pairs, needs, strict=True):
        blocks, free = free[:need], free[need:]
        ids = torch.randint(0, 128, (n,), generator=source).tolist()
        rows.append(Row(ids=ids, blocks=blocks, adapter=adapter))
    return World(model=fields.pop("model", None) or load(family), rows=rows, **fields)


def oracle_of(it: World, row: Row) -> Tensor:
    return expected(peft_model(row.adapter) if row.adapter else it.model.oracle, row.ids)


def assert_equals_oracle(it: World, steps: list[list[Tensor]], atol: float = 1e-4) -> None:
    for r, row in enumerate(it.rows):
        got, want = torch.cat([step[r] for step in steps]), oracle_of(it, row)
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        with pytest.raises(AssertionError):
            torch.testing.assert_close(
                got.flip(0) if len(got) > 1 else -got, want, rtol=0, atol=atol
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompts_equal_transformers(family: str) -> None:
    it = world((13, 1, 8, 30), family)
    assert_equals_oracle(it, [it.step([13, 1, 8, 30])])


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decodes_in_one_batch_equal_transformers(family: str) -> None:
    """Rows start, are cut into chunks and decode at different times, on scattered blocks."""
    it = world((13, 9, 21), family, seed=3)
    plan = [[5, 0, 7], [7, 6, 8], [1, 1, 4], [0, 1, 1], [0, 1, 1]]
    assert_equals_oracle(it, [it.step(counts, padding=k % 3) for k, counts in enumerate(plan)])


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Prompt lengths, and steps of random chunks that use them up."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    left, steps = list(lengths), []
    while any(left):
        counts = [draw(st.integers(0, n)) for n in left]
        if not any(counts):
            counts = list(left)
        left = [n - c for n, c in zip(left, counts, strict=True)]
        steps.append(counts)
    return lengths, steps


@settings(max_examples=30)
@given(plans(), st.integers(0, 3))
def test_any_chunking_equals_the_whole(plan: tuple[list[int], list[list[int]]], pad: int) -> None:
    lengths, steps = plan
    whole, chunked = world(lengths), world(lengths)
    want = whole.step(lengths)
    parts = [chunked.step(counts, padding=pad) for counts in steps]
    for r in range(len(lengths)):
        got = torch.cat([part[r] for part in parts])
        torch.testing.assert_close(got, want[r], rtol=1e-5, atol=1e-5)


MIXED = ((7, "attention"), 5, (6, "all"), (3, "mlp"), (9, "odd"), 4, (1, "wide"), (8, "all"))


def test_adapters_equal_peft_unmerged() -> None:
    """Five adapters and base rows in one batch, ranks 1 to 16 on different targets."""
    it = world(MIXED)
    lengths = [len(row.ids) for row in it.rows]
    first = [n // 2 for n in lengths]
    second = [n - f for n, f in zip(lengths, first, strict=True)]
    assert_equals_oracle(it, [it.step(first), it.step(second, padding=2)])
    for row in it.rows:
        if row.adapter:
            gap = (oracle_of(it, row) - expected(it.model.oracle, row.ids)).abs().max()
            assert gap > 0.05, f"{row.adapter} changes too little to be noticed"


def test_base_rows_are_bit_equal_to_a_run_without_adapters() -> None:
    """LK-05, on whole forward passes."""
    mixed, plain = world(MIXED), world(MIXED, use_lora=False)
    lengths = [len(row.ids) for row in mixed.rows]
    with_lora, without = mixed.step(lengths), plain.step(lengths)
    for row, got, want in zip(mixed.rows, with_lora, without, strict=True):
        assert torch.equal(got, want) == (row.adapter is None)


@pytest.mark.parametrize("kept", range(0, len(MIXED), 3))
def test_other_rows_change_no_bit(kept: int) -> None:
    """At one shape: their tokens, their adapters, the padding's contents; over two steps."""
    it, other = world(MIXED), world(MIXED)
    lengths = [len(row.ids) for row in it.rows]
    names = [row.adapter for row in other.rows]
    for r, row in enumerate(other.rows):
        if r != kept:
            row.ids = [(token * 5 + 1) % 128 for token in row.ids]
            row.adapter = names[r - 1] if r - 1 != kept else None
    for counts in ([n // 2 for n in lengths], [n - n // 2 for n in lengths]):
        got = it.step(counts, padding=3, filler=0)
        assert torch.equal(other.step(counts, padding=3, filler=99)[kept], got[kept])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3-long"])
def test_half_precision_is_as_good_as_transformers(family: str, dtype: torch.dtype) -> None:
    """LK-07: the error against float32 is at most twice that of transformers in this dtype."""
    it = world((30, 17), family, model=load(family, dtype))
    got = torch.cat(it.step([30, 17]))
    exact = torch.cat([expected(load(family).oracle, row.ids) for row in it.rows])
    theirs = torch.cat([oracle_of(it, row) for row in it.rows])
    assert got.dtype == torch.float32
    assert (got - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_tied_head_is_the_embedding_itself() -> None:
    assert load("llama-tied").params.head_VD is load("llama-tied").params.embed_VD
    assert load("llama").params.head_VD is not load("llama").params.embed_VD


HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")


def walk() -> Iterator[tuple[tuple[tuple[int, str | None], ...], int]]:
    """Batches of T = 1..33 tokens in a mixed order, with up to five adapters or none."""
    names = list(ADAPTERS)
    order = [2, 1, 16, 33, *range(3, 33)]
    for k, T in enumerate(order):
        rows, left = [], T
        while left:
            n = min(left, 1 + (k + 3 * len(rows)) % 9)
            name = names[len(rows) % 5] if len(rows) % 3 else None
            rows.append((n, name))
            left -= n
        yield tuple((n, None) for n, _ in rows) if k % 3 == 0 else tuple(rows), T


INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler"),
    ],
)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_two_graphs_serve_every_batch(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """One without adapters and one with; token and row counts, table widths and pools vary."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    layer_fn = compile_layer()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for rows, T in walk():
        compiled, eager = world(rows, layer_fn=layer_fn), world(rows)
        counts = [n for n, _ in rows]
        assert sum(counts) == T
        got, want = torch.cat(compiled.step(counts)), torch.cat(eager.step(counts))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
@pytest.mark.parametrize(("family", "num_graphs"), [("mistral", 1), ("qwen3-window", 2)])
def test_each_window_has_one_graph(
    monkeypatch: pytest.MonkeyPatch, backend: str, family: str, num_graphs: int
) -> None:
    """Not one for each layer, and no more for batches and pools of other sizes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    layer_fn = compile_layer()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for lengths in ((2,), (1,), (9, 4, 20), (1, 1, 1), (17,), (33,)):
        compiled = world(lengths, family, layer_fn=layer_fn)
        want = torch.cat(world(lengths, family).step(lengths))
        got = torch.cat(compiled.step(lengths))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_compiled_models_share_no_graph_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo counts graphs by code object: nine models would have been one too many."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1):
        for family in ("llama", "qwen2", "llama-bias"):
            compiled = world((3, 2), family, layer_fn=compile_layer())
            want = world((3, 2), family).step([3, 2])
            for got, exact in zip(compiled.step([3, 2]), want, strict=True):
                torch.testing.assert_close(got, exact)
