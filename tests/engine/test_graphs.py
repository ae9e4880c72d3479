"""Decode steps as CUDA graphs: which graph a step meets, and that replaying it changes no bit."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.gpu_engine import random_adapter, random_params, tiny_shape
from purestep.engine import (
    AdapterLoaded,
    EngineState,
    Program,
    deliver,
    fork,
    init,
    make_program,
    schedule,
    step,
    step_ahead,
    warm_up,
)
from purestep.engine.config import describe, has_graph
from purestep.engine.graphs import can_replay, graphs_of, replay
from purestep.engine.options import default_row_buckets
from purestep.models.fused import step_logits
from tests.engine.test_compile import ENDS, KINDS, assert_same
from tests.engine.tiny import (
    Driver,
    gpu_twin,
    in_room,
    prompt,
    request,
    run,
    submit_all,
    tiny_program,
    with_adapters,
)

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BUCKETS = (1, 2, 4, 8, 16, 24)


def test_the_key_fits_and_is_the_smallest() -> None:
    """For 1 to 16 adapters and every number of rows; above the largest there is no graph."""
    config = tiny_program(max_rows=8, max_active_adapters=16, max_registered_adapters=16).config
    config = replace(config, row_buckets=BUCKETS)
    reached = set()
    for rows in range(1, 27):
        for active in range(17):
            key = describe(config, rows, rows, active)
            if rows > BUCKETS[-1]:
                assert not has_graph(config, key)
                assert key.num_rows == key.num_tokens == rows
                continue
            assert has_graph(config, key)
            assert key.num_rows == key.num_tokens == min(b for b in BUCKETS if b >= rows)
            wanted = [0, 1, 2, 4, 8, 16]
            assert key.num_active_loras == min(n for n in wanted if n >= active)
            assert key.has_lora == (active > 0)
            reached.add(key)
    assert len(reached) == len(BUCKETS) * 6
    assert not has_graph(config, describe(config, 9, 8, 0)), "there are no token_buckets"


@pytest.mark.parametrize("most", range(1, 17))
def test_counts_round_up_to_the_largest_allowed(most: int) -> None:
    config = replace(tiny_program().config, max_active_adapters=most, row_buckets=BUCKETS)
    for active in range(1, most + 1):
        found = describe(config, 4, 4, active).num_active_loras
        assert active <= found <= most
        assert found == most or found & (found - 1) == 0


def test_default_buckets_ascend_to_max_rows() -> None:
    for rows in (1, 3, 8, 17, 64, 256, 511, 512, 1000):
        buckets = default_row_buckets(rows)
        assert buckets[-1] == min(rows, 512)
        assert list(buckets) == sorted({*buckets})


def gpu_program(dtype: str = "bfloat16", **options) -> Program:
    shape = replace(tiny_shape(), num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512)
    params = random_params(shape, "cuda")
    kind = getattr(torch, dtype)
    params = torch.utils._pytree.tree_map(lambda t: None if t is None else t.to(kind), params)
    defaults = {
        "weights": "random",
        "dtype": dtype,
        "num_blocks": 400,
        "max_rows": 24,
        "max_context": 128,
        "max_active_adapters": 8,
        "lora_rows": 160,
        "prefix_caching": False,
        "row_buckets": BUCKETS,
    }
    return make_program(**in_room(shape, params, defaults | options))


def with_ranks(program: Program, ranks: tuple[int, ...]) -> EngineState:
    state = init(program)
    for n, rank in enumerate(ranks):
        adapter = random_adapter(program.config.model, rank, n, program)
        state = deliver(state, AdapterLoaded(name=str(n), source=None, adapter=adapter))
    return state


RANKS = (16, 8, 32, 16, 8, 24, 16, 8)


def decoding(program: Program, wishes: list[str | None]) -> EngineState:
    """A state whose next step decodes one row for each wish."""
    requests = [
        request(str(n), prompt(n, 3 + 5 * n % 40), wish, max_tokens=40)
        for n, wish in enumerate(wishes)
    ]
    state = submit_all(with_ranks(program, RANKS), requests)
    for _ in range(3):
        state, _ = step(program, state)
    return state


def cases() -> Iterator[tuple[int, int, bool]]:
    for rows in (1, 2, 3, 8, 9, 16, 17):
        for active in (0, 1, 2, 3, 5, 8):
            for mixed in (False, True):
                if active <= rows - mixed and (active or not mixed):
                    yield rows, active, mixed


@gpu
@needs_gpu
def test_replay_equals_eager_bit_for_bit() -> None:
    program = gpu_program()
    for rows, active, mixed in cases():
        wishes = [str(n % active) if active else None for n in range(rows)]
        if mixed:
            wishes[0] = None
        state = decoding(program, wishes)
        pool = state.device.pool
        _, plan = schedule(state.config, state.host)
        assert can_replay(state.config, plan)
        before = [kv.clone() for kv in pool.kv]
        with torch.inference_mode():
            got = replay(program, pool, plan).clone()
            after = [kv.clone() for kv in pool.kv]
            for kv, old in zip(pool.kv, before, strict=True):
                kv.copy_(old)
            graph = graphs_of(pool).captured[plan.descriptor]
            batch = graph.batch
            args = program.params, pool.layers, pool.kv, batch, state.config.model
            want = step_logits(*args, uniform=True)
        assert torch.equal(got, want[: len(plan.row_ids)]), (rows, active, mixed)
        assert torch.isfinite(got).all()
        for kv, other in zip(pool.kv, after, strict=True):
            assert torch.equal(kv, other)


@gpu
@needs_gpu
def test_what_is_unused_changes_no_bit() -> None:
    """NaN in free adapter rows, free blocks and behind the context; and padding writes nowhere."""
    program = gpu_program()
    state = decoding(program, ["0", None, "2", "4", None])
    pool = state.device.pool
    _, plan = schedule(state.config, state.host)
    with torch.inference_mode():
        want = replay(program, pool, plan).clone()
        used = {b for table in plan.tables for b in table.tolist()}
        free = [b for b in range(state.config.num_blocks) if b not in used]
        rows = {8 * b + i for place in plan.residents for b in place.row_blocks for i in range(8)}
        spare = [p for p in range(state.config.lora_rows) if p not in rows]
        for kv in pool.kv:
            kv[:, free] = torch.nan
            for row, table in enumerate(plan.tables):
                end = int(plan.start_R[row]) + 1
                kv[:, int(table[-1]), end - 16 * (len(table) - 1) :] = torch.nan
        for name in pool.a_LSPD:
            pool.a_LSPD[name][:, :, spare] = torch.nan
            pool.b_LPO[name][:, spare] = torch.nan
        got = replay(program, pool, plan)
        assert torch.equal(got, want)
        for kv in pool.kv:
            assert kv[:, free].isnan().all()


@gpu
@needs_gpu
def test_a_base_row_keeps_its_bits_beside_any_adapter() -> None:
    program, found = gpu_program(), []
    for wishes in (["0", None, "1"], ["2", None, "1"], ["3", None, "5"]):
        state = decoding(program, wishes)
        _, plan = schedule(state.config, state.host)
        with torch.inference_mode():
            found.append(replay(program, state.device.pool, plan)[1].clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@gpu
@needs_gpu
@pytest.mark.parametrize("driver", [step, step_ahead], ids=lambda d: d.__name__)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_fp32_tokens_equal_those_of_a_cpu(family: str, driver: Driver) -> None:
    names = "abcd" if family == "llama" else ""
    wishes = [None, *names] if names else [None]
    requests = [
        request(str(n), prompt(n, 2 + 5 * n), wishes[n % len(wishes)], max_tokens=12)
        for n in range(8)
    ]
    cpu = tiny_program(family, max_batched_tokens=24)
    program = gpu_twin(cpu)
    _, want = run(cpu, with_adapters(cpu, names), requests)
    _, got = run(program, with_adapters(program, names), requests, driver)
    for name, done in want.items():
        assert got[name].tokens.tolist() == done.tokens.tolist()
        np.testing.assert_allclose(got[name].logprobs, done.logprobs, atol=1e-4)


@gpu
@needs_gpu
@pytest.mark.parametrize("driver", [step, step_ahead], ids=lambda d: d.__name__)
def test_two_runs_give_identical_tokens_and_logprobs(driver: Driver) -> None:
    wishes = [None, "0", "2", "4", "1"]
    requests = [request(str(n), prompt(n, 9 + n), wishes[n % 5], max_tokens=20) for n in range(20)]
    program = gpu_program()
    found = [run(program, with_ranks(program, RANKS), requests, driver)[1] for _ in range(2)]
    for name, done in found[0].items():
        assert done.tokens.tolist() == found[1][name].tokens.tolist()
        assert done.logprobs.tolist() == found[1][name].logprobs.tolist()


@gpu
@needs_gpu
def test_a_decode_step_waits_for_nothing_but_its_tokens() -> None:
    """An implicit wait would also wait for the step queued behind, and leave the GPU idle after."""
    program = gpu_program()
    state = decoding(program, ["0", None, "2", "4", None])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            state, _ = step(program, state)
            assert graphs_of(state.device.pool).ahead is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@needs_gpu
def test_with_a_plan_in_flight_nothing_waits_but_for_the_step_before() -> None:
    """Also where prompts are computed and rows end one by one, so that ids come from anywhere."""
    program, wishes = gpu_program(max_batched_tokens=64), [None, "0", "2", "4", "1"]
    requests = [
        request(str(n), prompt(n, 9 + 7 * n), wishes[n % 5], max_tokens=3 + 5 * n % 17)
        for n in range(16)
    ]
    _, want = run(program, with_ranks(program, RANKS), requests, step_ahead)
    state = with_ranks(program, RANKS)
    state, _ = run(program, state, [request(w, prompt(1, 5), w) for w in "0241"], step_ahead)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, got = run(program, state, requests, step_ahead)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {name: len(done.tokens) for name, done in got.items()} == {
        name: len(done.tokens) for name, done in want.items()
    }


@gpu
@needs_gpu
def test_a_warm_program_captures_no_more() -> None:
    program = gpu_program(max_rows=4, row_buckets=(1, 2, 4), token_buckets=(16, 32))
    state = with_ranks(program, RANKS)
    warm_up(program, state, adapters=(0, 1, 2, 4))
    captured = {**graphs_of(state.device.pool).captured}
    assert len(captured) == (3 + 2) * 4
    twin = fork(program, state)
    assert twin.device.pool.graphs is None, "graphs belong to a pool"
    requests = [request(str(n), prompt(n, 5), [None, "0", "3"][n % 3]) for n in range(7)]
    state, _ = run(program, state, requests)
    assert graphs_of(state.device.pool).captured == captured
    _, done = run(program, twin, requests)
    assert len(done) == 7


@gpu
@needs_gpu
@pytest.mark.parametrize("driver", [step, step_ahead], ids=lambda d: d.__name__)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiled_layers_and_ends_change_no_bit(dtype: str, driver: Driver) -> None:
    """Graphs of them and steps beside them, drawn and told of in all ways, after a warm-up none of
    which compiles anything."""
    options = {"dtype": dtype, "max_batched_tokens": 96, "max_rows": 8, "row_buckets": (1, 4, 8)}
    eager, program = gpu_program(**options), gpu_program(compile=True, **options)
    counters = torch._dynamo.utils.counters
    counters.clear()
    state, plain = with_ranks(program, RANKS), with_ranks(eager, RANKS)
    warm_up(program, state, adapters=(0, 1, 2, 4, 8))
    assert counters["stats"]["unique_graphs"] == 4 + ENDS + 1  # the head of captured steps
    # Its adapters' rows are apart from the weights, not beneath: two more with adapters.
    twin, plain_twin = fork(program, state), fork(eager, plain)
    warm_up(program, twin, adapters=(0, 1, 2, 4, 8))
    assert counters["stats"]["unique_graphs"] == 6 + ENDS + 1
    wishes = [None, "0", "2", "4", "1"]
    with torch.compiler.set_stance("fail_on_recompile"):
        for count, long in ((12, 7), (1, 1), (3, 30)):
            requests = [
                request(
                    str(n),
                    prompt(n, 1 + long * n % 80),
                    wishes[n % 5],
                    **{"max_tokens": 3 + 5 * n} | KINDS[(n + count) % len(KINDS)],
                )
                for n in range(count)
            ]
            state, got = run(program, state, requests, driver)
            plain, want = run(eager, plain, requests, driver)
            twin, got_twin = run(program, twin, requests, driver)
            plain_twin, want_twin = run(eager, plain_twin, requests, driver)
            for found, wanted in ((got, want), (got_twin, want_twin)):
                assert_same(found, wanted)
    assert counters["stats"]["unique_graphs"] == 6 + ENDS + 1
