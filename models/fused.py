"""The dense decoder in our own kernels: `decoder.forward` in as few as there are dependencies.

Between two products lies one kernel, which joins the addends of the first one (`lora_linear`), adds
what adapters have left to add (`shrunk_linear`) and does all the elementwise work; of many tokens
`gated_linear` does it within the product. On a GPU they are Triton's, on a CPU C's (float32 alone).
There is nothing left for a compiler to fuse, so none
has to be waited for; each is an op that one can trace (models/compiled.py). T token rows, D hidden,
V vocabulary, S sampled rows.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from purestep.models.config import ModelConfig
from purestep.models.decoder import (
    AdapterRows,
    EmbedFn,
    EmbedRows,
    Layer,
    LayerAdapters,
    Params,
    add_deeper_,
    embed,
    merge_embeds_,
    rope_tables,
)
from purestep.models.ends import EAGER, Ends
from purestep.ops.add_rms_norm import add_rms_norm
from purestep.ops.gated_linear import gated_linear
from purestep.ops.lora_linear import Deltas, lora_linear, shrunk_linear
from purestep.ops.paged_attention import decode_attention, paged_attention
from purestep.ops.rope_write import rope_write_
from purestep.state.batch import Batch, LoraTiles

FusedLayerFn = Callable[
    [
        Layer,
        Tensor,
        LayerAdapters | None,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Batch,
        ModelConfig,
        int,
        bool,
    ],
    tuple[Tensor, Tensor],
]


def fused_forward(
    params: Params,
    adapters: Sequence[LayerAdapters],
    kv: Sequence[Tensor],
    batch: Batch,
    config: ModelConfig,
    layer_fn: FusedLayerFn | None = None,
    embed_rows: EmbedRows | None = None,
    *,
    uniform: bool = False,
    embed_fn: EmbedFn | None = None,
    embeds: tuple[Tensor, Tensor] | None = None,
    observe: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """As `decoder.forward`, for a batch whose `lora` is `LoraTiles`. `uniform` promises that token
    t is the one query of row t, and that a row without context is padding. `layer_fn` is
    `fused_layer` or its compiled form, `embed_fn` likewise `embed`."""
    layer_fn = layer_fn or fused_layer
    h_TD = (embed_fn or embed)(params, embed_rows, batch, config.embed_scale)
    index_E, deeper = merge_embeds_(h_TD, embeds)
    table, local = rope_tables(config, batch, h_TD.dtype)
    norms = [*(layer.attn_norm_D for layer in params.layers), params.norm_D]
    x_TD = add_rms_norm(h_TD, None, norms[0], config.norm_eps)[1]
    for i, (layer, window) in enumerate(zip(params.layers, config.windows, strict=True)):
        if observe is not None:
            observe(i, h_TD)
        if 0 < i <= len(deeper):
            add_deeper_(h_TD, index_E, deeper[i - 1])
            x_TD = add_rms_norm(h_TD, None, norms[i], config.norm_eps)[1]
        rows = adapters[i] if batch.lora is not None else None
        turn = local if window else table
        h_TD, x_TD = layer_fn(
            layer, norms[i + 1], rows, kv[i], h_TD, x_TD, *turn, batch, config, window, uniform
        )
    if observe is not None:
        observe(len(params.layers), x_TD)
    return x_TD


def fused_layer(
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
    """One layer: hidden states and their norm by this layer's weights in, hidden states and their
    norm by the next layer's out. Keys and values are written to `kv`."""
    tiles = batch.lora if isinstance(batch.lora, LoraTiles) else None
    y = attention(layer, adapters, kv, x_TD, cos_TC, sin_TC, batch, tiles, config, window, uniform)
    h_TD, x_TD = add_rms_norm(h_TD, y, layer.mlp_norm_D, config.norm_eps, layer.attn_out_norm_D)
    y = mlp(layer, adapters, x_TD, tiles, config)
    return add_rms_norm(h_TD, y, next_norm_D, config.norm_eps, layer.mlp_out_norm_D)


def attention(
    layer: Layer,
    adapters: LayerAdapters | None,
    kv: Tensor,
    x_TD: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    batch: Batch,
    tiles: LoraTiles | None,
    config: ModelConfig,
    window: int,
    uniform: bool,
) -> Tensor:
    sizes = (config.q_size, config.kv_size, config.kv_size)
    rows, wide_WD = adapted(adapters.qkv if adapters is not None else None, tiles)
    y, shrunk = shrunk_linear(x_TD, layer.qkv_OD, layer.qkv_bias_O, rows, sizes, wide_WD)
    q_TNH = rope_write_(
        kv, y, cos_TC, sin_TC, layer.qk_norm_NH, batch.kv_index_T, config.norm_eps, shrunk
    )
    tables = batch.query_start_R1, batch.context_len_R, batch.block_table_RM
    if uniform:
        o_TNH = decode_attention(q_TNH, kv, *tables, config.attention_scale, window)
    else:
        o_TNH = paged_attention(q_TNH, kv, *tables, config.attention_scale, window, batch.end_T)
    rows, wide_WD = adapted(adapters.out if adapters is not None else None, tiles)
    return lora_linear(o_TNH.flatten(1), layer.out_DO, layer.out_bias_D, rows, wide_WD)


def mlp(
    layer: Layer,
    adapters: LayerAdapters | None,
    x_TD: Tensor,
    tiles: LoraTiles | None,
    config: ModelConfig,
) -> Tensor:
    rows, wide_WD = adapted(adapters.gate_up if adapters is not None else None, tiles)
    bias_O, activation = layer.gate_up_bias_O, config.activation
    x_TF = gated_linear(x_TD, layer.gate_up_OD, bias_O, rows, activation, wide_WD)
    rows, wide_WD = adapted(adapters.down if adapters is not None else None, tiles)
    return lora_linear(x_TF, layer.down_DF, layer.down_bias_D, rows, wide_WD)


def adapted(
    rows: AdapterRows | None, tiles: LoraTiles | None
) -> tuple[Deltas | None, Tensor | None]:
    """What the ops take of a linear's adapters, and the weights that lie above their rows."""
    if rows is None or tiles is None:
        return None, None
    found = Deltas(rows.a_SPD, rows.b_PO, tiles.row_E, tiles.span_X2, tiles.token_XI)
    return found, rows.wide_WD


def step_logits(
    params: Params,
    adapters: Sequence[LayerAdapters],
    kv: Sequence[Tensor],
    batch: Batch,
    config: ModelConfig,
    out_SV: Tensor | None = None,
    layer_fn: FusedLayerFn | None = None,
    ends: Ends = EAGER,
    *,
    uniform: bool,
) -> Tensor:
    """fp32 logits [S, V] of the rows in `logits_index_S`, or, of a uniform batch, of all its token
    rows: what a graph holds."""
    args = params, adapters, kv, batch, config, layer_fn
    x_TD = fused_forward(*args, uniform=uniform, embed_fn=ends.embed)
    return padded_logits(params, x_TD, None if uniform else batch.logits_index_S, out_SV, ends)


def padded_logits(
    params: Params, x_TD: Tensor, index_R: Tensor | None, out_RV: Tensor | None, ends: Ends
) -> Tensor:
    """fp32 logits [R, V] of the token rows `index_R`, or of all, not rounded to the model's format:
    as a graph has them, whose number of rows hangs on its shape alone."""
    x_RD = x_TD if index_R is None else x_TD.index_select(0, index_R)
    return ends.head_linear(x_RD, params.head_VD, out_RV)
