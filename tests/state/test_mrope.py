"""M-RoPE positions (multimodal.md, section 7), against transformers' own models."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from purestep.state.errors import RequestError
from purestep.state.media import Feature
from purestep.state.mrope import Media, check_grids, mrope_positions

MERGE = 2


def laid_out(parts: list[Any]) -> tuple[int, list[Media]]:
    """Length and media of a prompt: numbers of text tokens, and grids of merged patches."""
    length, media = 0, []
    for part in parts:
        if isinstance(part, tuple):
            t, h, w = part
            media.append((length, (t, h * MERGE, w * MERGE)))
        length += int(np.prod(part))
    return length, media


def hf_index(model: Any, length: int, media: list[Media], kind: int, **given: Any) -> Any:
    """What `get_rope_index` says; `kind` 1 for images, 2 for videos."""
    types = torch.zeros(1, length, dtype=torch.int)
    for offset, (t, h, w) in media:
        types[0, offset : offset + t * h * w // MERGE**2] = kind
    grids = torch.tensor([grid for _, grid in media]).reshape(-1, 3)
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    self = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    self.get_vision_position_ids = lambda *a, **k: model.get_vision_position_ids(self, *a, **k)
    names = {1: "image_grid_thw", 2: "video_grid_thw"}
    index, delta = model.get_rope_index(
        self, torch.zeros(1, length, dtype=torch.int64), types, **{names[kind]: grids}, **given
    )
    return index[:, 0].numpy(), int(delta)


side = st.integers(1, 5)
text = st.integers(1, 6)
images = st.tuples(st.just(1), side, side)


def prompts(grids: st.SearchStrategy) -> st.SearchStrategy[list[Any]]:
    """Media with text between them, as every template has it: transformers takes two that touch
    for one."""
    pairs = st.lists(st.tuples(text, grids), max_size=4)
    flat = pairs.map(lambda drawn: [part for pair in drawn for part in pair])
    return st.tuples(flat, st.booleans(), st.integers(0, 6)).map(
        lambda drawn: [*drawn[0][drawn[1] :], drawn[2]]
    )


@settings(max_examples=60)
@given(prompts(images), st.sampled_from([Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel]))
@example([(1, 1, 5)], Qwen2VLModel)
@example([(1, 5, 1), 1, (1, 1, 1)], Qwen2_5_VLModel)
@example([2, (1, 3, 1), 1, (1, 2, 4)], Qwen3VLModel)
def test_images_stand_where_transformers_puts_them(parts: list[Any], model: Any) -> None:
    length, media = laid_out(parts)
    positions, delta = mrope_positions(length, media, MERGE)
    assert positions.dtype == np.int32
    assert positions.shape == (3, length)
    if length:
        want, want_delta = hf_index(model, length, media, 1)
        np.testing.assert_array_equal(positions, want)
        assert delta == want_delta


@settings(max_examples=60)
@given(st.data())
def test_videos_where_the_resume_rules_agree(data: st.DataObject) -> None:
    """transformers 5 goes on after max(h, w) whatever the last tick is; the rules are the same
    where that is the larger one."""
    interval = data.draw(st.sampled_from([0.35, 0.4, 0.5, 1.0, 1.5]))
    most = data.draw(side)
    steps = st.integers(1, max(1, int(most / (2 * interval))))
    parts = data.draw(prompts(st.tuples(steps, st.just(most), side)).filter(any))
    length, media = laid_out(parts)
    want, want_delta = hf_index(
        Qwen2_5_VLModel, length, media, 2, second_per_grid_ts=torch.full((len(media),), interval)
    )
    positions, delta = mrope_positions(length, media, MERGE, [2 * interval] * len(media))
    np.testing.assert_array_equal(positions, want)
    assert delta == want_delta


TABLE = {  # the cases of section 7: text before, merged grid, text after, interval -> rows, delta
    "image": (
        (5, (1, 2, 2), 3, 1.0),
        [[0, 1, 2, 3, 4, 5, 5, 5, 5, 7, 8, 9],
         [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 8, 9],
         [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]],
        -2,
    ),
    "oblong": (
        (3, (1, 2, 3), 5, 1.0),
        [[0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9, 10],
         [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10],
         [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10]],
        -3,
    ),
    "video": (
        (2, (3, 2, 2), 2, 1.0),
        [[0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 6],
         [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 5, 6],
         [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 5, 6]],
        -9,
    ),
    "ticks": (
        (2, (3, 2, 2), 2, 2.0),
        [[0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8],
         [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 7, 8],
         [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 7, 8]],
        -7,
    ),
    "slow": (
        (2, (3, 2, 2), 2, 0.4 * 2),
        [[0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 5],
         [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 4, 5],
         [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 4, 5]],
        -10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_worked_cases(name: str) -> None:
    (before, grid, after, interval), rows, delta = TABLE[name]
    length, media = laid_out([before, grid, after])
    for intervals in ([interval], []) if interval == 1.0 else ([interval],):
        got, got_delta = mrope_positions(length, media, MERGE, intervals)
        assert got.tolist() == rows
        assert got_delta == delta


def test_ticks_are_counted_in_float32() -> None:
    """Ten steps of 0.7 as float32 has it: 7 ticks, where float64 would count 6."""
    interval = float(torch.tensor(0.35)) * 2
    positions, _ = mrope_positions(11, [(0, (11, 2, 2))], MERGE, [interval])
    assert positions[0, 10] == 7 > int(10 * interval)
    seconds = torch.tensor([0.35])
    want, _ = hf_index(Qwen2_5_VLModel, 11, [(0, (11, 2, 2))], 2, second_per_grid_ts=seconds)
    assert (positions == want).all()


@given(prompts(st.tuples(st.integers(1, 3), side, side)))
def test_text_counts_up_alike_on_all_rows(parts: list[Any]) -> None:
    length, media = laid_out(parts)
    positions, delta = mrope_positions(length, media, MERGE)
    is_text = np.ones(length, bool)
    for offset, (t, h, w) in media:
        is_text[offset : offset + t * h * w // MERGE**2] = False
    texts = positions[:, is_text]
    assert (texts == texts[0]).all()
    assert (np.diff(texts[0]) > 0).all()
    assert positions.max(initial=-1) + 1 == length + delta
    if not media:
        assert (positions == np.arange(length)).all()
        assert delta == 0


@pytest.mark.parametrize(
    "media",
    [
        [(4, (1, 4, 4))],
        [(-1, (1, 2, 2))],
        [(2, (1, 4, 4)), (5, (1, 2, 2))],
        [(3, (1, 2, 2)), (0, (1, 2, 2))],
        [(3, (1, 1, 4))],
    ],
    ids=["beyond", "before", "overlap", "order", "nothing"],
)
def test_impossible_places_are_refused(media: list[Media]) -> None:
    with pytest.raises(ValueError, match=rf"item {len(media) - 1} takes tokens"):
        mrope_positions(7, media, MERGE)


def item(offset: int, grid: tuple[int, int, int]) -> Feature:
    """A merged grid, of 2 x 2 patches a token."""
    t, h, w = grid
    return Feature(
        modality="image",
        digest="d",
        identifier=f"{grid}",
        offset=offset,
        length=t * h * w,
        grid=(t, 2 * h, 2 * w),
    )


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (replace(item(0, (1, 2, 2)), grid=None), r"item 0 \(image\) needs a grid"),
        (
            replace(item(0, (1, 2, 2)), grid=(1, 4, 6)),
            r"\(1, 4, 6\) patches, 2 x 2.*its 4 embeddings",
        ),
        (replace(item(0, (1, 2, 2)), grid=(1, 1, 16)), "does not give"),
        (
            replace(item(0, (1, 1, 2)), length=3, is_embed=np.array([True, False, True])),
            "must stand side by side",
        ),
    ],
)
def test_grids_that_do_not_fit_are_refused(feature: Feature, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_grids([feature], 2, "r")
