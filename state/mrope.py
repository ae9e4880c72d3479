"""M-RoPE positions: where the tokens of a prompt with media stand in time, height and width.

L tokens of a prompt.
"""

from collections.abc import Sequence

import numpy as np

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
