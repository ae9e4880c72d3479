"""A decoder's layer, embedding, head and sampler, compiled by torch.compile: few graphs, whatever
the batch.

All layers, token counts, row counts, block table widths and pool sizes share a graph, 1 included,
so nothing needs padding. Weights are its inputs, their shapes and the number of adapter rows in a
pool part of it. T token rows, S sampled rows, N scored ones, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from purestep.models.config import ModelConfig
from purestep.models.decoder import (
    AdapterRows,
    EmbedRows,
    Layer,
    LayerAdapters,
    LayerFn,
    Params,
    decoder_layer,
)
from purestep.models.ends import EAGER, Ends
from purestep.models.fused import FusedLayerFn, fused_layer
from purestep.ops.edit_logits import COLUMNS
from purestep.ops.sample import Draws
from purestep.state.batch import Batch, LoraBatch, LoraTiles


def compile_layer() -> LayerFn:
    """`decoder_layer`, compiled: one graph with adapters and one without, for each window that
    layers of the model have.

    Adapters that are passed without `batch.lora` (or the other way round) make no third graph.
    Every call of this function has graphs of its own.
    """
    compiled = _compiled(decoder_layer)

    def layer_fn(
        layer: Layer,
        adapters: LayerAdapters | None,
        kv: Tensor,
        h_TD: Tensor,
        cos_TC: Tensor,
        sin_TC: Tensor,
        batch: Batch,
        config: ModelConfig,
        window: int,
    ) -> Tensor:
        if batch.lora is None:
            adapters = None
        _mark(batch, config, window, kv, (h_TD, cos_TC, sin_TC))
        return compiled(layer, adapters, kv, h_TD, cos_TC, sin_TC, batch, config, window)

    return layer_fn


def compile_fused_layer() -> FusedLayerFn:
    """`fused_layer`, compiled: graphs as of `compile_layer`, once more for uniform batches, for
    batches where tokens see what is behind them, and for adapters whose rows lie beneath the
    weights, as those of one pool do (models/room.py). Its kernels, and so its bits, are the same.
    """
    # A function each: a function may have 8 graphs, and looks for the one it wants in turn.
    graphs: dict[tuple[int, bool, bool, bool | None], FusedLayerFn] = {}

    def layer_fn(
        layer: Layer,
        next_norm_D: Tensor,
        adapters: LayerAdapters | None,
        kv: Tensor,
        h_TD: Tensor,
        x_TD: Tensor,
        cos_TC: Tensor,
        sin_TC: Tensor,
        batch: Batch,
        config: ModelConfig,
        window: int,
        uniform: bool,
    ) -> tuple[Tensor, Tensor]:
        beneath = None if batch.lora is None or adapters is None else _lie_beneath(adapters)
        key = window, uniform, batch.end_T is None, beneath
        if key not in graphs:
            graphs[key] = _compiled(fused_layer)
        tokens = h_TD, x_TD, cos_TC, sin_TC
        _mark(batch, config, window, kv, tokens)
        return graphs[key](
            layer, next_norm_D, adapters, kv, *tokens, batch, config, window, uniform
        )

    return layer_fn


def compile_ends() -> Ends:
    """`EAGER`, compiled, with the same bits: what a compiler would round in another way are ops,
    here as there.

    Of `draw` there are two graphs, with edits and without, of `embed` and `logits` one more each
    for batches with adapters on the embedding or on the head, which is compiled when these are
    met, of all others one. engine/graphs.py: `warm_up` compiles the rest.
    """
    embed, logits, head_linear = map(_compiled, (EAGER.embed, EAGER.logits, EAGER.head_linear))
    edited, greedy, score = map(_compiled, (EAGER.edited, EAGER.greedy, EAGER.score))
    draw, likeliest = _compiled(_draw), _compiled(_likeliest)

    def embed_fn(
        params: Params, rows: EmbedRows | None, batch: Batch, scale: float = 1.0
    ) -> Tensor:
        lora = batch.embed_lora
        _mark_first(batch.token_T)
        if lora is None:
            rows = None
        else:
            _mark_lora(lora.lora)
            _mark_sizes([lora.block_TC], (0, 1))
        return embed(params, rows, batch, scale)

    def logits_fn(
        params: Params,
        hidden_TD: Tensor,
        index_S: Tensor,
        head_rows: AdapterRows | None = None,
        head_lora: LoraBatch | None = None,
    ) -> Tensor:
        index_S = _alone(index_S)
        _mark_first(hidden_TD, index_S)
        if head_lora is None:
            head_rows = None
        else:
            _mark_lora(head_lora)
        return logits(params, hidden_TD, index_S, head_rows, head_lora)

    def head_linear_fn(x_SD: Tensor, w_VD: Tensor, out_SV: Tensor | None = None) -> Tensor:
        _mark_first(x_SD, *(() if out_SV is None else (out_SV,)))
        return head_linear(x_SD, w_VD, out_SV)

    def edited_fn(raw_SV: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        none = {
            n: torch.empty(0, dtype=dtype, device=raw_SV.device) for n, dtype in COLUMNS.items()
        }
        whole = {n: _alone(columns.get(n, own)) for n, own in none.items()}
        _mark_first(raw_SV, *whole.values())
        return edited(raw_SV, whole)

    def greedy_fn(logits_SV: Tensor) -> Tensor:
        _mark_first(logits_SV)
        return greedy(logits_SV)

    def draw_fn(logits_SV: Tensor, raw_SV: Tensor, draws: Draws, largest_k: int) -> Tensor:
        draws = Draws(*map(_alone, draws))
        _mark_first(logits_SV, raw_SV, *draws)
        return draw(logits_SV, raw_SV, draws, _as_size(largest_k))

    def likeliest_fn(logits_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        _mark_first(logits_NV)
        return likeliest(logits_NV, _as_size(count))

    def score_fn(logits_NV: Tensor, token_N: Tensor) -> Tensor:
        _mark_first(logits_NV, token_N)
        return score(logits_NV, token_N)

    return Ends(
        embed=embed_fn,
        logits=logits_fn,
        head_linear=head_linear_fn,
        edited=edited_fn,
        greedy=greedy_fn,
        draw=draw_fn,
        likeliest=likeliest_fn,
        score=score_fn,
    )


def _draw(logits_SV: Tensor, raw_SV: Tensor, draws: Draws, room_K0: Tensor) -> Tensor:
    return EAGER.draw(logits_SV, raw_SV, draws, room_K0.shape[0])


def _likeliest(logits_NV: Tensor, room_K0: Tensor) -> tuple[Tensor, Tensor]:
    return EAGER.likeliest(logits_NV, room_K0.shape[0])


def _alone(tensor: Tensor) -> Tensor:
    """The same at the beginning of its memory. Another place would be a graph of its own, as would
    two tensors with one place, and an empty array of numpy, whose stride is 0."""
    if not len(tensor):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return tensor.clone() if tensor.storage_offset() else tensor


def _as_size(number: int) -> Tensor:
    """A number as the size of a tensor, since each plain one would be a graph of its own."""
    room_K0 = torch.empty(number, 0)
    _mark_first(room_K0)
    return room_K0


def _lie_beneath(adapters: LayerAdapters) -> bool:
    linears = adapters.qkv, adapters.out, adapters.gate_up, adapters.down
    return any(rows.wide_WD is not None for rows in linears)


def _compiled(function: FunctionType) -> Callable[..., Any]:
    # Graphs hang on the code object and their number is limited to 8, for all models together.
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return torch.compile(own, fullgraph=True, dynamic=False)


def _mark(
    batch: Batch, config: ModelConfig, window: int, kv: Tensor, tokens: tuple[Tensor, ...]
) -> None:
    """Tell the compiler which sizes vary. It matters when a graph is made, which is always in the
    first layer that sees a batch, or in one whose window the first does not have; with the batch
    it takes 60 us, in every layer of a 30-layer model it would take 2 ms a step.

    Unbacked, since `dynamic=True` makes graphs of its own for size 1 and for a size that happens
    to equal another one (T = 2 and the two halves of kv): 8 graphs in a walk over T = 1..64."""
    new = not hasattr(batch.kv_index_T, "_dynamo_unbacked_indices")
    if new:
        _mark_batch(batch)
    if new or window != config.windows[0]:
        _mark_first(*tokens)
        _mark_sizes([kv], 1)


def _mark_batch(batch: Batch) -> None:
    _mark_first(batch.kv_index_T, batch.query_start_R1, batch.context_len_R)
    if batch.end_T is not None:
        _mark_first(batch.end_T)
    _mark_sizes([batch.block_table_RM], (0, 1))
    lora = batch.lora
    if isinstance(lora, LoraTiles):
        _mark_first(lora.row_E, lora.span_X2)
        _mark_sizes([lora.token_XI], (0, 1))
    elif lora is not None:
        _mark_lora(lora)


def _mark_lora(lora: LoraBatch) -> None:
    _mark_first(lora.row_R, lora.span_C2)
    _mark_sizes([lora.foreign_TR], (0, 1))


def _mark_first(*tensors: Tensor) -> None:
    _mark_sizes(tensors, 0)


def _mark_sizes(tensors: Sequence[Tensor], dims: int | tuple[int, ...]) -> None:
    from torch._dynamo.decorators import mark_unbacked  # here: it doubles torch's import time

    for tensor in tensors:
        mark_unbacked(tensor, dims)
