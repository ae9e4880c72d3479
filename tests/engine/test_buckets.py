"""Which graph a step meets, which are captured, and what is reserved for them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.engine import init, warm_up
from purestep.engine.config import Config, describe, has_graph, largest_graph
from purestep.engine.graphs import graphs_of
from purestep.engine.memory import graph_bytes, reserve_bytes, step_bytes
from purestep.engine.options import default_token_buckets
from purestep.state.plan import BatchDescriptor
from tests.engine.tiny import tiny_program

ROWS, TOKENS = (1, 2, 4, 8), (4, 8, 16, 24)


def with_buckets(**fields) -> Config:
    return replace(tiny_program(max_active_adapters=3).config, **fields)


@st.composite
def buckets(draw, least: int = 1) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(least, 40), max_size=5))))


@given(buckets(), buckets(), st.integers(1, 12), st.integers(1, 50), st.data())
def test_the_key_fits_and_is_the_smallest(tokens, rows, max_rows, num_tokens, data) -> None:
    config = with_buckets(token_buckets=tokens, row_buckets=rows, max_rows=max_rows)
    num_rows = data.draw(st.integers(1, min(num_tokens, max_rows)))
    active = data.draw(st.integers(0, 3))
    key = describe(config, num_tokens, num_rows, active)
    assert key.uniform_decode == (num_tokens == num_rows)
    assert key.num_active_loras == (0, 1, 2, 3)[active]
    assert key.num_tokens >= num_tokens
    assert max_rows >= key.num_rows >= num_rows or key.num_rows in rows
    if not key.uniform_decode:
        found = [b for b in tokens if b >= num_tokens]
        assert key.num_tokens == min(found, default=num_tokens)
        assert has_graph(config, key) == bool(found and rows)
        # One graph for a bucket, whatever the rows, of which there can be no more.
        most = min(key.num_tokens, max_rows)
        assert key.num_rows == (most if has_graph(config, key) else num_rows)
    else:
        found = [b for b in rows if b >= num_rows]
        assert has_graph(config, key) == bool(found)
        assert key.num_rows == min(found, default=num_rows)
        assert key.num_tokens == key.num_rows or not rows


@given(buckets(), buckets(), st.integers(1, 8), st.integers(0, 24))
def test_what_is_captured_is_what_steps_meet(tokens, rows, max_rows, more) -> None:
    """And the largest first, whose memory the others share."""
    rows = (*(b for b in rows if b < max_rows), max_rows)
    most = max_rows + more
    sizes = {"token_buckets": tokens, "row_buckets": rows, "max_rows": max_rows}
    program = tiny_program(**sizes, max_batched_tokens=most)
    state, config = init(program), program.config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("purestep.engine.graphs.capture", lambda _p, _pool, shape: shape)
        warm_up(program, state)
        captured = graphs_of(state.device.pool).captured
    steps = [(n, r) for n in range(1, most + 1) for r in range(1, min(n, max_rows) + 1)]
    met = {describe(config, n, r, 0) for n, r in steps}
    assert {*captured} == {shape for shape in met if has_graph(config, shape)}
    order = [shape.num_tokens for shape in captured]
    assert order == sorted(order, reverse=True)
    logits_RV, table_RM = (
        getattr(graphs_of(state.device.pool), n) for n in ("logits_RV", "block_table_RM")
    )
    assert len(logits_RV) == len(table_RM) >= max(shape.num_rows for shape in captured)


def test_warm_up_takes_the_sizes_it_is_given(eager_graphs: list[BatchDescriptor]) -> None:
    program = tiny_program(row_buckets=ROWS, token_buckets=TOKENS)
    for words, count in (
        ({"tokens": ()}, 8),
        ({"rows": (), "tokens": (3, 4, 9)}, 4),
        ({"rows": (), "tokens": (1,)}, 0),  # a step of one token decodes
        ({}, 16),
    ):
        state = init(program)
        warm_up(program, state, adapters=(0, 1), **words)
        assert len(graphs_of(state.device.pool).captured) == count
    assert not eager_graphs, "captured, not replayed"


def test_default_buckets_ascend_to_the_largest_step() -> None:
    for tokens in (2, 16, 20, 100, 256, 511, 1024, 8192):
        found = default_token_buckets(tokens)
        assert found[-1] == min(tokens, 1024)
        assert list(found) == sorted({*found})
    steps = (96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
    assert found == (16, 32, 64, *steps)
    assert tiny_program().config.token_buckets == (), "on a CPU there are no graphs"


def test_memory_is_reserved_for_the_largest_graph() -> None:
    """In tokens and in rows, which need not be the same one; none where there are no graphs."""
    for tokens, rows, largest in (
        ((), (1, 8), (8, 8)),
        ((4, 24), (1, 2), (24, 8)),
        ((2,), (1, 8), (8, 8)),
        ((24,), (), (0, 0)),
    ):
        config = with_buckets(token_buckets=tokens, row_buckets=rows)
        assert largest_graph(config) == largest
        step_ = step_bytes(config.model, config.max_batched_tokens, config.max_rows, False)
        graphs = reserve_bytes(replace(config, lora_vocab=False)) - step_
        assert graphs == graph_bytes(config.model, *largest, False)
        assert bool(graphs) == bool(rows)
