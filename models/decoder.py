"""The dense decoder: one forward pass over a mixed batch of rows and adapters.

T token rows, D hidden, F MLP width, N query heads, K key/value heads, H head size, C rotary
channels of a head, V vocabulary, O output width of a fused linear, S slices of it (or sampled
rows), P paged adapter rows in blocks of R = 8.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.models.config import ModelConfig
from purestep.models.rope import apply_rope, rope_table
from purestep.ops.gated_linear import ACTIVATIONS
from purestep.ops.kv_write import kv_write_
from purestep.ops.linear import linear as product
from purestep.ops.lora_add import lora_add_
from purestep.ops.merge_rows import merge_rows_
from purestep.ops.paged_attention import paged_attention
from purestep.state.batch import Batch, EmbedLora, LoraBatch
from purestep.state.pytree import tree


@tree
class Layer:
    """Weights of one layer, projections that share an input stacked along the output."""

    attn_norm_D: Tensor
    qkv_OD: Tensor  # q, k, v
    qkv_bias_O: Tensor | None
    qk_norm_NH: Tensor | None  # Qwen3: q's norm for each query head, then k's for each key head
    out_DO: Tensor
    out_bias_D: Tensor | None
    attn_out_norm_D: Tensor | None = None  # Gemma: of what attention gives, and below, the MLP
    mlp_norm_D: Tensor
    gate_up_OD: Tensor  # gate, up
    gate_up_bias_O: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None
    mlp_out_norm_D: Tensor | None = None


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
    # The weights with the rows of A beneath, where they lie so (models/room.py).
    wide_WD: Tensor | None = None


@tree
class LayerAdapters:
    """Adapter rows of one layer, named like the layer's linears."""

    qkv: AdapterRows
    out: AdapterRows
    gate_up: AdapterRows
    down: AdapterRows


@tree
class EmbedRows:
    """Device rows of the resident adapters of the embedding, laid out for looking tokens up."""

    a_CVR: Tensor  # each row block of A, transposed: R values of a token lie side by side
    b_PD: Tensor


EmbedFn = Callable[[Params, EmbedRows | None, Batch, float], Tensor]
LayerFn = Callable[
    [Layer, LayerAdapters | None, Tensor, Tensor, Tensor, Tensor, Batch, ModelConfig, int], Tensor
]


def forward(
    params: Params,
    adapters: tuple[LayerAdapters, ...] | None,
    kv: Sequence[Tensor],
    batch: Batch,
    config: ModelConfig,
    layer_fn: LayerFn | None = None,
    embed_rows: EmbedRows | None = None,
    *,
    embed_fn: EmbedFn | None = None,
    embeds: tuple[Tensor, Tensor] | None = None,
    observe: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Final hidden states of every token row, normed: [T, D]. Writes the new keys and values.

    `kv` holds one [2, num_blocks, block_size, K, H] tensor a layer. `adapters` (one a layer) is
    read only if `batch.lora` is there, `embed_rows` if `batch.embed_lora` is. `layer_fn` is
    `decoder_layer` or its compiled form, `embed_fn` likewise `embed`. `embeds` (index_E int64,
    rows_EW) replaces the embeddings of some token rows, deltas included; where rows are (1 + k) D
    wide, what follows the first D numbers is added behind each of the first k layers, of which
    there are more (deepstack).
    `observe(i, h_TD)` sees the hidden states, numbered as transformers numbers them: 0 the
    embeddings, i what layer i - 1 returns, nothing added yet, but for the last one, which is
    normed. It may not change them.
    """
    layer_fn = layer_fn or decoder_layer
    h_TD = (embed_fn or embed)(params, embed_rows, batch, config.embed_scale)
    index_E, deeper = merge_embeds_(h_TD, embeds)
    table, local = rope_tables(config, batch, h_TD.dtype)
    rows = adapters if adapters is not None else (None,) * len(params.layers)
    layers = zip(params.layers, rows, kv, config.windows, strict=True)
    for i, (layer, layer_rows, pages, window) in enumerate(layers):
        if observe is not None:
            observe(i, h_TD)
        if 0 < i <= len(deeper):
            add_deeper_(h_TD, index_E, deeper[i - 1])
        turn = local if window else table
        h_TD = layer_fn(layer, layer_rows, pages, h_TD, *turn, batch, config, window)
    h_TD = rms_norm(h_TD, params.norm_D, config.norm_eps)
    if observe is not None:
        observe(len(params.layers), h_TD)
    return h_TD


def rope_tables(
    config: ModelConfig, batch: Batch, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """cos_TC and sin_TC of layers that see everything, and of those with a window."""
    place = batch.position_T, dtype, batch.position_3T
    table = rope_table(config.rope, config.head_dim, *place)
    if config.local_rope is None:
        return table, table
    return table, rope_table(config.local_rope, config.head_dim, *place)


def embed(params: Params, rows: EmbedRows | None, batch: Batch, scale: float = 1.0) -> Tensor:
    """Rows of the embedding table [T, D], each with the delta of its own adapter, if that has one,
    times a scale in the model's format.

    Padding tokens need a valid id, any will do.
    """
    h_TD = F.embedding(batch.token_T, params.embed_VD)
    if rows is not None and batch.embed_lora is not None:
        x_TD, unit_rows = _lookup(rows, batch.embed_lora, batch.token_T)
        add_deltas_(h_TD, x_TD, unit_rows, batch.embed_lora.lora, h_TD.shape[1:])
    return h_TD if scale == 1.0 else h_TD * torch.tensor(scale, dtype=h_TD.dtype)


def merge_embeds_(
    h_TD: Tensor, embeds: tuple[Tensor, Tensor] | None
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Put rows over the embeddings of their tokens; (whose they are, what is for later layers)."""
    if embeds is None:
        return None, ()
    index_E, rows_EW = embeds
    rows_ED, *deeper = rows_EW.split(h_TD.shape[1], dim=1)
    merge_rows_(h_TD, index_E, rows_ED)
    return index_E, deeper


def add_deeper_(h_TD: Tensor, index_E: Tensor, rows_ED: Tensor) -> None:
    """Add rows to the hidden states of tokens that are all different."""
    h_TD.index_add_(0, index_E, rows_ED.to(h_TD.dtype))


def _lookup(rows: EmbedRows, lora: EmbedLora, token_T: Tensor) -> tuple[Tensor, AdapterRows]:
    """A x for one-hot x is a column of A. What is left is the usual product, with rows of the
    identity for A: exact, whatever the dtype."""
    found_TCR = rows.a_CVR[lora.block_TC.clamp(min=0), token_T[:, None]]
    own_TCR = torch.where(lora.block_TC[..., None] >= 0, found_TCR, 0)
    x_TD = own_TCR.flatten(1)
    place_D = torch.arange(x_TD.shape[1], device=x_TD.device)
    unit_PD = (lora.column_P[:, None] == place_D).to(x_TD.dtype)
    return x_TD, AdapterRows(a_SPD=unit_PD[None], b_PO=rows.b_PD)


def logits(
    params: Params,
    hidden_TD: Tensor,
    index_S: Tensor,
    head_rows: AdapterRows | None = None,
    head_lora: LoraBatch | None = None,
) -> Tensor:
    """fp32 logits [S, V] of the token rows `index_S`, each with its own adapter's delta.

    `head_lora` is packed for these S rows, not for the token rows. Deltas are added in fp32 after
    the base product, which alone is rounded to the model's dtype: a row without an adapter on the
    head keeps its bits, and one with is not rounded twice (PEFT does, in 16 bits).
    """
    x_SD = hidden_TD.index_select(0, index_S)
    y_SV = product(x_SD, params.head_VD).float()
    if head_rows is not None and head_lora is not None:
        add_deltas_(y_SV, x_SD, head_rows, head_lora, y_SV.shape[1:])
    return y_SV


def decoder_layer(
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
    """One layer: hidden states in, hidden states out, keys and values written to `kv`. A token
    sees the last `window` positions, itself included, or all (0)."""
    x_TD = rms_norm(h_TD, layer.attn_norm_D, config.norm_eps)
    y_TD = attention(layer, adapters, kv, x_TD, cos_TC, sin_TC, batch, config, window)
    if layer.attn_out_norm_D is not None:
        y_TD = rms_norm(y_TD, layer.attn_out_norm_D, config.norm_eps)
    h_TD = h_TD + y_TD
    x_TD = rms_norm(h_TD, layer.mlp_norm_D, config.norm_eps)
    y_TD = mlp(layer, adapters, x_TD, batch.lora, config)
    if layer.mlp_out_norm_D is not None:
        y_TD = rms_norm(y_TD, layer.mlp_out_norm_D, config.norm_eps)
    return h_TD + y_TD


def attention(
    layer: Layer,
    adapters: LayerAdapters | None,
    kv: Tensor,
    x_TD: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    batch: Batch,
    config: ModelConfig,
    window: int,
) -> Tensor:
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    sizes = (config.q_size, config.kv_size, config.kv_size)
    rows = adapters.qkv if adapters is not None else None
    qkv_TO = linear(x_TD, layer.qkv_OD, layer.qkv_bias_O, rows, batch.lora, sizes)
    qk_TO, v_TO = qkv_TO.split((config.q_size + config.kv_size, config.kv_size), dim=-1)
    qk_TNH = qk_TO.unflatten(-1, (N + K, H))
    if layer.qk_norm_NH is not None:
        qk_TNH = rms_norm(qk_TNH, layer.qk_norm_NH, config.norm_eps)
    q_TNH, k_TKH = apply_rope(qk_TNH, cos_TC, sin_TC).split((N, K), dim=1)
    kv_write_(kv, k_TKH, v_TO.unflatten(-1, (K, H)), batch.kv_index_T)
    o_TNH = paged_attention(
        q_TNH,
        kv,
        batch.query_start_R1,
        batch.context_len_R,
        batch.block_table_RM,
        config.attention_scale,
        window,
        batch.end_T,
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
    x_TF = ACTIVATIONS[config.activation](gate_TF) * up_TF
    return linear(x_TF, layer.down_DF, layer.down_bias_D, rows, lora, hidden)


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
        out_sizes,
    )


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normed in fp32, cast back, then scaled: the order of transformers, which shows in bf16."""
    x32_TD = x_TD.float()
    normed_TD = x32_TD * torch.rsqrt(x32_TD.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(x_TD.dtype)
