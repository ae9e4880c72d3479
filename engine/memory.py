"""How large the KV pool is."""

from dataclasses import replace

import torch

from purestep.engine.config import Config
from purestep.engine.platform import available_bytes
from purestep.engine.pool import kv_block_bytes, pool_bytes, vocab_rows_bytes
from purestep.state.errors import ConfigError


def choose_num_blocks(config: Config, num_blocks: int | None, kv_bytes: int | None) -> Config:
    """The config with its number of KV blocks: given, or as many as `kv_bytes` hold, or automatic.

    Automatic on a CPU: `max_rows` requests of full context, at most a quarter of the available
    memory. On a GPU: nine tenths of the free memory, less the adapter rows and a reserve for
    activations. Raises ConfigError where not even one block fits.
    """
    block = kv_block_bytes(config)
    if num_blocks is not None and kv_bytes is not None:
        raise ConfigError(f"num_blocks={num_blocks} and kv_bytes={kv_bytes}: give at most one")
    if num_blocks is None:
        limit = _automatic_bytes(config) if kv_bytes is None else kv_bytes
        wanted = config.max_rows * -(-config.max_context // config.block_size)
        num_blocks = min(limit // block, wanted) if kv_bytes is None else limit // block
        if num_blocks < 1:
            raise ConfigError(f"kv_bytes={limit} hold no KV block of {block} bytes")
    return replace(config, num_blocks=num_blocks)


def _automatic_bytes(config: Config) -> int:
    if torch.device(config.device).type == "cpu":
        return available_bytes() // 4
    free, _ = torch.cuda.mem_get_info(config.device)
    return int(free * 0.9) - pool_bytes(config, 0) - _activation_bytes(config)


def _activation_bytes(config: Config) -> int:
    """An upper estimate for a step: the widest intermediates of all tokens, all rows' logits."""
    model = config.model
    widths = 4 * model.hidden_size + 4 * model.intermediate_size + 2 * model.q_size
    logits = 5 if config.lora_vocab else 3  # two more for what a head's adapters add
    return 4 * (config.max_batched_tokens * widths + logits * config.max_rows * model.vocab_size)


def memory_summary(config: Config) -> str:
    """One line for people: what the pool holds and what it takes."""
    kv = config.num_blocks * kv_block_bytes(config)
    rows = pool_bytes(config, 0)
    vocab = vocab_rows_bytes(config) if config.lora_vocab else 0
    shared = f" ({vocab / 2**20:.0f} of it for embed_tokens and lm_head)" if vocab else ""
    return (
        f"KV pool: {config.num_blocks} blocks of {config.block_size} tokens, {kv / 2**20:.0f} MiB; "
        f"adapters: {config.lora_rows} rows for {config.max_active_adapters}, "
        f"{rows / 2**20:.0f} MiB{shared}; {config.dtype} on {config.device}"
    )
