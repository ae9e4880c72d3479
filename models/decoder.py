"""The dense decoder: one forward pass over a mixed batch of rows and adapters.

T token rows, D hidden, F MLP width, N query heads, K key/value heads, H head size, V vocabulary,
O output width of a fused linear, S slices of it (or sampled rows), P paged adapter rows.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.models.config import ModelConfig
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
    return F.linear(hidden_TD.index_select(0, index_S), params.head_VD).float()


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
    y_TO = F.linear(x_TD, w_OD, bias_O)
    if rows is not None and lora is not None:
        lora_add_(
            y_TO,
            x_TD,
            rows.a_SPD,
            rows.b_PO,
            lora.token_T,
            lora.group_start_G1,
            lora.row_P,
            lora.rank_start_G1,
            out_sizes,
        )
    return y_TO


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normed in fp32, cast back, then scaled: the order of transformers, which shows in bf16."""
    x32_TD = x_TD.float()
    normed_TD = x32_TD * torch.rsqrt(x32_TD.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(x_TD.dtype)


def compile_layer() -> LayerFn:
    """decoder_layer compiled once for all layers and token counts."""
    return torch.compile(decoder_layer, fullgraph=True, dynamic=True)
