"""Qwen2-VL and Qwen2.5-VL: pictures of any size, M-RoPE; against transformers."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from purestep.models.decoder import forward
from purestep.models.families import vision_config_from_hf
from purestep.models.fused import fused_forward
from purestep.models.qwen2_5_vl import QWEN2_5_VL, window_order
from purestep.models.qwen_patches import Patches, largest, most_rows
from purestep.state.errors import CheckpointError, RequestError
from purestep.state.pytree import evolve
from tests.models.tiny_vision import (
    assert_depends_on_pixels,
    assert_same_answers,
    computed,
    kinds,
    load,
    picture,
)

KINDS = ["qwen2_vl", "qwen2_vl-tied", "qwen2_5_vl"]
WIDE, TALL, TINY, USUAL, ODD = (400, 2), (3, 600), (1, 1), (60, 45), (29, 27)
REAL = Patches(num_channels=3, temporal_size=2, patch_size=14, merge_size=2, rope_theta=1e4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        [[3, 4, 5], USUAL, [6, 7]],
        [USUAL, [3, 4, 5]],
        [[3, 4, 5], TINY],
        [WIDE],
        [TALL, [8], WIDE, [9], TINY, [9], ODD, [9], (112, 112), [9], TINY],
        [(112, 112), [3], (84, 168)],
        [[8, 9, 10, 11]],
    ],
    ids=["middle", "first", "last", "only", "several", "large", "none"],
)
def test_answers_of_transformers(kind: str, parts: list[Any]) -> None:
    drawn = [picture(*part) if isinstance(part, tuple) else part for part in parts]
    assert_same_answers(load(kind), drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_about_the_picture(kind: str) -> None:
    assert_depends_on_pixels(load(kind), picture(*USUAL))


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_alone_and_among_others(kind: str) -> None:
    """Neighbours of the same grid, of the same number of patches, and of others."""
    model = load(kind)
    sizes = (USUAL, TINY, (56, 112), (112, 56), ODD, TINY, (112, 56))
    items = [model.item(picture(*size, seed=n)) for n, size in enumerate(sizes)]
    for got, item in zip(model.encode(items), items, strict=True):
        assert len(got) == model.count(item)
        torch.testing.assert_close(got, model.encode([item])[0], atol=1e-5, rtol=1e-5)
        assert got.untyped_storage().nbytes() == got.nbytes


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_steps_in_time_are_sequences_of_their_own(kind: str) -> None:
    """Two steps encode as each does alone; transformers agrees."""
    model = load(kind)
    one, two = (model.item(picture(112, 112, seed=n)) for n in (1, 2))
    t, h, w = one["image_grid_thw"].tolist()
    both = {
        "pixel_values": torch.cat((one["pixel_values"], two["pixel_values"])),
        "image_grid_thw": torch.tensor([2 * t, h, w]),
    }
    [rows] = model.encode([both])
    torch.testing.assert_close(rows, torch.cat(model.encode([one, two])), atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        [want] = model.oracle.model.get_image_features(
            both["pixel_values"], both["image_grid_thw"][None]
        ).pooler_output
    torch.testing.assert_close(rows, want, atol=1e-4, rtol=1e-4)


def test_positions_matter() -> None:
    """The oracle would not be one of positions, if plain ones did as well."""
    model = load("qwen2_vl")
    parts = [picture(60, 120), [3, 4]]

    def with_plain_positions(*given: Any, **named: Any) -> Any:
        params, adapters, kv, batch, config = given
        return forward(params, adapters, kv, evolve(batch, position_3T=None), config, **named)

    _, got, _ = computed(model, parts)
    _, plain, _ = computed(model, parts, with_plain_positions)
    assert (got - plain).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_fused_equals_plain(kind: str) -> None:
    model = load(kind)
    parts = [[5], picture(60, 120), [3, 4], picture(120, 60), [9]]
    _, plain, _ = computed(model, parts)
    _, fused, _ = computed(model, parts, fused_forward)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


TABLE = [  # multimodal.md 6.3: height, width, rows with the checkpoint's limits and with 5.24's
    (1024, 1024, 1369, 1225),
    (224, 224, 64, 64),
    (336, 336, 144, 144),
    (480, 640, 391, 391),
    (1080, 1920, 2691, 1222),
    (10, 10, 4, 4),
    (28, 28, 4, 4),
    (10, 2000, 29, 29),
]


@pytest.mark.parametrize(("height", "width", "checkpoint", "default"), TABLE)
def test_number_of_rows(height: int, width: int, checkpoint: int, default: int) -> None:
    model = load("qwen2_vl")
    for most, rows in ((12_845_056, checkpoint), (1_003_520, default)):
        h, w = smart_resize(height, width, 28, 3136, most)
        item = {"image_grid_thw": torch.tensor([1, h // 14, w // 14])}
        assert model.count(item) == rows
    if max(height, width) < 700:
        limits = {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}
        given = model.processor(images=picture(width, height), return_tensors="pt", **limits)
        item = model.vision.family.item(model.vision.config, given)
        assert model.count(item) == checkpoint


@pytest.mark.parametrize(
    ("least", "most"), [(3136, 12_845_056), (3136, 3136), (100_000, 120_000), (784, 50_000)]
)
def test_no_picture_has_more_rows_than_the_largest(least: int, most: int) -> None:
    bound = most_rows(least, most, 28)
    source = random.Random(0)
    for _ in range(3000):
        ratio, area = source.uniform(1, 200), math.exp(source.uniform(0, 18))
        sides = math.sqrt(area / ratio), math.sqrt(area * ratio)
        h, w = (max(1, round(side)) for side in source.sample(sides, 2))
        if max(h, w) <= 200 * min(h, w):
            h, w = smart_resize(h, w, 28, least, most)
            assert h * w // 28**2 <= bound
    limits = {"size": {"shortest_edge": least, "longest_edge": min(most, 200_000)}}
    item = largest(REAL, limits)
    t, h, w = item["image_grid_thw"].tolist()
    assert t * h * w == 4 * most_rows(least, min(most, 200_000), 28)
    assert item["pixel_values"].shape == (t * h * w, 1176)
    old = {"min_pixels": least, "max_pixels": min(most, 200_000), "size": None}
    assert largest(REAL, old)["image_grid_thw"].tolist() == [t, h, w]
    usual = {"size": {"shortest_edge": 3136, "longest_edge": 1_003_520}}
    assert largest(REAL, {})["image_grid_thw"].equal(largest(REAL, usual)["image_grid_thw"])


def test_the_largest_item_is_encoded() -> None:
    model = load("qwen2_vl")
    item = model.vision.family.largest(model.vision.config, model.processor.to_dict())
    assert len(model.encode([item])[0]) == model.count(item) >= 40


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temporal_patch_size": 1}, r"\(16, 588\).*takes \(16, 1176\)"),
        ({"patch_size": 7}, r"\(100, 294\).*takes \(100, 1176\)"),
        ({"merge_size": 1}, r"grid of \(1, 5, 5\).*blocks of 2"),
    ],
    ids=str,
)
def test_patches_of_another_kind_are_refused(options: dict[str, int], match: str) -> None:
    model = load("qwen2_vl")
    given = model.processor(images=picture(70, 70), return_tensors="pt", **options)
    with pytest.raises(RequestError, match=match):
        model.vision.family.item(model.vision.config, given)


# The windows of Qwen2.5-VL


@pytest.mark.parametrize(
    ("grids", "sizes"),
    [
        ([(1, 12, 6)], ((2, 36),)),
        ([(1, 8, 8)], ((1, 4), (2, 12), (1, 36))),
        ([(1, 4, 14)], ((1, 8), (2, 24))),
        ([(1, 2, 2), (1, 8, 8), (2, 6, 6)], ((2, 4), (2, 12), (3, 36))),
    ],
)
def test_window_order(grids: list[Any], sizes: tuple[tuple[int, int], ...]) -> None:
    """Windows of 3 x 3 blocks, alike ones side by side, each in reading order inside."""
    order, found = window_order(grids, 2, 3)
    blocks = [
        (item, step, row // 3, column // 3)
        for item, (t, h, w) in enumerate(grids)
        for step in range(t)
        for row in range(h // 2)
        for column in range(w // 2)
    ]
    assert sorted(order.tolist()) == list(range(len(blocks)))
    assert found == sizes
    start = 0
    for count, patches in found:
        for _ in range(count):
            window = order[start : start + patches // 4].tolist()
            assert len({blocks[u] for u in window}) == 1, "one window"
            assert window == sorted(window)
            start += patches // 4


def test_windows_matter() -> None:
    """A patch changes rows beyond its window through the full layer alone."""
    model = load("qwen2_5_vl")
    config = replace(model.vision.config, full_layers=())
    item = model.item(picture(112, 112))
    changed = item | {"pixel_values": item["pixel_values"].clone()}
    changed["pixel_values"][0] += 1.0

    def moved(config: Any) -> list[int]:
        with torch.inference_mode():
            one, two = QWEN2_5_VL.encode(model.vision.params, config, [item, changed])
        return (one - two).abs().amax(1).gt(1e-6).nonzero().flatten().tolist()

    assert moved(config) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert moved(model.vision.config) == list(range(16))


def test_windows_smaller_than_a_block_are_refused() -> None:
    config = kinds()["qwen2_5_vl"][1].to_dict()
    config["vision_config"]["window_size"] = 27
    with pytest.raises(CheckpointError, match=r"window_size 27 .* 28 pixels"):
        vision_config_from_hf(config)
    config["vision_config"]["patch_size"] = [14, 14]
    with pytest.raises(CheckpointError, match=r"patch_size \[14, 14\]"):
        vision_config_from_hf(config)
