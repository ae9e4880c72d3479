"""The dense decoder: one forward pass over a mixed batch of rows and adapters.

T token rows, D hidden, F MLP width, N query heads, K key/value heads, H head size, V vocabulary,
O output width of a fused linear, S slices of it (or sampled rows), P paged adapter rows.
"""

from collections.abc import Callable, Sequence
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.models.config import ModelConfig
from purestep.models.linear import product
from purestep.models.rope import apply_rope, inv_freq, rope_table
from purestep.ops.kv_write import kv_write_
from purestep.ops.lora_add import lora_add_
from purestep.ops.paged_attention import paged_attention
from purestep.state.batch import Batch, LoraBatch
from purestep.state.pytree import tree


@tree
class Layer:
    """Weights of one layer, projections that share an input stacked along the output."""

    attn_norm_D: Tensor
    qkv_OD: Tensor  # q, k, v
    qkv_bias_O: Tensor | None
    out_DO: Tensor
    out_bias_D: Tensor | None
    mlp_norm_D: Tensor
    gate_up_OD: Tensor  # gate, up
    gate_up_bias_O: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None


@tree
class Params:
    """Weights of the model. With tied embeddings `head_VD` is `embed_VD` itself."""

    embed_VD: Tensor
    layers: tuple[Layer, ...]
    norm_D: Tensor
    head_VD: Tensor


@tree
class AdapterRows:
    """Device rows of the resident adapters of one fused linear; `upload` writes them in place."""

    a_SPD: Tensor  # rows of A, one slice for each child
    b_PO: Tensor  # the same rows of B, transposed, scaling folded in, children side by side


@tree
class LayerAdapters:
    """Adapter rows of one layer, named like the layer's linears."""

    qkv: AdapterRows
    out: AdapterRows
    gate_up: AdapterRows
    down: AdapterRows


LayerFn = Callable[
    [Layer, LayerAdapters | None, Tensor, Tensor, Tensor, Tensor, Batch, ModelConfig], Tensor
]


def forward(
    params: Params,
    adapters: tuple[LayerAdapters, ...] | None,
    kv: Sequence[Tensor],
    batch: Batch,
    config: ModelConfig,
    layer_fn: LayerFn | None = None,
) -> Tensor:
    """Final hidden states of every token row, normed: [T, D]. Writes the new keys and values.

    `kv` holds one [2, num_blocks, block_size, K, H] tensor a layer. `adapters` (one a layer) is
    read only if `batch.lora` is there. `layer_fn` is `decoder_layer` or its compiled form.
    """
    layer_fn = layer_fn or decoder_layer
    h_TD = embed(params, batch.token_T)
    freq = inv_freq(config.rope, config.head_dim).to(h_TD.device)
    cos_TH, sin_TH = rope_table(freq, batch.position_T, h_TD.dtype)
    rows = adapters if adapters is not None else (None,) * len(params.layers)
    for layer, layer_rows, pages in zip(params.layers, rows, kv, strict=True):
        h_TD = layer_fn(layer, layer_rows, pages, h_TD, cos_TH, sin_TH, batch, config)
    return rms_norm(h_TD, params.norm_D, config.norm_eps)


def embed(params: Params, token_T: Tensor) -> Tensor:
    """Rows of the embedding table; padding tokens need a valid id, any will do."""
    return F.embedding(token_T, params.embed_VD)


def logits(params: Params, hidden_TD: Tensor, index_S: Tensor) -> Tensor:
    """fp32 logits [S, V] of the token rows `index_S`."""
    return product(hidden_TD.index_select(0, index_S), params.head_VD, None).float()


def decoder_layer(
    layer: Layer,
    adapters: LayerAdapters | None,
    kv: Tensor,
    h_TD: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    batch: Batch,
    config: ModelConfig,
) -> Tensor:
    """One layer: hidden states in, hidden states out, keys and values written to `kv`."""
    x_TD = rms_norm(h_TD, layer.attn_norm_D, config.norm_eps)
    h_TD = h_TD + attention(layer, adapters, kv, x_TD, cos_TH, sin_TH, batch, config)
    x_TD = rms_norm(h_TD, layer.mlp_norm_D, config.norm_eps)
    return h_TD + mlp(layer, adapters, x_TD, batch.lora, config)


def attention(
    layer: Layer,
    adapters: LayerAdapters | None,
    kv: Tensor,
    x_TD: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    batch: Batch,
    config: ModelConfig,
) -> Tensor:
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    sizes = (config.q_size, config.kv_size, config.kv_size)
    rows = adapters.qkv if adapters is not None else None
    qkv_TO = linear(x_TD, layer.qkv_OD, layer.qkv_bias_O, rows, batch.lora, sizes)
    qk_TO, v_TO = qkv_TO.split((config.q_size + config.kv_size, config.kv_size), dim=-1)
    q_TNH, k_TKH = apply_rope(qk_TO.unflatten(-1, (N + K, H)), cos_TH, sin_TH).split((N, K), dim=1)
    kv_write_(kv, k_TKH, v_TO.unflatten(-1, (K, H)), batch.kv_index_T)
    o_TNH = paged_attention(
        q_TNH, kv, batch.query_start_R1, batch.context_len_R, batch.block_table_RM, H**-0.5
    )
    rows = adapters.out if adapters is not None else None
    hidden = (config.hidden_size,)
    return linear(o_TNH.flatten(1), layer.out_DO, layer.out_bias_D, rows, batch.lora, hidden)


def mlp(
    layer: Layer,
    adapters: LayerAdapters | None,
    x_TD: Tensor,
    lora: LoraBatch | None,
    config: ModelConfig,
) -> Tensor:
    rows = adapters.gate_up if adapters is not None else None
    sizes = (config.intermediate_size, config.intermediate_size)
    gate_up_TO = linear(x_TD, layer.gate_up_OD, layer.gate_up_bias_O, rows, lora, sizes)
    gate_TF, up_TF = gate_up_TO.chunk(2, dim=-1)
    rows = adapters.down if adapters is not None else None
    hidden = (config.hidden_size,)
    return linear(F.silu(gate_TF) * up_TF, layer.down_DF, layer.down_bias_D, rows, lora, hidden)


def linear(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    rows: AdapterRows | None,
    lora: LoraBatch | None,
    out_sizes: tuple[int, ...],
) -> Tensor:
    """x W^T + bias, and each token's adapter delta."""
    y_TO = product(x_TD, w_OD, bias_O)
    if rows is not None and lora is not None:
        add_deltas_(y_TO, x_TD, rows, lora, out_sizes)
    return y_TO


def add_deltas_(
    y_TO: Tensor, x_TD: Tensor, rows: AdapterRows, lora: LoraBatch, out_sizes: tuple[int, ...]
) -> None:
    """Add to each row of `y_TO` the delta of the adapter that `lora` gives it."""
    lora_add_(
        y_TO,
        x_TD,
        rows.a_SPD,
        rows.b_PO,
        lora.row_R,
        lora.foreign_TR,
        lora.span_C2,
        lora.bare_B,
        out_sizes,
    )


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normed in fp32, cast back, then scaled: the order of transformers, which shows in bf16."""
    x32_TD = x_TD.float()
    normed_TD = x32_TD * torch.rsqrt(x32_TD.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(x_TD.dtype)


def compile_layer() -> LayerFn:
    """`decoder_layer`, compiled: one graph with adapters and one without, whatever the batch.

    All layers, token counts, row counts, block table widths and pool sizes share them, 1 included,
    so nothing needs padding. Weights and P are part of the graph: another model, or another pool of
    adapter rows, compiles again. Adapters that are passed without `batch.lora` (or the other way
    round) make no third graph. Every call of this function has graphs of its own.
    """
    # Graphs hang on the code object and their number is limited to 8, for all models together.
    own = FunctionType(decoder_layer.__code__.replace(), decoder_layer.__globals__)
    compiled = torch.compile(own, fullgraph=True, dynamic=False)

    def layer_fn(
        layer: Layer,
        adapters: LayerAdapters | None,
        kv: Tensor,
        h_TD: Tensor,
        cos_TH: Tensor,
        sin_TH: Tensor,
        batch: Batch,
        config: ModelConfig,
    ) -> Tensor:
        if batch.lora is None:
            adapters = None
        if not hasattr(batch.kv_index_T, "_dynamo_unbacked_indices"):
            _mark_sizes(kv, h_TD, cos_TH, sin_TH, batch)
        return compiled(layer, adapters, kv, h_TD, cos_TH, sin_TH, batch, config)

    return layer_fn


def _mark_sizes(kv: Tensor, h_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor, batch: Batch) -> None:
    """Tell the compiler which sizes vary. It matters when a graph is made, which is always in the
    first layer that sees a batch; there it takes 60 us, in every layer it would take 2 ms a step.

    Unbacked, since `dynamic=True` makes graphs of its own for size 1 and for a size that happens
    to equal another one (T = 2 and the two halves of kv): 8 graphs in a walk over T = 1..64."""
    from torch._dynamo.decorators import mark_unbacked  # here: it doubles the import time of torch

    for tensor in (h_TD, cos_TH, sin_TH, batch.kv_index_T, batch.query_start_R1):
        mark_unbacked(tensor, 0)
    mark_unbacked(batch.context_len_R, 0)
    mark_unbacked(batch.block_table_RM, (0, 1))
    if batch.lora is not None:
        mark_unbacked(batch.lora.row_R, 0)
        mark_unbacked(batch.lora.foreign_TR, (0, 1))
        mark_unbacked(batch.lora.span_C2, 0)
        mark_unbacked(batch.lora.bare_B, 0)
    mark_unbacked(kv, 1)
