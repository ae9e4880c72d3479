"""Adapters that PEFT makes for whole vision-language models, and what it says of pictures."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from torch import Tensor

from purestep.models.adapter_files import Adapter, read_adapter
from purestep.models.config import TOWER
from purestep.models.tower_linears import tower_linears
from purestep.models.tower_rows import ItemAdapters, TowerRows
from purestep.state.adapters import ROW_BLOCK
from tests.models.peft_fixtures import save, wrap
from tests.models.tiny_vision import features_of, load, picture, processed, saved

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
PICTURES = picture(60, 45), picture(45, 60, seed=1), picture(112, 60, seed=2)
BATCH = (  # picture, adapter
    (0, "all"),
    (1, None),
    (0, "some"),
    (2, "all"),
    (0, None),
    (1, "some"),
    (2, None),
    (1, "all"),
)
PLACES = {"all": (1, (4,)), "some": (0, (3, 1))}  # slot, row blocks
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
    found = features_of(oracle(kind, name), given)
    return torch.cat([rows.flatten(0, -2) for rows in found])


def item_adapters(
    kind: str,
    names: Sequence[str | None],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> ItemAdapters:
    """For items with these adapters: rows at PLACES; what is nobody's is NaN."""
    model, rows, P = load(kind), {}, 5 * ROW_BLOCK
    for linear in tower_linears(model.vision.family, model.vision.config):
        if linear.parent != TOWER:
            continue
        a_SPD = torch.full((len(linear.out_sizes), P, linear.in_features), torch.nan)
        b_PO = torch.full((P, linear.out_features), torch.nan)
        for name, (_, blocks) in PLACES.items():
            index = (torch.tensor(blocks)[:, None] * ROW_BLOCK + torch.arange(ROW_BLOCK)).flatten()
            a_SPD[:, index], b_PO[index] = 0, 0
            if (arena := adapter(kind, name).arenas.get(linear.name)) is not None:
                a_SPD[:, index], b_PO[index] = arena.a_LSRD[0], arena.b_LRO[0]
        rows[linear.name] = TowerRows(
            a_SPD=a_SPD.to(device, dtype), b_PO=b_PO.to(device, dtype), out_sizes=linear.out_sizes
        )
    return ItemAdapters(
        rows=rows,
        places=tuple(PLACES.values()),
        slots=tuple(PLACES[name][0] if name else -1 for name in names),
        send=lambda arrays: {n: torch.from_numpy(a).to(device) for n, a in arrays.items()},
    )
