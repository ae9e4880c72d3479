"""What several engine tests need."""

import pytest

from purestep.engine import Program, graphs
from purestep.engine.graphs import Graph, graphs_of, padding
from purestep.models.fused import decode_logits


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs are played by their eager functions, which needs no GPU; the list counts replays."""
    replays = []

    def capture(program: Program, pool, shape) -> Graph:
        inputs, batch = padding(pool.config, shape)
        args = program.params, pool.layers, pool.kv, batch, pool.config.model
        out = graphs_of(pool).logits_RV[: shape.num_rows]

        def replay() -> None:
            replays.append(shape.num_rows)
            decode_logits(*args, out, program.fused_layer, program.ends)

        return Graph(inputs=inputs, batch=batch, replay=replay, program=program)

    monkeypatch.setattr(graphs, "capture", capture)
    return replays
