"""Tiny random checkpoints, made by transformers' own classes (fixtures of ../shared/cases.md).

Deterministic, and the caller's random state is left as it was.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-rope3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-head12": (LlamaForCausalLM, LlamaConfig, {"head_dim": 12}),
    "llama-bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
}


def make_model(family: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode; biases and norms are random too, and not near zero."""
    model_class, config_class, extra = FAMILIES[family]
    config = config_class(**{**SIZES, **extra, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("bias"):
                    weight.normal_(0.0, 0.5)
                elif "norm" in name:
                    weight.uniform_(0.5, 1.5)
                else:  # gain 1: at gain 2 chunking moved logprobs by 1.7e-5, now by 3e-6
                    weight.normal_(0.0, weight.shape[-1] ** -0.5)
    return model.float().eval()


def save_checkpoint(
    path: Path, family: str = "llama", seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> PreTrainedModel:
    """Write the folder `path` with save_pretrained; returns the model as the oracle."""
    model = make_model(family, seed, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model
