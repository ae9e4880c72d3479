"""Tiny random checkpoints, made by transformers' own classes (fixtures of ../shared/cases.md).

Deterministic, and the caller's random state is left as it was.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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

# Prompts of tests are longer than these 16 tokens, and than the windows.
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 3.0, 9.0, 20.0],
}

LLAMA = (LlamaForCausalLM, LlamaConfig)
MISTRAL = (MistralForCausalLM, MistralConfig)
PHI3 = (Phi3ForCausalLM, Phi3Config)
QWEN2 = (Qwen2ForCausalLM, Qwen2Config)
QWEN3 = (Qwen3ForCausalLM, Qwen3Config)
HALF_WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
REVERSED = {"use_sliding_window": True, "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
PAD = {"pad_token_id": 0}  # Phi-3's own lies outside this vocabulary
SHORT = {**PAD, "original_max_position_embeddings": 256}
LONG = {**PAD, "original_max_position_embeddings": 16}

FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llama": (*LLAMA, {}),
    "llama-tied": (*LLAMA, {"tie_word_embeddings": True}),
    "llama-rope3": (*LLAMA, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (*LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 16.0}}),
    "llama-dynamic": (*LLAMA, {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-yarn": (*LLAMA, {"rope_parameters": YARN_ROPE}),
    "llama-head12": (*LLAMA, {"head_dim": 12}),
    "llama-bias": (*LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (*MISTRAL, {"sliding_window": 6}),
    "mistral-full": (*MISTRAL, {"sliding_window": None}),
    "qwen2": (*QWEN2, {}),
    "qwen2-window": (*QWEN2, HALF_WINDOWED),
    "qwen3": (*QWEN3, {"head_dim": 16}),
    "qwen3-window": (*QWEN3, {"head_dim": 8, "attention_bias": True, **REVERSED}),
    "phi3": (*PHI3, {"sliding_window": 6, **PAD}),
    "phi3-short": (*PHI3, {"rope_parameters": {**LONG_ROPE, "factor": 4.0}, **SHORT}),
    "phi3-long": (*PHI3, {"rope_parameters": LONG_ROPE, **LONG}),
    "phi3-partial": (*PHI3, {"rope_parameters": {"partial_rotary_factor": 0.5}, **PAD}),
}


def make_model(family: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode; biases and norms are random too, and not near zero."""
    model_class, config_class, extra = FAMILIES[family]
    config = config_class(**copy.deepcopy({**SIZES, **extra, **overrides}))
    return randomised(lambda: model_class(config), seed)


def randomised(make: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """The model that `make` gives, with random weights, fp32 and in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("bias"):
                    weight.normal_(0.0, 0.5)
                elif "norm" in name or "ln_q" in name:
                    weight.uniform_(0.5, 1.5)
                else:  # gain 1: at gain 2 chunking moved logprobs by 1.7e-5, now by 3e-6
                    inputs = weight[0].numel() if weight.ndim > 1 else len(weight)
                    weight.normal_(0.0, inputs**-0.5)
    return model.float().eval()


def save_checkpoint(
    path: Path, family: str = "llama", seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> PreTrainedModel:
    """Write the folder `path` with save_pretrained; returns the model as the oracle."""
    model = make_model(family, seed, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model
