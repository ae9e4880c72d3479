"""Steps that compute parts of prompts as CUDA graphs: replaying one changes nothing. Without a GPU
graphs are played by their eager functions."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from purestep.engine import (
    EngineState,
    Program,
    abort,
    schedule,
    step,
    step_ahead,
    submit,
    warm_up,
)
from purestep.engine.ahead import follows
from purestep.engine.graphs import can_replay, graphs_of, replay
from purestep.engine.options import default_token_buckets
from purestep.engine.pack import pack_fused
from purestep.models.fused import step_logits
from purestep.state.plan import BatchDescriptor, StepPlan
from purestep.state.request import frozen
from tests.engine.test_graphs import RANKS, gpu_program, needs_gpu, with_ranks
from tests.engine.tiny import (
    Driver,
    prompt,
    request,
    run,
    submit_all,
    tiny_program,
    with_adapters,
)

gpu = pytest.mark.gpu
ROWS, TOKENS = (1, 2, 4, 8), (4, 8, 16, 24)
DRIVERS = pytest.mark.parametrize("driver", [step, step_ahead], ids=lambda d: d.__name__)


def pair(**options) -> tuple[Program, Program]:
    plain = tiny_program(row_buckets=ROWS, **options)
    buckets = {"token_buckets": TOKENS, "max_batched_tokens": 32}
    mixed = tiny_program(row_buckets=ROWS, **buckets | options)
    return plain, replace(mixed, fused=True, graphs=True)


def same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, done in want.items():
        assert got[name].tokens.tolist() == done.tokens.tolist(), name
        np.testing.assert_allclose(got[name].logprobs, done.logprobs, atol=1e-5)


def history(program: Program, state: EngineState, items: list, driver: Driver) -> dict:
    """Requests arrive one by one, so that prompts are computed beside rows that decode."""
    waiting, done = list(items), {}
    for turn in range(400):
        if waiting and turn % 2 == 0:
            state = submit(state, waiting.pop(0))
        if turn == 11:
            state = abort(state, "4")
        if state.host.idle and not waiting:
            return done
        state, outputs = driver(program, state)
        done |= {c.id: c for c in outputs.finished}
    raise AssertionError("it does not come to an end")


@DRIVERS
@pytest.mark.parametrize("num_blocks", [64, 24])
def test_same_tokens_with_arrivals_chunks_and_preemption(
    eager_graphs: list[BatchDescriptor], num_blocks: int, driver: Driver
) -> None:
    """Adapters and base rows, greedy and drawn, prompts of up to four chunks."""
    names = [None, "a", "b", "c", "d"]
    items = [
        request(str(n), prompt(n, 3 + 11 * n % 37), names[n % 5], max_tokens=3 + 4 * n % 19)
        for n in range(12)
    ]
    items += [
        request("long", prompt(29, 70), "d", max_tokens=5),
        request("drawn", prompt(20, 5), "a", temperature=0.8, top_k=20, seed=3, max_tokens=12, n=2),
        request("likeliest", prompt(21, 9), "b", logprobs=3, max_tokens=4),
        request("penalty", prompt(22, 6), repetition_penalty=1.4, max_tokens=6),
    ]
    plain, mixed = pair(num_blocks=num_blocks)
    want = history(plain, with_adapters(plain), items, step)
    got = history(mixed, with_adapters(mixed), items, driver)
    same(got, want)
    found = [shape for shape in eager_graphs if not shape.uniform_decode]
    assert {shape.num_tokens for shape in found} == {*TOKENS}
    assert {shape.num_active_loras for shape in found} >= {0, 1, 4}
    if num_blocks < 64:
        assert sum(done.num_preemptions for done in got.values()) > 0


@DRIVERS
def test_steps_that_sample_nothing_are_replayed(
    eager_graphs: list[BatchDescriptor], driver: Driver
) -> None:
    """A long prompt alone, in chunks: all but the last sample nothing."""
    plain, mixed = pair(long_prefill_threshold=7)
    items = [request("x", prompt(1, 33), max_tokens=4)]
    same(
        run(mixed, with_adapters(mixed, ""), items, driver)[1],
        run(plain, with_adapters(plain, ""), items)[1],
    )
    assert [s.num_tokens for s in eager_graphs if not s.uniform_decode] == [8] * 5


def test_what_is_no_graph_is_computed_eagerly(eager_graphs: list[BatchDescriptor]) -> None:
    """Each beside a plain row that decodes, in a step that would fit a bucket."""
    plain, mixed = pair()
    embeds = torch.randn(6, plain.config.model.hidden_size, generator=torch.manual_seed(0))
    asked = [
        request("scored", prompt(2, 9), prompt_logprobs=1),
        replace(request("hidden", prompt(3, 9)), hidden_layers=(0, -1)),
        replace(request("soft", []), prompt_embeds=embeds),
        request("too long", prompt(4, 30)),
    ]
    for item in asked:
        found = []
        for program in (plain, mixed):
            state = submit(with_adapters(program, ""), request("plain", prompt(1, 5)))
            state, _ = step(program, state)
            before = len(eager_graphs)
            state = submit(state, item)
            state, _ = step(program, state)
            new = eager_graphs[before:]
            assert all(shape.uniform_decode for shape in new), item.id
            found.append(run(program, state)[1])
        same(found[1], found[0])


def bits(done: dict) -> dict:
    return {name: (c.tokens.tolist(), c.logprobs.tolist()) for name, c in done.items()}


def same_bits_where_refused(
    program: Program, fresh: Callable[[], EngineState], names: list
) -> None:
    """What keeps a step from being replayed, a neighbour's wish say, changes no bit of its rows."""
    items = [
        request(str(n), prompt(n, 3 + 11 * n % 37), names[n % len(names)], max_tokens=2 + 3 * n % 9)
        for n in range(9)
    ]
    want = history(program, fresh(), items, step)
    with pytest.MonkeyPatch.context() as patch:
        module = import_module("purestep.engine.execute")  # the package has a function of this name
        patch.setattr(module, "can_replay", lambda *_: False)
        got = history(program, fresh(), items, step)
    assert bits(got) == bits(want)


def test_refused_steps_have_the_bits_of_replayed_ones(
    eager_graphs: list[BatchDescriptor],
) -> None:
    _, program = pair()
    same_bits_where_refused(program, lambda: with_adapters(program), [None, "a", "b"])
    assert {shape.uniform_decode for shape in eager_graphs} == {True, False}


def mixing(
    program: Program, state: EngineState, decodes: list[str | None], chunks: list[tuple]
) -> tuple[EngineState, StepPlan]:
    """A plan of rows that decode and of prompts (length, adapter)."""
    items = [
        request(str(n), prompt(n, 3 + 5 * n % 20), wish, max_tokens=40)
        for n, wish in enumerate(decodes)
    ]
    state = submit_all(state, items)
    while not all(str(n) in state.host.rows.ids for n in range(len(decodes))) or (
        len(decodes) and (state.host.rows.num_tokens_R - state.host.rows.num_computed_R > 1).any()
    ):
        state, _ = step(program, state)
    news = [
        request(f"new{n}", prompt(90 + n, *size), wish) for n, (*size, wish) in enumerate(chunks)
    ]
    state = submit_all(state, news)
    _, plan = schedule(state.config, state.host)
    assert len(plan.row_ids) == len(decodes) + len(chunks)
    assert not plan.descriptor.uniform_decode
    return state, plan


def eagerly(program: Program, state: EngineState, plan: StepPlan) -> torch.Tensor:
    """Logits of a step whose tensors are packed as those of eager steps are."""
    pool = state.device.pool
    batch = pack_fused(state.config, plan, graphs_of(pool).staging)
    index_R = torch.zeros(plan.descriptor.num_rows, dtype=torch.int64, device=pool.kv[0].device)
    index_R[: len(batch.logits_index_S)] = batch.logits_index_S
    batch = replace(batch, logits_index_S=index_R)
    args = program.params, pool.layers, pool.kv, batch, state.config.model
    return step_logits(*args, uniform=False)[: int(plan.sampled_R.sum())]


def replay_equals_eager(program: Program, state: EngineState, plan: StepPlan) -> None:
    """Logits and all that is written, bit for bit."""
    kv, config = state.device.pool.kv, state.config
    assert can_replay(config, plan)
    before = [pages.clone() for pages in kv]
    with torch.inference_mode():
        got = replay(program, state.device.pool, plan).clone()
        after = [pages.clone() for pages in kv]
        for pages, old in zip(kv, before, strict=True):
            pages.copy_(old)
        want = eagerly(program, state, plan)
    assert torch.equal(got, want)
    assert torch.isfinite(got).all()
    for pages, other in zip(kv, after, strict=True):
        assert torch.equal(pages, other)


CASES = [
    (["a"], [(14, None)]),
    ([None, "b", "c"], [(5, "a"), (9, None)]),
    ([None] * 4, [(3, None)]),
    ([], [(20, "d")]),
    (["a"], [(60, "a")]),  # a chunk of it, not sampled
]


@pytest.mark.parametrize(("decodes", "chunks"), CASES)
def test_replay_equals_eager(
    eager_graphs: list[BatchDescriptor], decodes: list, chunks: list
) -> None:
    _, program = pair(max_batched_tokens=24)
    state, plan = mixing(program, with_adapters(program), decodes, chunks)
    replay_equals_eager(program, state, plan)
    assert eager_graphs[-1] == plan.descriptor


def unused_changes_no_bit(program: Program, state: EngineState, plan: StepPlan) -> None:
    """NaN in free blocks, behind contexts and in free adapter rows, and anything in the block
    tables that graphs share."""
    pool, config, B = state.device.pool, state.config, state.config.block_size
    with torch.inference_mode():
        before = [kv.clone() for kv in pool.kv]
        want = replay(program, pool, plan).clone()
        graphs_of(pool).block_table_RM.fill_(2**30)
        used = {b for table in plan.tables for b in table.tolist()}
        free = [b for b in range(config.num_blocks) if b not in used]
        rows = {8 * b + i for place in plan.residents for b in place.row_blocks for i in range(8)}
        spare = [p for p in range(config.lora_rows) if p not in rows]
        ends = (plan.start_R + plan.count_R).tolist()
        for kv, old in zip(pool.kv, before, strict=True):
            kv.copy_(old)
            kv[:, free] = torch.nan
            for end, table in zip(ends, plan.tables, strict=True):
                kv[:, int(table[-1]), end - B * (len(table) - 1) :] = torch.nan
        for name in pool.a_LSPD:
            pool.a_LSPD[name][:, :, spare] = torch.nan
            pool.b_LPO[name][:, spare] = torch.nan
        assert torch.equal(replay(program, pool, plan), want)
        for kv in pool.kv:
            assert kv[:, free].isnan().all()


def test_what_is_unused_changes_no_bit(eager_graphs: list[BatchDescriptor]) -> None:
    _, program = pair()
    state, plan = mixing(program, with_adapters(program), ["a", None, "b"], [(5, "a"), (7, None)])
    unused_changes_no_bit(program, state, plan)
    assert len(eager_graphs) >= 2


def test_graphs_are_refused_to_tokens_that_see_or_stand_elsewhere(
    eager_graphs: list[BatchDescriptor],
) -> None:
    _, program = pair()
    config = program.config
    _, plan = mixing(program, with_adapters(program), ["a"], [(5, None)])
    places_3T = frozen(np.tile(np.arange(len(plan.tokens_T)), (3, 1)))
    moved_3T = places_3T.copy()
    moved_3T[1, 3] += 1
    assert can_replay(config, plan)
    assert can_replay(config, replace(plan, position_3T=places_3T))
    assert not can_replay(config, replace(plan, position_3T=frozen(moved_3T)))
    assert not can_replay(config, replace(plan, end_T=frozen(np.zeros(len(plan.tokens_T)))))
    linears = frozenset({"head"})
    adapted = tuple(replace(place, linears=linears) for place in plan.residents)
    assert not can_replay(config, replace(plan, residents=adapted))


def test_only_a_decode_step_is_queued_ahead(eager_graphs: list[BatchDescriptor]) -> None:
    """Ids that are not known yet are put to its first tokens."""
    _, program = pair()
    config = program.config
    _, plan = mixing(program, with_adapters(program), ["a"], [(5, None)])
    plan = replace(plan, uploads=(), copies=(), drops=())
    assert can_replay(config, plan)
    assert not follows(config, plan, plan)
    shape = replace(plan.descriptor, num_tokens=2, num_rows=2, uniform_decode=True)
    assert follows(config, plan, replace(plan, descriptor=shape))


def gpu_cases() -> list[tuple[list, list]]:
    """(adapters of rows that decode, prompts); 256 tokens a step, of which a long one takes all."""
    found = []
    for active in (0, 1, 3, 8):
        names = [str(n) for n in range(active)] or [None]

        def wish(n: int, names: list = names) -> str | None:
            return names[n % len(names)] if n % 7 != 6 else None

        for decodes, lengths in (
            (1, [40]),
            (17, [47]),
            (3, [2]),
            (20, [100, 30]),
            (0, [60, 3]),
            (5, [400]),
            (23, [200]),
        ):
            rows = [wish(n) for n in range(decodes)]
            found.append((rows, [(size, wish(n)) for n, size in enumerate(lengths)]))
    return found


SIZES = {"max_context": 600, "max_batched_tokens": 256, "num_blocks": 800}


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replay_equals_eager_bit_for_bit(dtype: str) -> None:
    program, met = gpu_program(dtype, **SIZES), set()
    assert program.config.token_buckets == default_token_buckets(256)
    for decodes, chunks in gpu_cases():
        state, plan = mixing(program, with_ranks(program, RANKS), decodes, chunks)
        replay_equals_eager(program, state, plan)
        met.add(plan.descriptor)
    assert len(met) > 12


@gpu
@needs_gpu
def test_what_is_unused_changes_no_bit_on_a_gpu() -> None:
    program = gpu_program(**SIZES)
    for decodes, chunks in gpu_cases()[7::3]:
        state, plan = mixing(program, with_ranks(program, RANKS), decodes, chunks)
        unused_changes_no_bit(program, state, plan)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_refused_steps_have_the_bits_of_replayed_ones_on_a_gpu(dtype: str) -> None:
    program = gpu_program(dtype, **SIZES)
    same_bits_where_refused(program, lambda: with_ranks(program, RANKS), [None, "0", "2", "4"])


@gpu
@needs_gpu
@DRIVERS
def test_same_tokens_as_without_graphs_of_prompts(driver: Driver) -> None:
    """Float32, whose tokens do not hang on the shapes of steps; warm, nothing is captured more."""
    options = SIZES | {"max_batched_tokens": 64, "max_rows": 8, "row_buckets": ROWS}
    mixed, plain = (gpu_program("float32", token_buckets=b, **options) for b in (None, ()))
    wishes = [None, "0", "2", "4", "1"]
    items = [
        request(str(n), prompt(n, 9 + 37 * n % 150), wishes[n % 5], max_tokens=3 + 5 * n % 17)
        for n in range(16)
    ]
    want = history(plain, with_ranks(plain, RANKS), items, driver)
    state = with_ranks(mixed, RANKS)
    warm_up(mixed, state, adapters=(0, 1, 2, 4, 8))
    graphs = graphs_of(state.device.pool)
    captured = {**graphs.captured}
    got = history(mixed, state, items, driver)
    assert graphs.captured == captured
    assert got.keys() == want.keys()
    for name, done in want.items():
        assert got[name].tokens.tolist() == done.tokens.tolist()
        np.testing.assert_allclose(got[name].logprobs, done.logprobs, atol=1e-4)
