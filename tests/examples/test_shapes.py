"""Pictures of shapes: what is held out, what answers mean, and the pixels that training sees."""

import json
import math
import random
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.engine.image_processor import load_image_processor, process
from tests.examples.contact_sheet import Cell, draw_sheet
from tests.examples.shapes import (
    COLORS,
    COUNTS,
    PLACES,
    SHAPES,
    Group,
    Scene,
    draw,
    make_scene,
    questions,
)
from tests.examples.train_vlm_data import NOWHERE, ROWS, as_processed, make_chunk
from tests.examples.vlm import IMAGE_PROCESSOR

scenes = st.builds(
    lambda seed, held_out, groups: make_scene(
        random.Random(seed), held_out=held_out, groups=groups
    ),
    st.integers(0, 2**32),
    st.booleans(),
    st.integers(1, 2),
)


def test_one_count_of_every_pair_is_held_out() -> None:
    every = [Group(*g) for g in product(COLORS, SHAPES, range(1, 6))]
    held_out = [group for group in every if group.held_out]
    assert len({(g.color, g.shape) for g in held_out}) == len(held_out) == len(every) / len(COUNTS)
    assert set(Counter(g.count for g in held_out).values()) == {len(COLORS)}
    for color, count in product(COLORS, range(1, 6)):
        assert sum(g.held_out for g in every if (g.color, g.count) == (color, count)) == 1
    for shape, count in product(SHAPES, range(1, 6)):
        seen = [g for g in every if (g.shape, g.count) == (shape, count) and not g.held_out]
        assert seen, "no training picture has this shape in this number"


@given(st.integers(0, 2**32), st.integers(1, 2))
def test_training_never_shows_what_is_held_out(seed: int, groups: int) -> None:
    assert not any(
        g.held_out for g in make_scene(random.Random(seed), held_out=False, groups=groups).groups
    )
    assert make_scene(random.Random(seed), held_out=True, groups=groups).groups[0].held_out


@given(scenes)
def test_answers_are_what_is_drawn(scene: Scene) -> None:
    for about, group in enumerate(scene.groups):
        asked = {q.kind: q for q in questions(scene, random.Random(0), about)}
        members = [thing for thing in scene.things if thing.group == about]
        assert asked["count"].answer == COUNTS[len(members) - 1]
        assert (asked["color"].answer, asked["shape"].answer) == (group.color, group.shape)
        others = [other for other in scene.groups if other != group]
        assert all(g.color != group.color and g.shape != group.shape for g in others)
    assert ("place" in asked) == (scene.place is not None)
    for thing in scene.things:
        side = {"left": thing.x, "right": 1 - thing.x, "top": thing.y, "bottom": 1 - thing.y}
        assert scene.place is None or side[scene.place] < 0.4
        assert min(side.values()) > thing.radius
    for a, b in combinations(scene.things, 2):
        assert math.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius


@given(scenes)
def test_a_picture_is_its_scene(scene: Scene) -> None:
    pixels = np.asarray(draw(scene)).astype(int)
    assert pixels.shape == (scene.side, scene.side, 3)
    assert np.array_equal(pixels, np.asarray(draw(scene)))
    for thing in scene.things:
        color = COLORS[scene.groups[thing.group].color]
        found = pixels[int(thing.y * scene.side), int(thing.x * scene.side)]
        assert np.abs(found - color).max() <= 12 + 8 + 1  # shade and noise


@pytest.mark.parametrize("side", [96, 128, 224])
def test_training_sees_the_pixels_that_the_image_processor_makes(side: int, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    processor = load_image_processor(tmp_path)
    assert processor is not None
    scene = make_scene(random.Random(3), held_out=False)
    picture = draw(Scene(scene.groups, scene.place, scene.things, side, scene.seed))
    got = process(processor, np.asarray(picture), {}, 10**6, "it")["pixel_values"][0]
    want = np.asarray(as_processed(picture)).astype(np.float32).transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_chunks_say_what_is_in_their_pictures() -> None:
    chunk = make_chunk(5, size=24)
    again = make_chunk(5, size=24)
    assert np.array_equal(chunk.pixels_BSSC, again.pixels_BSSC)
    assert chunk.chats == again.chats
    for patches, counts, place, chat in zip(
        chunk.patch_BP, chunk.counts_BC, chunk.place_B, chunk.chats, strict=True
    ):
        seen = {int(p - 1) // len(SHAPES) for p in patches if p}
        assert seen == set(np.flatnonzero(counts))
        assert np.count_nonzero(patches) >= counts.sum() - 1  # two centres may share a patch
        for question in chat:
            if question.kind == "place":
                assert PLACES[place] == question.answer
        if place < NOWHERE:
            y, x = np.nonzero(patches.reshape(ROWS, ROWS))
            middle = {"left": x, "right": ROWS - 1 - x, "top": y, "bottom": ROWS - 1 - y}
            assert middle[PLACES[place]].mean() < (ROWS - 1) / 2


def test_a_sheet_holds_every_picture(tmp_path: Path) -> None:
    drawn = [draw(make_scene(random.Random(n), held_out=True)) for n in range(5)]
    cells = [Cell(picture, "What is it? " * 9, {"base": "red"}) for picture in drawn]
    draw_sheet(cells, tmp_path / "new" / "sheet.png")
    assert (tmp_path / "new" / "sheet.png").stat().st_size > 5000
