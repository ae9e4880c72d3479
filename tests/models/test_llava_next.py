"""LLaVA-NeXT: an overview and tiles; against transformers."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from transformers import CLIPVisionConfig, LlavaNextConfig
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from purestep.models.families import vision_config_from_hf
from purestep.models.llava_next import LLAVA_NEXT, LlavaNextVision
from purestep.state.errors import CheckpointError, RequestError
from tests.models.tiny_vision import (
    GRIDS,
    TOWER,
    assert_depends_on_pixels,
    assert_same_answers,
    load,
    next_config,
    picture,
    words,
)

KINDS = ["llava_next", "llava_next-siglip"]
WIDE, TALL, TINY, USUAL, SQUARE = (1000, 1), (3, 140), (1, 1), (60, 45), (112, 112)
REAL_GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        [[3, 4, 5], USUAL, [6, 7]],
        [USUAL, [3, 4, 5]],
        [[3, 4, 5], TINY],
        [WIDE],
        [TALL, WIDE, [9], TINY, SQUARE, TINY],
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
    sizes = (USUAL, TINY, WIDE, TALL, SQUARE, USUAL)
    items = [model.item(picture(*size, seed=n)) for n, size in enumerate(sizes)]
    for got, item in zip(model.encode(items), items, strict=True):
        assert len(got) == model.count(item)
        torch.testing.assert_close(got, model.encode([item])[0], atol=1e-5, rtol=1e-5)
        assert got.untyped_storage().nbytes() == got.nbytes
    assert model.encode([]) == []


@cache
def real() -> LlavaNextVision:
    tower = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    return vision_config_from_hf(LlavaNextConfig(vision_config=tower))[1]


def rows_of(config: LlavaNextVision, height: int, width: int) -> int:
    item = {"image_sizes": torch.tensor([height, width])}
    ids, is_embed = LLAVA_NEXT.placeholder(config, item, words)
    assert is_embed is None
    return len(ids)


@pytest.mark.parametrize(
    ("height", "width", "rows"),
    [(336, 336, 1176), (672, 672, 2928), (480, 640, 2340), (1080, 1920, 1948), (1000, 300, 2232)],
)
def test_number_of_rows(height: int, width: int, rows: int) -> None:
    """multimodal.md 6.2."""
    assert rows_of(real(), height, width) == rows


@settings(max_examples=300)
@given(st.integers(1, 3000), st.integers(1, 3000))
@example(1, 56)
@example(2999, 53)
def test_number_of_rows_of_transformers(height: int, width: int) -> None:
    """And no picture has more than the largest item."""
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=REAL_GRIDS),
        patch_size=14,
        num_additional_image_tokens=1,
        _get_unpadded_features=lambda *a: LlavaNextProcessor._get_unpadded_features(None, *a),
    )
    want = LlavaNextProcessor._get_number_of_features(processor, height, width, 336, 336) - 1
    assert rows_of(real(), height, width) == want <= 2928


def test_the_largest_item_has_the_most_rows() -> None:
    config = real()
    item = LLAVA_NEXT.largest(config, {})
    assert item["pixel_values"].shape == (5, 3, 336, 336)
    assert rows_of(config, *item["image_sizes"].tolist()) == 2928
    model = load("llava_next")
    small = LLAVA_NEXT.largest(model.vision.config, {})
    assert len(model.encode([small])[0]) == model.count(small) == 16 + 64 + 8


def test_tiles_of_other_resolutions_are_refused() -> None:
    model = load("llava_next")
    given = model.processor(
        images=picture(112, 112), return_tensors="pt", image_grid_pinpoints=[[56, 56]]
    )
    with pytest.raises(RequestError, match=r"2 tiles .*\(112, 112\).* takes 1 \+ 2 x 2"):
        LLAVA_NEXT.item(model.vision.config, given)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"vision_feature_select_strategy": "full"}, "'full' leaves 17 rows .* square of 4"),
        ({"image_grid_pinpoints": [[56, 100]]}, r"\[\[56, 100\]\] must be pairs of multiples"),
        ({"image_grid_pinpoints": []}, "must be pairs"),
    ],
    ids=["rows", "multiples", "none"],
)
def test_unsupported_settings_are_named(fields: dict[str, Any], match: str) -> None:
    config = next_config(CLIPVisionConfig(**TOWER)).to_dict() | fields
    with pytest.raises(CheckpointError, match=match):
        vision_config_from_hf(config)
    assert vision_config_from_hf(next_config(CLIPVisionConfig(**TOWER)))[1].resolutions == tuple(
        map(tuple, GRIDS)
    )
