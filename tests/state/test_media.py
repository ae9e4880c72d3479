"""Placeholders: the algebra of spec/multimodal.md, 2.1 and 8, and the keys of section 12."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from purestep.state.errors import RequestError
from purestep.state.media import (
    Feature,
    checked_features,
    embed_indices,
    embed_runs,
    extra_keys,
    features_in_window,
    gather_plan,
    last_embed_end,
    media_extras,
    outside_groups,
    overlap_groups,
    rows_in_window,
)


def item(name: str, offset: int, length: int, mask: str | None = None, **words: Any) -> Feature:
    is_embed = None if mask is None else np.array([c == "1" for c in mask], bool)
    return Feature(
        modality="image",
        digest=name,
        identifier=name,
        offset=offset,
        length=length,
        is_embed=is_embed,
        **words,
    )


MASKED = item("m", 2, 5, "01011")


def test_worked_table_of_masks() -> None:
    """2.1."""
    assert MASKED.num_embeds == 3
    spans = {(3, 5): (1, 3), (0, 5): (0, 3), (0, 1): (0, 0), (1, 3): (0, 1)}
    assert {span: embed_indices(MASKED, *span) for span in spans} == spans
    assert embed_runs(MASKED) == [(3, 3), (5, 6)]
    whole = item("w", 2, 5)
    assert (whole.num_embeds, embed_indices(whole, 3, 5)) == (5, (3, 5))
    assert embed_runs(whole) == [(2, 6)]
    empty = item("e", 2, 0, "")
    assert (empty.num_embeds, embed_runs(empty), last_embed_end([empty])) == (0, [], 0)


def test_worked_table_of_windows() -> None:
    """2.2: A[2,6) B[8,12) C[12,14)."""
    features = [item("A", 2, 4), item("B", 8, 4), item("C", 12, 2)]
    table = {
        (0, 2): "",
        (0, 3): "A",
        (5, 8): "A",
        (6, 8): "",
        (6, 9): "B",
        (11, 13): "BC",
        (14, 20): "",
    }
    for window, names in table.items():
        assert "".join("ABC"[i] for i in features_in_window(features, *window)) == names


def test_worked_table_of_merges() -> None:
    """8: a prompt of 12 with an item at 4, mask 011011, behind 3 tokens of another request."""
    feature = item("R", 4, 6, "011011")
    table = {(0, 7): (0, [8, 9]), (7, 5): (2, [4, 5])}
    for (start, count), (first, places) in table.items():
        ((_, row, index),) = gather_plan([feature], start, count, base=3)
        assert (row, index.tolist()) == (first, places)
    assert gather_plan([feature], 10, 2, base=3) == []


masks = st.lists(st.booleans(), max_size=9)
single = st.builds(
    lambda offset, mask, whole: replace(
        item("x", offset, len(mask)), is_embed=None if whole else np.array(mask, bool)
    ),
    st.integers(0, 6),
    masks,
    st.booleans(),
)


@given(single, st.data())
def test_invariants_of_the_algebra(feature: Feature, data: st.DataObject) -> None:
    """2.1, (a) to (d)."""
    n = feature.length
    mask = np.ones(n, bool) if feature.is_embed is None else feature.is_embed
    assert embed_indices(feature, 0, n) == (0, feature.num_embeds)
    s, m, e = sorted(data.draw(st.lists(st.integers(0, n), min_size=3, max_size=3)))
    left, right = embed_indices(feature, s, m), embed_indices(feature, m, e)
    assert embed_indices(feature, s, e) == (left[0], right[1])
    assert left[1] == right[0]
    assert right[1] - left[0] == mask[s:e].sum()
    runs = embed_runs(feature)
    marked = [p for first, last in runs for p in range(first, last + 1)]
    assert marked == (np.flatnonzero(mask) + feature.offset).tolist()
    assert all(a[1] + 1 < b[0] for a, b in pairwise(runs))
    a, b = sorted(data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=2)))
    low, high = (min(max(x - feature.offset, 0), n) for x in (a, b))
    assert rows_in_window(feature, a, b) == embed_indices(feature, low, high)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Feature, ...]:
    """Checked features of 24 tokens, which may overlap and be woven into one another."""
    free, found = set(range(24)), []
    for number in range(draw(st.integers(0, 4))):
        offset, length = draw(st.integers(0, 20)), draw(st.integers(0, 8))
        length = min(length, 24 - offset)
        marks = [draw(st.booleans()) and offset + k in free for k in range(length)]
        free -= {offset + k for k, marked in enumerate(marks) if marked}
        name = draw(st.sampled_from((f"same{sum(marks)}", f"own{number}")))
        mask = "".join("01"[m] for m in marks)
        found.append(item(name, offset, length, mask))
    return checked_features(found, 24, "r")


@given(layouts(), st.lists(st.integers(1, 7), min_size=24, max_size=24))
def test_chunks_gather_what_the_whole_does(features: tuple[Feature, ...], sizes: list[int]) -> None:
    """8: for every partition each position gets the same row of the same item, once."""

    def gathered(start: int, count: int) -> dict[int, tuple[int, int]]:
        rows = {}
        for i, first, places in gather_plan(features, start, count):
            for k, place in enumerate(places.tolist()):
                assert start + place not in rows
                rows[start + place] = (i, first + k)
        return rows

    at, parts = 0, {}
    for size in sizes:
        parts |= gathered(at, min(size, 24 - at))
        at = min(at + size, 24)
    assert parts == gathered(0, 24)
    assert len(parts) == sum(f.num_embeds for f in features)


@given(layouts())
def test_groups_are_what_overlaps(features: tuple[Feature, ...]) -> None:
    groups = overlap_groups(features)
    assert [i for group in groups for i in group] == [
        i for i, f in enumerate(features) if f.num_embeds
    ]
    spans = [(features[g[0]].offset, max(features[i].end for i in g)) for g in groups]
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for group in groups:
        for k in group[1:]:
            assert any(features[k].offset < features[i].end for i in group if i < k)
    for size in (1, 4, 5):
        for count in range(24 // size + 1):
            kept = outside_groups(features, count, size)
            assert all(not first < kept * size < last for first, last in spans)
            assert kept == count or any(first < count * size < last for first, last in spans)


# --- keys


def test_worked_keys() -> None:
    """12: a key tells of each item in its block, and where it begins, told from the block."""
    features = [item("A", 2, 4)]
    keys = media_extras(features, 12, 4)
    assert keys[2] == b""
    assert keys[0] == extra_keys([item("A", 2, 4)], 0, 4)
    assert keys[1] == extra_keys([item("A", 6, 4)], 8, 12) != keys[0]


def test_two_items_over_one_range_are_both_in_every_key() -> None:
    """W10: vLLM has the second in the last block alone. So the same video with other sound shares
    nothing from its beginning on."""
    video, sound = item("V", 2, 10, "1010101010"), item("S", 2, 10, "0101010101")
    other = replace(sound, identifier="T")
    for one, two in zip(
        media_extras([video, sound], 12, 4), media_extras([video, other], 12, 4), strict=True
    ):
        assert one != two


def test_items_that_come_later_are_in_the_keys() -> None:
    """W11: any block at any time, from scratch."""
    features = [item("A", 0, 4), item("B", 8, 4), item("C", 16, 4)]
    assert extra_keys(features, 8, 12) == extra_keys(features[1:2], 8, 12) != b""


def prefix(features: tuple[Feature, ...], end: int) -> list[tuple]:
    """All that 12 says two requests must have in common to share a block."""
    return sorted(
        (f.identifier, f.offset, f.length, b"" if f.is_embed is None else f.is_embed.tobytes())
        for f in features
        if f.length and f.offset < end
    )


@given(layouts(), layouts(), st.sampled_from((1, 4, 5)))
def test_keys_are_equal_if_and_only_if_the_items_are(
    one: tuple[Feature, ...], two: tuple[Feature, ...], size: int
) -> None:
    """12, for equal ids: also for two requests that differ in one item alone."""
    for other in (two, one[1:], tuple(replace(f, offset=f.offset) for f in reversed(one))):
        keys = media_extras(one, 24, size), media_extras(other, 24, size)
        for k in range(1, len(keys[0]) + 1):
            same = prefix(one, k * size) == prefix(other, k * size)
            assert (keys[0][:k] == keys[1][:k]) == same


@pytest.mark.parametrize(
    "change",
    [
        {"identifier": "B"},
        {"offset": 1},
        {"length": 7},
        {"is_embed": np.array([True, False, True, True, True, True])},
        {"grid": (1, 4, 6)},
        {"modality": "video"},
    ],
)
def test_whatever_differs_is_in_the_key(change: dict[str, Any]) -> None:
    """VA-07 too: a frame as an image and as a video."""
    feature = item("A", 0, 6, grid=(1, 2, 12))
    assert extra_keys([feature], 0, 4) != extra_keys([replace(feature, **change)], 0, 4)


# --- what submission refuses


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (5, "features must be a tuple"),
        (("A",), "item 0 must be a Feature"),
        ((item("", 0, 1),), "item 0: digest='' must be"),
        ((item("A", -1, 2),), "item 0: offset=-1"),
        ((item("A", 0, -2),), "length=-2"),
        ((item("A", 0, True),), "length=True"),
        ((item("A", 8, 3),), "item 0: its placeholder ends at 11, the prompt has 10 tokens"),
        ((item("A", 0, 3, "11"),), r"item 0: is_embed must be a bool array \[3\], got bool \(2,\)"),
        ((replace(item("A", 0, 2), is_embed=np.ones(2)),), "got float64"),
        ((item("A", 0, 3), item("B", 2, 3)), "items 0 and 1 both fill position 2"),
        ((item("A", 0, 3), item("A", 4, 2)), "item 1 has 2 embeddings, but another.*has 3"),
        ((item("A", 0, 3, grid=(1, 0, 2)),), r"grid=\(1, 0, 2\) must be at least 1"),
        ((item("A", 0, 3, grid=(1, 2)),), "three integers"),
    ],
)
def test_bad_features_are_refused_by_name(features: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked_features(features, 10, "request 'r'")


def test_features_are_sorted_and_their_masks_owned() -> None:
    mask = np.array([True, False, True])
    given = [item("B", 4, 2), replace(item("A", 0, 3), is_embed=mask), item("C", 4, 0)]
    checked = checked_features(given, 10, "r")
    assert [f.identifier for f in checked] == ["A", "B", "C"], "ties keep their order"
    mask[1] = True
    assert checked[0].is_embed.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="read-only"):
        checked[0].is_embed[0] = False
    assert checked_features([item("A", 0, 2, "11")], 10, "r")[0].is_embed is None
