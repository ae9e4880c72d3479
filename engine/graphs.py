"""CUDA graphs of steps: one for each batch descriptor, captured when it is first met.

A graph reads one buffer and block tables, which a step fills by one copy to the device, and writes
logits. Block tables and logits lie in memory that all graphs share. It belongs to a pool: KV pages
and adapter rows are baked in by address. R rows of a bucket, M blocks of the longest row that there
may be, S sampled rows, V vocabulary, r and m the rows and blocks of a step.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.engine.config import Config, describe, has_graph, largest_graph
from purestep.engine.empty_steps import run_empty
from purestep.engine.pack import (
    Staging,
    bucket_arrays,
    bucket_fields,
    gather_,
    layout,
    positions_differ,
    views,
)
from purestep.engine.pool import Pool, claim
from purestep.engine.program import Program
from purestep.models.fused import step_logits
from purestep.state.adapters import Residence
from purestep.state.batch import Batch
from purestep.state.engine import EngineState
from purestep.state.plan import BatchDescriptor, StepPlan
from purestep.state.tables import same_tables


@dataclass(slots=True, eq=False)
class Graph:
    """A captured step."""

    inputs: Tensor  # bytes, all that a step tells it but block tables
    batch: Batch  # the same, as the tensors that the graph reads
    replay: Any
    program: Program  # whose weights it reads


@dataclass(slots=True, eq=False)
class Graphs:
    """The graphs of one pool, and the memory that they share."""

    logits_RV: Tensor  # fp32, as many rows as the largest graph
    block_table_RM: Tensor  # int32; a step writes what it reads
    memory: Any = None  # from the first capture on
    captured: dict[BatchDescriptor, Graph] = field(default_factory=dict)
    # What was enqueued before it was asked for (engine/ahead.py), with the tokens that it has
    # taken, and on whose weights.
    ahead: tuple[Program, StepPlan] | None = None
    staging: Staging = field(default_factory=Staging)  # of what a step is told


def graphs_of(pool: Pool) -> Graphs:
    """The pool's graphs, none at first."""
    if pool.graphs is None:
        config, device = pool.config, pool.config.device
        _, R = largest_graph(config)
        V, M = config.model.vocab_size, -(-config.max_context // config.block_size)
        pool.graphs = Graphs(
            logits_RV=torch.empty((R, V), dtype=torch.float32, device=device),
            block_table_RM=_no_tables(R, M, device),
        )
    return pool.graphs


def _no_tables(R: int, M: int, device: str) -> Tensor:
    """Block tables [R, M] of zeros. A compiler makes graphs of its own for tensors at the beginning
    of their memory, which eager steps' tables are not, and for two with one offset in theirs, so
    they lie behind all that a step's other arrays take; where there are no graphs, nowhere."""
    offset = 1 << 20 if R else 0
    return torch.zeros(offset + R * M, dtype=torch.int32, device=device)[offset:].view(R, M)


def can_replay(config: Config, plan: StepPlan) -> bool:
    """Whether the plan's forward pass is a graph: a step that fits a bucket, of which nothing but
    logits is wanted, whose tokens stand in a line and see what is before them, and whose adapters
    leave embedding and head alone. A decode step's graph has logits of its rows in their order, so
    all must be sampled."""
    plain = not (plan.scored or plan.hidden or plan.embedded or plan.encodes or plan.merges)
    plain = plain and plan.end_T is None and not positions_differ(plan)
    plain = plain and not any({"embed", "head"} & {*place.linears} for place in plan.residents)
    plain = plain and (plan.sampled_R.all() or not plan.descriptor.uniform_decode)
    return bool(plain) and has_graph(config, plan.descriptor)


def replay(program: Program, pool: Pool, plan: StepPlan, drawn_S: Tensor | None = None) -> Tensor:
    """fp32 logits of the rows that the plan samples [S, V], valid until the next replay. `drawn_S`
    are the tokens of the step before, where the plan wants some of them."""
    graphs = graphs_of(pool)
    ahead, graphs.ahead = graphs.ahead, None
    if ahead is None or ahead[0] is not program or not same_pass(ahead[1], plan):
        enqueue(program, pool, plan, drawn_S=drawn_S)
    return graphs.logits_RV[: int(plan.sampled_R.sum())]


def enqueue(
    program: Program,
    pool: Pool,
    plan: StepPlan,
    token_S: Tensor | None = None,
    drawn_S: Tensor | None = None,
) -> None:
    """Replay the plan's graph, which it captures first if it must; does not wait.

    `token_S`, on the device, takes the place of a decode step's tokens; of `drawn_S` those do that
    the plan names.
    """
    graphs = graphs_of(pool)
    graph = graphs.captured.get(plan.descriptor)
    if graph is None or graph.program is not program:
        graph = capture(program, pool, plan.descriptor)
        graphs.captured[plan.descriptor] = graph
    arrays = bucket_arrays(pool.config, plan)
    told = graphs.staging.send(arrays, pool.config.device)
    spots, _ = layout({name: (a.shape, a.dtype) for name, a in arrays.items()})
    start, (r, m), _ = spots["block_table_RM"]  # the last
    graph.inputs.copy_(told[:start])  # raises for what is laid out in another way
    table_rm = told[start : start + 4 * r * m].view(torch.int32).view(r, m)
    graph.batch.block_table_RM[:r, :m].copy_(table_rm)
    if token_S is not None:
        graph.batch.token_T[: len(token_S)].copy_(token_S)
    if drawn_S is not None:
        gather_(graph.batch.token_T, plan, drawn_S)
    graph.replay()


def same_pass(one: StepPlan, other: StepPlan) -> bool:
    """Whether two plans that decode ask the same of the device."""
    if one.descriptor != other.descriptor or one.row_ids != other.row_ids:
        return False
    if other.uploads or other.copies or not same_places(one.residents, other.residents):
        return False
    arrays = ((getattr(one, n), getattr(other, n)) for n in ("start_R", "slot_R", "tokens_T"))
    return all(np.array_equal(a, b) for a, b in arrays) and same_tables(one.tables, other.tables)


def same_places(one: Sequence[Residence], other: Sequence[Residence]) -> bool:
    """Whether the same adapters lie in the same rows."""
    places = ([(p.version, p.slot, p.row_blocks) for p in side] for side in (one, other))
    return next(places) == next(places)


def capture(program: Program, pool: Pool, shape: BatchDescriptor) -> Graph:
    """Record a step of this shape; nothing is written but padding's logits."""
    graphs = graphs_of(pool)
    graphs.ahead = None  # what was queued has its logits where padding's go
    inputs, batch = padding(pool.config, shape, graphs.block_table_RM)
    args = program.params, pool.layers, pool.kv, batch, pool.config.model
    args = *args, graphs.logits_RV[: shape.num_rows], program.fused_layer, program.ends

    def run() -> None:
        step_logits(*args, uniform=shape.uniform_decode)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled outside the graph
        run()
    torch.cuda.current_stream().wait_stream(stream)
    if graphs.memory is None:
        graphs.memory = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=graphs.memory):
        run()
    return Graph(inputs=inputs, batch=batch, replay=graph.replay, program=program)


def padding(config: Config, shape: BatchDescriptor, table_RM: Tensor) -> tuple[Tensor, Batch]:
    """A buffer for steps of this shape, and the batch over it and the first rows of `table_RM`,
    with no row in it."""
    spots, size = layout(bucket_fields(config, shape))
    inputs = torch.zeros(size, dtype=torch.uint8, device=config.device)
    batch = views(inputs, spots, block_table_RM=table_RM[: shape.num_rows])
    batch.kv_index_T.fill_(-1)
    if batch.lora is not None:
        batch.lora.token_XI.fill_(-1)
    return inputs, batch


def warm_up(
    program: Program,
    state: EngineState,
    rows: Iterable[int] | None = None,
    adapters: Collection[int] = (0,),
    tokens: Iterable[int] | None = None,
) -> None:
    """Capture graphs of steps before they are met, and with `compile=True` compile what all other
    steps run.

    For each number of rows of a decode step and each number of tokens of a step that does not only
    decode (all buckets of either, if none is given; none for `()`), and for each number of active
    adapters. `state` is not changed. On a CPU nothing is captured. What adapters on the embedding
    or on the head need is compiled when they are met, and where `adapters` is 0 alone so is the
    layer with adapters. Raises DonatedStateError for a spent state.
    """
    pool, config = claim(state.device), state.config
    sizes = [(n, n) for n in (config.row_buckets if rows is None else rows)]
    computed = config.token_buckets if tokens is None else tokens
    mixed = (min(n, config.max_batched_tokens) for n in computed)
    sizes += [(n, 1) for n in mixed if n > 1]  # a step of one token decodes
    shapes = [describe(config, *size, num_active) for size in sizes for num_active in adapters]
    shapes.sort(key=lambda shape: -shape.num_tokens)  # the largest first, whose memory all share
    with torch.inference_mode():
        for shape in shapes:
            graphs = graphs_of(pool) if has_graph(config, shape) else None
            if graphs is not None and shape not in graphs.captured:
                graphs.captured[shape] = capture(program, pool, shape)
        if config.compile:
            for num_active in adapters:
                shape = describe(config, 2, 2, num_active)
                table_RM = _no_tables(shape.num_rows, 1, config.device)
                run_empty(program, pool, padding(config, shape, table_RM)[1])
