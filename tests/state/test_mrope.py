"""M-RoPE positions: the worked table of spec/multimodal.md, section 7, and its laws."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from purestep.simulation.media import positions_alone
from purestep.state.errors import RequestError
from purestep.state.media import Feature, checked_features
from purestep.state.mrope import check_grids, mrope_positions
from purestep.state.request import Request


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


def test_an_image_between_texts() -> None:
    position_3P, delta = mrope_positions(12, [item(5, (1, 2, 2))], 2)
    assert position_3P[0].tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5, 7, 8, 9]
    assert position_3P[1].tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 8, 9]
    assert position_3P[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]
    assert delta == -2


def test_a_wide_image() -> None:
    position_3P, delta = mrope_positions(14, [item(3, (1, 2, 3))], 2)
    assert position_3P[0].tolist() == [0, 1, 2, *[3] * 6, 6, 7, 8, 9, 10]
    assert position_3P[1, 3:9].tolist() == [3, 3, 3, 4, 4, 4]
    assert position_3P[2, 3:9].tolist() == [3, 4, 5, 3, 4, 5]
    assert delta == -3


def test_frames() -> None:
    position_3P, delta = mrope_positions(16, [item(2, (3, 2, 2))], 2)
    assert position_3P[0].tolist() == [0, 1, *[2] * 4, *[3] * 4, *[4] * 4, 5, 6]
    assert position_3P[1, 2:14].tolist() == [2, 2, 3, 3] * 3
    assert position_3P[2, 2:14].tolist() == [2, 3, 2, 3] * 3
    assert delta == -9


@given(
    st.lists(st.tuples(st.integers(0, 3), *[st.integers(1, 3)] * 3), max_size=3), st.integers(0, 3)
)
def test_laws(shapes: list[tuple[int, int, int, int]], behind: int) -> None:
    """Against the rule written token by token; text counts on in all three rows."""
    features, at = [], 0
    for gap, *grid in shapes:
        features.append(item(at + gap, tuple(grid)))
        at = features[-1].end
    features = checked_features(features, at + behind, "r")
    check_grids(features, 2, "r")
    position_3P, delta = mrope_positions(at + behind, features, 2)
    assert position_3P.dtype == np.int32
    request = Request(id="r", tokens=[1] * (at + behind), features=features)
    want, want_delta = positions_alone(request, 2)
    assert (list(map(tuple, position_3P.T.tolist())), delta) == (want, want_delta)
    text = np.ones(at + behind, bool)
    for feature in features:
        text[feature.offset : feature.end] = False
    assert (position_3P[:, text] == position_3P[0, text]).all()
    assert (np.diff(position_3P[0, text]) > 0).all()
    if not features:
        assert (position_3P == np.arange(at + behind)).all()
        assert delta == 0


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
