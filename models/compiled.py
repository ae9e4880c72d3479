"""A decoder's layer, compiled by torch.compile: few graphs, whatever the batch.

All layers, token counts, row counts, block table widths and pool sizes share a graph, 1 included,
so nothing needs padding. Weights are its inputs, their shapes and the number of adapter rows in a
pool part of it. T token rows.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from purestep.models.config import ModelConfig
from purestep.models.decoder import Layer, LayerAdapters, LayerFn, decoder_layer
from purestep.models.fused import FusedLayerFn, fused_layer
from purestep.state.batch import Batch, LoraTiles


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


def _lie_beneath(adapters: LayerAdapters) -> bool:
    linears = adapters.qkv, adapters.out, adapters.gate_up, adapters.down
    return any(rows.wide_WD is not None for rows in linears)


def _compiled(function: FunctionType) -> Callable[..., Any]:
    # Graphs hang on the code object and their number is limited to 8, for all models together.
    own = FunctionType(function.__code__.replace(), function.__globals__)
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
        from torch._dynamo.decorators import mark_unbacked  # here: it doubles torch's import time

        for tensor in tokens:
            mark_unbacked(tensor, 0)
        mark_unbacked(kv, 1)


def _mark_batch(batch: Batch) -> None:
    from torch._dynamo.decorators import mark_unbacked

    for tensor in (batch.kv_index_T, batch.query_start_R1, batch.context_len_R):
        mark_unbacked(tensor, 0)
    if batch.end_T is not None:
        mark_unbacked(batch.end_T, 0)
    mark_unbacked(batch.block_table_RM, (0, 1))
    lora = batch.lora
    if isinstance(lora, LoraTiles):
        mark_unbacked(lora.row_E, 0)
        mark_unbacked(lora.span_X2, 0)
        mark_unbacked(lora.token_XI, (0, 1))
    elif lora is not None:
        mark_unbacked(lora.row_R, 0)
        mark_unbacked(lora.foreign_TR, (0, 1))
        mark_unbacked(lora.span_C2, 0)
