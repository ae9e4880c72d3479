"""What several engine tests need."""

import pytest

from purestep.engine import Program, graphs
from purestep.engine.graphs import Graph, graphs_of, padding
from purestep.models.fused import step_logits
from purestep.state.plan import BatchDescriptor


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> list[BatchDescriptor]:
    """Graphs are played by their eager functions, which needs no GPU; the list takes the shape of
    each replay."""
    replays = []

    def capture(program: Program, pool, shape) -> Graph:
        inputs, batch = padding(pool.config, shape, graphs_of(pool).block_table_RM)
        args = program.params, pool.layers, pool.kv, batch, pool.config.model
        out = graphs_of(pool).logits_RV[: shape.num_rows]

        def replay() -> None:
            replays.append(shape)
            own = *args, out, program.fused_layer, program.ends
            step_logits(*own, uniform=shape.uniform_decode)

        return Graph(inputs=inputs, batch=batch, replay=replay, program=program)

    monkeypatch.setattr(graphs, "capture", capture)
    return replays
