"""Positions of three numbers (T, H, W) for models that place media by a grid: M-RoPE.

P prompt tokens. Text counts all three on together; the merged grid of an item gives each of its
tokens (frame, row, column), counted from where the text before it ended.
"""

from collections.abc import Sequence

import numpy as np

from purestep.state.errors import RequestError
from purestep.state.media import Feature


def mrope_positions(
    num_tokens: int, features: Sequence[Feature], merge: int
) -> tuple[np.ndarray, int]:
    """(int32 [3, P], delta): the rule of Qwen2-VL. A token at x >= P stands at x + delta in all
    three. `features` are checked, by `check_grids` too; `merge` patches a side become one token.

    Text behind an item goes on behind its largest coordinate (for videos longer than their
    frames are wide transformers 5 goes on earlier, and lets positions overlap).
    """
    position_3P = np.empty((3, num_tokens), np.int32)
    done, following = 0, 0  # tokens placed, the next position of text
    for feature in features:
        if not feature.num_embeds:
            continue
        first, text = _first(feature), _first(feature) - done
        position_3P[:, done:first] = following + np.arange(text)
        start = following + text
        t, h, w = _merged(feature, merge)
        done = first + t * h * w
        position_3P[:, first:done] = start + np.indices((t, h, w)).reshape(3, -1)
        following = start + max(t, h, w)
    position_3P[:, done:] = following + np.arange(num_tokens - done)
    position_3P.setflags(write=False)
    return position_3P, following - done


def _first(feature: Feature) -> int:
    """The first position that takes an encoder row."""
    return feature.offset + (0 if feature.is_embed is None else int(feature.is_embed.argmax()))


def _merged(feature: Feature, merge: int) -> tuple[int, int, int]:
    t, h, w = feature.grid or (0, 0, 0)
    return t, h // merge, w // merge


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
        first = _first(feature)
        inside = (
            feature.is_embed is None or feature.is_embed[first - feature.offset :][:count].all()
        )
        if not inside or first < end:
            raise RequestError(f"{what}: its embeddings must stand side by side, not among others")
        end = first + count
