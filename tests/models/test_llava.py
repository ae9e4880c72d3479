"""LLaVA-1.5 with its towers, against transformers."""

from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, LlavaConfig, ViTConfig

from purestep.models.families import vision_config_from_hf
from purestep.models.llava import LLAVA
from purestep.state.errors import CheckpointError, RequestError
from tests.models.tiny_vision import (
    TOWER,
    assert_depends_on_pixels,
    assert_same_answers,
    llava,
    load,
    picture,
    words,
)

KINDS = ["llava", "llava-layers", "llava-bare", "llava-siglip"]
WIDE, TALL, TINY, USUAL = (200, 5), (1, 250), (1, 1), (60, 45)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        [[3, 4, 5], USUAL, [6, 7]],
        [USUAL, [3, 4, 5]],
        [[3, 4, 5], TINY],
        [WIDE],
        [TALL, WIDE, [9], TINY, TINY],
        [[8, 9, 10, 11]],
    ],
    ids=["middle", "first", "last", "only", "several", "none"],
)
def test_answers_of_transformers(kind: str, parts: list[Any]) -> None:
    drawn = [picture(*part) if isinstance(part, tuple) else part for part in parts]
    assert_same_answers(load(kind), drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_about_the_picture(kind: str) -> None:
    assert_depends_on_pixels(load(kind), picture(*USUAL))


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_alone_and_among_others(kind: str) -> None:
    model = load(kind)
    items = [model.item(picture(*size)) for size in (USUAL, TINY, WIDE, TALL)]
    for got, item in zip(model.encode(items), items, strict=True):
        torch.testing.assert_close(got, model.encode([item])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("side", "patch", "strategy", "clip", "siglip"),
    [(336, 14, "default", 576, 575), (336, 14, "full", 577, 576), (384, 14, "full", 730, 729)],
)
def test_number_of_rows(side: int, patch: int, strategy: str, clip: int, siglip: int) -> None:
    """multimodal.md 6.1: one number for every picture."""
    for model_type, rows in (("clip_vision_model", clip), ("siglip_vision_model", siglip)):
        tower = {"model_type": model_type, "image_size": side, "patch_size": patch}
        _, config = vision_config_from_hf(
            LlavaConfig(vision_config=tower, vision_feature_select_strategy=strategy)
        )
        ids, is_embed = LLAVA.placeholder(config, LLAVA.largest(config, {}), words)
        assert ids.tolist() == [32000] * rows
        assert is_embed is None


def test_the_layers_above_the_taken_ones_are_not_loaded() -> None:
    assert len(load("llava").vision.params.tower.layers) == 2
    assert len(load("llava-bare").vision.params.tower.layers) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_item_is_a_usual_one(kind: str) -> None:
    model = load(kind)
    item = LLAVA.largest(model.vision.config, model.processor.to_dict())
    assert {name: x.shape for name, x in item.items()} == {
        name: x.shape for name, x in model.item(picture(*USUAL)).items()
    }
    assert len(model.encode([item])[0]) == model.count(item)


def test_pixels_of_another_size_are_refused() -> None:
    model = load("llava")
    given = model.processor(
        images=picture(*USUAL), return_tensors="pt", crop_size={"height": 28, "width": 42}
    )
    with pytest.raises(RequestError, match=r"\(3, 28, 42\).*takes \(3, 56, 56\)"):
        LLAVA.item(model.vision.config, given)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (llava(ViTConfig()), "'vit' is not supported, only clip_vision_model"),
        (llava(CLIPVisionConfig(**TOWER | {"hidden_act": "tanh"})), "activation 'tanh'"),
        (llava(CLIPVisionConfig(**TOWER), projector_hidden_act="mish"), "activation 'mish'"),
        (llava(CLIPVisionConfig(**TOWER), vision_feature_layer=4), "vision_feature_layer=4.*4"),
        (llava(CLIPVisionConfig(**TOWER), vision_feature_layer=[-2, -5]), r"\[-2, -5\]"),
        (llava(CLIPVisionConfig(**TOWER | {"image_size": [28, 56]})), r"image_size \[28, 56\]"),
    ],
    ids=["kind", "tower", "projector", "beyond", "before", "oblong"],
)
def test_unsupported_towers_are_named(config: LlavaConfig, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        vision_config_from_hf(config)


def test_pixels_take_the_format_of_the_tower() -> None:
    """The processor gives float32, whatever the tower computes in."""
    model = load("llava")
    item = model.item(picture(*USUAL))
    assert item["pixel_values"].dtype == torch.float32
    half = {"pixel_values": item["pixel_values"].half()}
    rounded = {"pixel_values": half["pixel_values"].float()}
    assert torch.equal(model.encode([half])[0], model.encode([rounded])[0])
