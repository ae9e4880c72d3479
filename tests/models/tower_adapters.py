"""Adapters that PEFT makes for whole vision-language models, and what it says of pictures."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from torch import Tensor

from purestep.models.adapter_files import Adapter, read_adapter
from purestep.models.tower_linears import tower_linears
from tests.models.peft_fixtures import save, wrap
from tests.models.tiny_vision import load, processed, saved

# `all` touches tower, projector and language model, `some` parts of the first two, `text` the last.
TARGETS: dict[str, dict[str, Any]] = {
    "all": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    "some": {
        "r": 12,
        "lora_alpha": 12,
        "target_modules": r".*(q_proj|attn\.qkv|fc1|merger\.mlp\.2|linear_2|modality.*proj|o_proj)",
    },
    "text": {"target_modules": r".*language_model\..*\.(q|v|down)_proj"},
}
TEXT = {"idefics3": r".*text_model\..*\.(q|v|down)_proj"}


@cache
def peft_model(kind: str, name: str) -> PeftModel:
    fields = TARGETS[name]
    if name == "text" and kind in TEXT:
        fields = {"target_modules": TEXT[kind]}
    return wrap(saved(kind)[1], seed=sum(map(ord, name)), **fields)


@cache
def folder(kind: str, name: str) -> Path:
    return save(peft_model(kind, name))


@cache
def adapter(kind: str, name: str) -> Adapter:
    model = load(kind)
    tower = tower_linears(model.vision.family, model.vision.config)
    return read_adapter(
        folder(kind, name), model.config, dtype=torch.float32, max_rank=None, tower=tower
    )


def oracle(kind: str, name: str | None) -> Any:
    """The transformers model with an adapter, or without one."""
    return saved(kind)[1] if name is None else peft_model(kind, name).base_model.model


@torch.inference_mode()
def wanted_rows(kind: str, name: str | None, image: Image.Image) -> Tensor:
    """The rows of one picture, by transformers and PEFT: [E, D]."""
    given = processed(load(kind), [image])
    found = oracle(kind, name).model.get_image_features(**given).pooler_output
    return torch.cat([rows.flatten(0, -2) for rows in found])
