"""M-RoPE positions: where the tokens of a prompt with media stand in time, height and width.

L tokens of a prompt.
"""

from collections.abc import Sequence

import numpy as np

from purestep.state.errors import RequestError
from purestep.state.media import Feature

Media = tuple[int, tuple[int, int, int]]  # offset of a placeholder, its grid of patches (t, h, w)


def mrope_positions(
    length: int, media: Sequence[Media], merge: int, intervals: Sequence[float] = ()
) -> tuple[np.ndarray, int]:
    """(positions int32 [3, L], delta) of a prompt of `length` tokens (multimodal.md, section 7).

    An item takes t * (h / merge) * (w / merge) tokens from its offset on. Text counts up on all
    three rows; an item starts at the next value s, its token (i, j, k) stands at
    (s + floor(i * interval), s + j, s + k), and text goes on after the largest value so far.
    `intervals` are ticks between an item's steps in time, one each item, 1.0 by default. Token x
    after the prompt stands at x + delta, on all three rows.

    Raises ValueError for items out of order, that overlap or reach beyond the prompt.
    """
    positions = np.empty((3, length), np.int32)
    done = following = 0  # tokens placed, and the next value
    for n, (offset, (t, h, w)) in enumerate(media):
        grid = t, h // merge, w // merge
        end = offset + grid[0] * grid[1] * grid[2]
        if not done <= offset < end <= length:
            raise ValueError(
                f"media item {n} takes tokens {offset} to {end}, which must be some of "
                f"{done} to {length}"
            )
        start = following + offset - done
        positions[:, done:offset] = np.arange(following, start)
        index = np.indices(grid).reshape(3, -1)
        if intervals:  # in float32, as transformers does: 10 * (0.35 * 2) is 7 there
            index[0] = (index[0].astype(np.float32) * np.float32(intervals[n])).astype(np.int64)
        positions[:, offset:end] = start + index
        done, following = end, start + int(index.max()) + 1
    positions[:, done:] = np.arange(following, following + length - done)
    return positions, following - done


def first_embed(feature: Feature) -> int:
    """The first position of a feature that takes an encoder row."""
    return feature.offset + (0 if feature.is_embed is None else int(feature.is_embed.argmax()))


def check_grids(features: Sequence[Feature], merge: int, who: str) -> None:
    """Raises RequestError, naming the item, where a grid is missing, does not give the item's
    number of embeddings, or where these do not stand side by side, in front of the next item's."""
    end = 0
    for i, feature in enumerate(features):
        if not feature.num_embeds:
            continue
        what, count = f"{who}: item {i} ({feature.modality})", feature.num_embeds
        if feature.grid is None:
            raise RequestError(f"{what} needs a grid: the model places media by it")
        t, h, w = feature.grid
        if h % merge or w % merge or t * h * w != count * merge**2:
            raise RequestError(
                f"{what}: a grid of {feature.grid} patches, {merge} x {merge} a token, does not "
                f"give its {count} embeddings"
            )
        first = first_embed(feature)
        inside = (
            feature.is_embed is None or feature.is_embed[first - feature.offset :][:count].all()
        )
        if not inside or first < end:
            raise RequestError(f"{what}: its embeddings must stand side by side, not among others")
        end = first + count
