"""Pixtral: pictures of any size, line by line; against transformers."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from transformers import LlavaConfig, PixtralVisionConfig

from purestep.models.families import vision_config_from_hf
from purestep.models.pixtral import PIXTRAL
from purestep.state.errors import CheckpointError, RequestError
from tests.models.tiny_vision import (
    PATCH,
    assert_depends_on_pixels,
    assert_same_answers,
    load,
    picture,
    pixtral,
)

WIDE, TALL, TINY, USUAL, SQUARE = (1000, 15), (3, 140), (1, 1), (60, 45), (70, 70)
NAMES = {"[IMG]": 127, "[IMG_BREAK]": 120, "[IMG_END]": 121}


def names(text: str) -> list[int]:
    return [NAMES[text]]


@pytest.mark.parametrize(
    "parts",
    [
        [[3, 4, 5], USUAL, [6, 7]],
        [SQUARE, [3, 4, 5]],
        [[3, 4, 5], TINY],
        [WIDE],
        [TALL, WIDE, [9], USUAL, USUAL],
        [[8, 9, 10, 11]],
    ],
    ids=["middle", "first", "last", "only", "several", "none"],
)
def test_answers_of_transformers(parts: list[Any]) -> None:
    drawn = [picture(*part) if isinstance(part, tuple) else part for part in parts]
    assert_same_answers(load("pixtral"), drawn)


def test_rows_are_about_the_picture() -> None:
    assert_depends_on_pixels(load("pixtral"), picture(*USUAL))


def test_an_item_alone_and_among_others() -> None:
    model = load("pixtral")
    items = [model.item(picture(*size)) for size in (USUAL, TINY, WIDE, SQUARE, TALL)]
    for got, item in zip(model.encode(items), items, strict=True):
        torch.testing.assert_close(got, model.encode([item])[0], atol=1e-5, rtol=1e-5)


@given(st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
@example(1, 1)
@example(2000, 1)
@example(1, 2000)
@example(71, 70)
def test_ids_line_by_line(width: int, height: int) -> None:
    """multimodal.md 6.7, by the size that the image processor tells. (Their processor for texts
    cannot be imported without torchvision.)"""
    model, image = load("pixtral"), picture(width, height)
    if not min(width, height) // max(width / 70, height / 70, 1):
        with pytest.raises(ValueError, match="Size must"):  # their processor makes nothing of it
            model.processor(images=image, return_tensors="pt")
        return
    made = model.processor(images=image, return_tensors="pt")
    h, w = (made["image_sizes"][0] // PATCH).tolist()
    want = ([127] * w + [120]) * h
    want[-1] = 121
    item = model.item(image)
    ids, is_embed = PIXTRAL.placeholder(model.vision.config, item, names)
    assert ids.tolist() == want
    assert is_embed.tolist() == [token == 127 for token in want]
    largest = PIXTRAL.largest(model.vision.config, model.processor.to_dict())
    assert len(ids) <= len(PIXTRAL.placeholder(model.vision.config, largest, names)[0])


@pytest.mark.parametrize(
    ("size", "length", "rows"),
    [
        ((1024, 1024), 4160, 4096),
        ((512, 256), 528, 512),
        ((17, 16), 3, 2),
        ((2048, 1024), 2080, 2048),
    ],
)
def test_number_of_rows(size: tuple[int, int], length: int, rows: int) -> None:
    """multimodal.md 6.7, width x height."""
    _, config = vision_config_from_hf(
        LlavaConfig(
            vision_config=PixtralVisionConfig(),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    )
    made = type(load("pixtral").processor)()(images=picture(*size), return_tensors="pt")
    ids, is_embed = PIXTRAL.placeholder(config, PIXTRAL.item(config, made), names)
    assert (len(ids), is_embed.sum()) == (length, rows)
    largest = PIXTRAL.largest(config, {})
    assert PIXTRAL.placeholder(config, largest, names)[1].sum() == 4096


def test_what_the_tower_cannot_take_is_refused() -> None:
    model = load("pixtral")
    made = model.processor(
        images=picture(*USUAL), return_tensors="pt", patch_size={"height": 15, "width": 15}
    )
    with pytest.raises(RequestError, match=r"\(3, 45, 60\).*whole patches of 14"):
        PIXTRAL.item(model.vision.config, made)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (pixtral(vision_feature_layer=-2), "vision_feature_layer=-2"),
        (pixtral(vision_feature_select_strategy="default"), "'default'"),
    ],
)
def test_unsupported_settings_are_named(config: LlavaConfig, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        vision_config_from_hf(config)
