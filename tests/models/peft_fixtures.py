"""Adapters that PEFT makes for the tiny random models. Nothing here moves the global RNG."""

import atexit
import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Embedding, LoraLayer
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from purestep.models.config import ModelConfig
from purestep.models.families import model_config_from_hf
from tests.models.tiny import make_model


def tiny_llama(*, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """T-LLAMA: random, float32, eval mode; `overrides` are fields of LlamaConfig."""
    return make_model("llama", seed, **overrides)


def tiny_qwen2(*, seed: int = 0, **overrides: Any) -> Qwen2ForCausalLM:
    """T-QWEN2, of the same size: its q/k/v biases are not zero."""
    return make_model("qwen2", seed, **overrides)


def model_config(model: PreTrainedModel) -> ModelConfig:
    """What the engine knows of `model`."""
    return model_config_from_hf(model.config)


def wrap(model: PreTrainedModel, *, seed: int, **lora_config: Any) -> PeftModel:
    """A copy of `model` with a random adapter called "default"; `model` stays as it is.

    `lora_config` are fields of LoraConfig. Without any: rank 4, scaling 2, on q_proj and v_proj.
    """
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    config = LoraConfig(**{**fields, "init_lora_weights": False, **lora_config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(copy.deepcopy(model), config).eval()


def make_adapter(
    model: PreTrainedModel,
    path: str | Path | None = None,
    *,
    seed: int,
    safe_serialization: bool = True,
    **lora_config: Any,
) -> Path:
    """The folder of a random adapter for `model`, as PEFT saves it; see `wrap` for the fields.

    Without `path` the folder is a temporary one that goes when the process ends.
    """
    return save(wrap(model, seed=seed, **lora_config), path, safe_serialization=safe_serialization)


def save(
    peft_model: PeftModel, path: str | Path | None = None, *, safe_serialization: bool = True
) -> Path:
    """Let PEFT save the adapter of a wrapped model; see `make_adapter`."""
    if path is None:
        path = tempfile.mkdtemp(prefix="purestep-adapter-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    peft_model.save_pretrained(str(path), safe_serialization=safe_serialization)
    return Path(path)


def deltas(peft_model: PeftModel, adapter: str = "default") -> dict[str, Tensor]:
    """PEFT's own delta weight [out, in] of every adapted module, in float64, by module name.

    An embedding's inputs are the tokens, so its delta is [hidden, vocabulary]."""
    model, found = copy.deepcopy(peft_model).double(), {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        is_embedding = isinstance(module, Embedding)
        if adapter in (module.lora_embedding_A if is_embedding else module.lora_A):
            delta = module.get_delta_weight(adapter).detach()
            found[name.removeprefix("base_model.model.")] = delta.T if is_embedding else delta
    return found
