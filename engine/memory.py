"""Where memory goes: weights, KV, adapter rows, encoder outputs, a step's intermediates, graphs.

All formulas of the project stand here; the engine sizes its pool by them and `purestep plan` prints
them. Those with `tp` are of one of `tp` cards that share a model as tensor parallelism does:
q, k, v, gate and up are split along their output, o and down along their input, the vocabulary in
even parts, and where there are fewer key/value heads than cards each card holds one. The engine
itself runs on one card.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from purestep.engine.config import Config, largest_graph
from purestep.engine.platform import available_bytes
from purestep.engine.sampling import SCORE_CHUNK
from purestep.models.config import (
    TOWER,
    FusedLinear,
    ModelConfig,
    fused_linears,
    vocab_linears,
)
from purestep.state.adapters import ROW_BLOCK
from purestep.state.errors import ConfigError

ROW_PARALLEL = ("out", "down")  # split along their input


def itemsize_of(dtype: str) -> int:
    """Bytes of one number."""
    return getattr(torch, dtype).itemsize


def check_tp(model: ModelConfig, tp: int) -> None:
    """Raises ConfigError where `tp` cards cannot share the model evenly."""
    sizes = {"query heads": model.num_heads, "MLP channels": model.intermediate_size}
    if model.num_kv_heads >= tp:
        sizes["key/value heads"] = model.num_kv_heads
    for what, count in sizes.items():
        if tp < 1 or count % tp:
            raise ConfigError(f"tp={tp} must divide {count} {what}")


def local_sizes(linear: FusedLinear, model: ModelConfig, tp: int) -> tuple[int, tuple[int, ...]]:
    """(input width, output width of each child) of a linear on one card."""
    if linear.name in ROW_PARALLEL:
        return linear.in_features // tp, linear.out_sizes
    if linear.name == "qkv":
        kv = max(model.num_kv_heads // tp, 1) * model.head_dim
        return linear.in_features, (model.q_size // tp, kv, kv)
    return linear.in_features, tuple(-(-size // tp) for size in linear.out_sizes)


def weight_bytes(model: ModelConfig, itemsize: int, tp: int = 1) -> int:
    """Of the checkpoint's tensors, on one card."""
    biased = {"qkv": model.qkv_bias, "out": model.out_bias}
    layer = 2 * model.hidden_size + 2 * model.head_dim * model.qk_norm  # norms
    for linear in fused_linears(model):
        width, outs = local_sizes(linear, model, tp)
        layer += sum(outs) * (width + biased.get(linear.name, model.mlp_bias))
    table = -(-model.vocab_size // tp) * model.hidden_size
    tables = table if model.tie_embeddings else 2 * table
    return itemsize * (model.num_layers * layer + tables + model.hidden_size)


def kv_token_bytes(model: ModelConfig, itemsize: int, tp: int = 1) -> int:
    """Keys and values of one token over all layers, on one card."""
    heads = max(model.num_kv_heads // tp, 1)
    return 2 * model.num_layers * heads * model.head_dim * itemsize


def kv_block_bytes(config: Config) -> int:
    """Bytes of one KV block over all layers."""
    return config.block_size * kv_token_bytes(config.model, itemsize_of(config.dtype))


def slot_table(
    model: ModelConfig, rank: int, tp: int = 1, fully_sharded: bool = False
) -> dict[str, tuple[int, int]]:
    """Numbers in A and in B of one layer's adapters of this rank, by projection, on one card.

    By default A of what is split along the output, and B of what is split along the input, lie
    whole on every card; `fully_sharded` splits them, too. Raises ConfigError where it cannot.
    """
    if fully_sharded and (rank % tp or model.hidden_size % tp):
        raise ConfigError(
            f"fully sharded: tp={tp} must divide the rank, {rank}, and {model.hidden_size} channels"
        )
    parts, table = (tp if fully_sharded else 1), {}
    for linear in fused_linears(model):
        width, outs = local_sizes(linear, model, tp)
        whole_a = linear.name in ROW_PARALLEL
        for child, out in zip(linear.children, outs, strict=True):
            a = rank * width if whole_a else rank // parts * width
            b = out // parts * rank if whole_a else out * rank
            table[child] = (a, b)
    return table


def slot_bytes(
    model: ModelConfig, rank: int, itemsize: int, tp: int = 1, fully_sharded: bool = False
) -> int:
    """Bytes of one adapter of this rank on all linears of all layers, on one card."""
    table = slot_table(model, rank, tp, fully_sharded)
    return itemsize * model.num_layers * sum(a + b for a, b in table.values())


def vocab_slot_bytes(model: ModelConfig, rank: int, itemsize: int) -> int:
    """Bytes of one adapter of this rank on embed_tokens and lm_head; every card holds all."""
    return rank * itemsize * sum(x.in_features + x.out_features for x in vocab_linears(model))


def vocab_rows_bytes(config: Config) -> int:
    """Bytes of the adapter rows of the embedding and of the head, which `lora_vocab` asks for."""
    return vocab_slot_bytes(config.model, config.lora_rows, itemsize_of(config.dtype))


def tower_slot_bytes(tower: Sequence[FusedLinear], rank: int, itemsize: int) -> int:
    """Bytes of one adapter of this rank on all linears of a tower; every card holds all."""
    run = [linear for linear in tower if linear.parent == TOWER]
    widths = (len(x.out_sizes) * x.in_features + x.out_features for x in run)
    return rank * itemsize * sum(widths)


def tower_rows_bytes(config: Config) -> int:
    """Bytes of the adapter rows of the tower, which `lora_tower` asks for."""
    return tower_slot_bytes(config.tower, config.lora_rows, itemsize_of(config.dtype))


def rows_bytes(config: Config) -> int:
    """Bytes of all adapter rows."""
    itemsize = itemsize_of(config.dtype)
    vocab = vocab_rows_bytes(config) if config.lora_vocab else 0
    tower = tower_rows_bytes(config) if config.lora_tower else 0
    return slot_bytes(config.model, config.lora_rows, itemsize) + vocab + tower


def pool_bytes(config: Config, num_blocks: int) -> int:
    """Bytes of a pool with this many blocks; on a CPU they are taken once they are written."""
    return num_blocks * kv_block_bytes(config) + rows_bytes(config)


def rows_that_fit(
    model: ModelConfig, nbytes: int, itemsize: int, vocab: bool, tower: Sequence[FusedLinear] = ()
) -> int:
    """How many adapter rows, in whole blocks, `nbytes` hold; `tower` are the linears of a tower
    that have rows, too. Raises ConfigError for none."""
    block = slot_bytes(model, ROW_BLOCK, itemsize) + tower_slot_bytes(tower, ROW_BLOCK, itemsize)
    block += vocab_slot_bytes(model, ROW_BLOCK, itemsize) if vocab else 0
    if nbytes < block:
        raise ConfigError(
            f"adapter_bytes={nbytes} hold no {ROW_BLOCK} adapter rows, which take {block} bytes"
        )
    return nbytes // block * ROW_BLOCK


def encoder_output_bytes(
    model: ModelConfig, num_embeds: int, itemsize: int, deepstack: int = 0
) -> int:
    """Bytes of one media item's encoder output, whose rows are for `deepstack` layers, too."""
    return num_embeds * (1 + deepstack) * model.hidden_size * itemsize


def encoder_cache_bytes(config: Config) -> int:
    """Bytes of the outputs that a tower's steps keep; they are taken as they are made."""
    return config.encoder_cache_tokens * config.encoder_row_bytes if config.vision else 0


def activation_bytes(
    model: ModelConfig, num_tokens: int, num_rows: int, vocab: bool, tp: int = 1
) -> int:
    """An upper estimate for a step: the widest intermediates of all tokens, all rows' logits."""
    widths = 4 * model.hidden_size + (4 * model.intermediate_size + 2 * model.q_size) // tp
    logits = 5 if vocab else 3  # two more for what a head's adapters add
    return 4 * (num_tokens * widths + logits * num_rows * model.vocab_size)


def step_bytes(model: ModelConfig, num_tokens: int, num_rows: int, vocab: bool, tp: int = 1) -> int:
    """Of the largest step, whose rows are sampled while prompt tokens of others are scored, a chunk
    of them at a time."""
    return activation_bytes(model, num_tokens, num_rows + SCORE_CHUNK, vocab, tp)


def graph_bytes(
    model: ModelConfig, num_tokens: int, num_rows: int, vocab: bool, tp: int = 1
) -> int:
    """What the captured graphs of steps of up to so many tokens and rows share: the logits and the
    intermediates of the largest."""
    return activation_bytes(model, max(num_tokens, num_rows), num_rows, vocab, tp)


def choose_num_blocks(
    config: Config,
    num_blocks: int | None,
    kv_bytes: int | None,
    encoder_bytes: int = 0,
    held_bytes: int = 0,
) -> Config:
    """The config with its number of KV blocks: given, or as many as `kv_bytes` hold, or automatic.

    Automatic on a CPU: `max_rows` requests of full context, at most a quarter of the available
    memory. On a GPU: nine tenths of the free memory, less the adapter rows and a reserve for
    activations and graphs. On both the outputs that encoders keep are taken off before, and
    `encoder_bytes`, the peak of encoding. `held_bytes` of the adapter rows are allocated by now.
    Raises ConfigError where not even one block fits.
    """
    block = kv_block_bytes(config)
    if num_blocks is not None and kv_bytes is not None:
        raise ConfigError(f"num_blocks={num_blocks} and kv_bytes={kv_bytes}: give at most one")
    if num_blocks is None:
        automatic = kv_bytes is None
        limit = _automatic_bytes(config, encoder_bytes - held_bytes) if automatic else kv_bytes
        wanted = config.max_rows * -(-config.max_context // config.block_size)
        num_blocks = min(limit // block, wanted) if kv_bytes is None else limit // block
        if num_blocks < 1:
            kept, why = encoder_cache_bytes(config), ""
            if kv_bytes is None and (kept or encoder_bytes):
                why = (
                    f": encoding as many of the largest images as max_encoder_tokens="
                    f"{config.max_encoder_tokens} admits takes {encoder_bytes} bytes, and what is "
                    f"kept of it (encoder_cache_tokens={config.encoder_cache_tokens}) {kept}. "
                    "Lower these or the image processor's largest size, give num_blocks, or leave "
                    "the former out with skip_encoder_profile=True"
                )
            raise ConfigError(f"kv_bytes={limit} hold no KV block of {block} bytes{why}")
    return replace(config, num_blocks=num_blocks)


def _automatic_bytes(config: Config, encoder_bytes: int) -> int:
    encoder_bytes += encoder_cache_bytes(config)
    if torch.device(config.device).type == "cpu":
        return (available_bytes() - encoder_bytes) // 4
    free, _ = torch.cuda.mem_get_info(config.device)
    return int(free * 0.9) - rows_bytes(config) - reserve_bytes(config) - encoder_bytes


def reserve_bytes(config: Config) -> int:
    """What a step and the graphs may take beside weights and pool."""
    model, vocab = config.model, config.lora_vocab
    step = step_bytes(model, config.max_batched_tokens, config.max_rows, vocab)
    return step + graph_bytes(model, *largest_graph(config), vocab)


def memory_summary(config: Config) -> str:
    """One line for people: what the pool holds and what it takes."""
    kv = config.num_blocks * kv_block_bytes(config)
    vocab = vocab_rows_bytes(config) if config.lora_vocab else 0
    media = encoder_cache_bytes(config)
    images = f"; encoder outputs: {media / 2**20:.0f} MiB" if media else ""
    tower = tower_rows_bytes(config) if config.lora_tower else 0
    parts = [(vocab, "embed_tokens and lm_head"), (tower, "the tower")]
    named = [f"{size / 2**20:.0f} of it for {what}" for size, what in parts if size]
    shared = f" ({', '.join(named)})" if named else ""
    return (
        f"KV pool: {config.num_blocks} blocks of {config.block_size} tokens, {kv / 2**20:.0f} MiB; "
        f"adapters: {config.lora_rows} rows for {config.max_active_adapters}, "
        f"{rows_bytes(config) / 2**20:.0f} MiB{shared}{images}; "
        f"{config.dtype} on {config.device}"
    )
