"""Media in a prompt: where each item's placeholder stands, and whose encoder output fills it.

Positions are places in the prompt, rows those of an encoder output; spans are half open.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from purestep.state.errors import RequestError
from purestep.state.hashing import framed
from purestep.state.pytree import tree
from purestep.state.sampling import is_int, is_unicode

PART_MODALITIES = {  # what a message's part of each type shows; nobody guesses it from the name
    "image": "image",
    "image_url": "image",
    "image_embeds": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
MODALITIES = tuple(sorted(set(PART_MODALITIES.values())))


@tree
class Feature:
    """One media item of a prompt. Its placeholder takes `length` positions from `offset` on; those
    that `is_embed` marks (all of them for None) take the rows of its encoder output in order.

    `digest` names what the caller gave together with the processor's options, so it keys processed
    tensors; `identifier` names the encoder output, which depends on the tower's adapter too.
    """

    modality: str  # "image"
    digest: str  # blake3 hex
    identifier: str  # blake3 hex
    offset: int
    length: int
    is_embed: np.ndarray | None = None  # bool [length]
    grid: tuple[int, int, int] | None = None  # patches (t, h, w), for models that place by them
    data: Any = None  # processed tensors by name; None once submitted: the blob of `digest` then

    @property
    def end(self) -> int:
        """The position behind its placeholder."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Rows of its encoder output."""
        return self.length if self.is_embed is None else int(np.count_nonzero(self.is_embed))


def embed_indices(feature: Feature, start: int, end: int) -> tuple[int, int]:
    """The encoder rows that the placeholder's positions `start` to `end` take, counted from its
    offset: 0 <= start <= end <= length."""
    if feature.is_embed is None:
        return start, end
    first = int(np.count_nonzero(feature.is_embed[:start]))
    return first, first + int(np.count_nonzero(feature.is_embed[start:end]))


def embed_runs(feature: Feature) -> list[tuple[int, int]]:
    """First and last position of each maximal run of positions that take encoder rows."""
    if feature.is_embed is None:
        return [(feature.offset, feature.end - 1)] if feature.length else []
    edges = np.flatnonzero(np.diff(np.pad(feature.is_embed.astype(np.int8), 1)))
    firsts, ends = edges[::2] + feature.offset, edges[1::2] + feature.offset
    return [(first, end - 1) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]


def features_in_window(features: Sequence[Feature], start: int, end: int) -> list[int]:
    """Which of the features have a position in `start` to `end`."""
    return [i for i, f in enumerate(features) if max(f.offset, start) < min(f.end, end)]


def rows_in_window(feature: Feature, start: int, end: int) -> tuple[int, int]:
    """The encoder rows that positions `start` to `end` of the prompt take of this feature; two
    equal numbers where they take none."""
    low = min(max(start - feature.offset, 0), feature.length)
    high = max(min(end - feature.offset, feature.length), low)
    return embed_indices(feature, low, high)


def gather_plan(
    features: Sequence[Feature], start: int, count: int, base: int = 0
) -> list[tuple[int, int, np.ndarray]]:
    """(feature, its first encoder row, int32 places) for each that has rows among `count` tokens
    from `start` on, where these stand at `base` of a batch. Each feature's rows go to its own
    places, whatever other features lie among them."""
    found = []
    for i in features_in_window(features, start, start + count):
        feature = features[i]
        low = max(start - feature.offset, 0)
        high = min(start + count - feature.offset, feature.length)
        places = np.arange(low, high)
        if feature.is_embed is not None:
            places = places[feature.is_embed[low:high]]
        if len(places):
            place_E = (places + feature.offset - start + base).astype(np.int32)
            place_E.setflags(write=False)
            found.append((i, embed_indices(feature, low, high)[0], place_E))
    return found


def overlap_groups(features: Sequence[Feature]) -> list[list[int]]:
    """Features of sorted offsets, those whose placeholders overlap together: a step that needs one
    of a group needs all of it. Features without encoder rows are in none."""
    groups: list[list[int]] = []
    end = 0
    for i, feature in enumerate(features):
        if not feature.num_embeds:
            continue
        if groups and feature.offset < end:
            groups[-1].append(i)
        else:
            groups.append([i])
        end = max(end, feature.end) if len(groups[-1]) > 1 else feature.end
    return groups


def outside_groups(features: Sequence[Feature], num_blocks: int, block_size: int) -> int:
    """How many of a prompt's first `num_blocks` blocks do not end within a group."""
    for group in reversed(overlap_groups(features)):
        first, last = features[group[0]].offset, max(features[i].end for i in group)
        if first < num_blocks * block_size < last:
            num_blocks = first // block_size
    return num_blocks


def group_embeds(features: Sequence[Feature], group: Sequence[int]) -> int:
    """Rows of a group's encoder outputs, each output counted once."""
    return sum({features[i].identifier: features[i].num_embeds for i in group}.values())


def last_embed_end(features: Sequence[Feature]) -> int:
    """The position behind the last that takes an encoder row; 0 where none does."""
    return max((embed_runs(f)[-1][1] + 1 for f in features if f.num_embeds), default=0)


def extra_keys(features: Sequence[Feature], start: int, end: int) -> bytes:
    """What names the media in a block of positions `start` to `end`: of every feature with a
    position there, in whatever order they are given, all that the block's keys and values depend
    on, its place told from the block's start."""
    found = sorted(
        (f.offset - start, f.length, _feature_key(f))
        for f in (features[i] for i in features_in_window(features, start, end))
    )
    return b"".join(
        framed("media", offset.to_bytes(8, "little", signed=True), length.to_bytes(8, "little"), k)
        for offset, length, k in found
    )


def _feature_key(feature: Feature) -> bytes:
    mask = b"" if feature.is_embed is None else feature.is_embed.tobytes()
    grid = b"".join(n.to_bytes(8, "little") for n in feature.grid or ())
    return framed(feature.modality, feature.identifier.encode(), mask, grid)


def media_extras(features: Sequence[Feature], num_tokens: int, block_size: int) -> list[bytes]:
    """`extra_keys` of each block of a prompt, a partial last one included."""
    return [
        extra_keys(features, start, min(start + block_size, num_tokens))
        for start in range(0, num_tokens, block_size)
    ]


def checked_features(features: Any, num_tokens: int, who: str) -> tuple[Feature, ...]:
    """The features by offset (ties keep their order), in plain Python values and read-only masks.

    Raises RequestError naming the item, its value and the limit: no Feature, a placeholder that is
    not within the prompt, a mask of another length or dtype, two items that fill one position, one
    identifier with two sizes.
    """
    if not isinstance(features, tuple | list):
        raise RequestError(f"{who}: features must be a tuple of Feature, got {type(features)}")
    checked = [_checked_feature(f, num_tokens, f"{who}: item {i}") for i, f in enumerate(features)]
    order = sorted(range(len(checked)), key=lambda i: checked[i].offset)
    filled = np.full(num_tokens if checked else 0, -1)
    sizes: dict[str, int] = {}
    for i in order:
        feature = checked[i]
        for first, last in embed_runs(feature):
            span = filled[first : last + 1]
            if (span >= 0).any():
                place = first + int(np.flatnonzero(span >= 0)[0])
                raise RequestError(
                    f"{who}: items {filled[place]} and {i} both fill position {place}"
                )
            span[:] = i
        known = sizes.setdefault(feature.identifier, feature.num_embeds)
        if known != feature.num_embeds:
            raise RequestError(
                f"{who}: item {i} has {feature.num_embeds} embeddings, but another of its "
                f"identifier {feature.identifier!r} has {known}"
            )
    return tuple(checked[i] for i in order)


def _checked_feature(feature: Any, num_tokens: int, who: str) -> Feature:
    if not isinstance(feature, Feature):
        raise RequestError(f"{who} must be a Feature, got {type(feature)}")
    for name in ("modality", "digest", "identifier"):
        value = getattr(feature, name)
        if not isinstance(value, str) or not value or not is_unicode(value):
            raise RequestError(f"{who}: {name}={value!r} must be a non-empty string of Unicode")
    offset, length = feature.offset, feature.length
    if not (is_int(offset) and is_int(length)) or offset < 0 or length < 0:
        raise RequestError(f"{who}: offset={offset!r}, length={length!r} must be integers from 0")
    if offset + length > num_tokens:
        raise RequestError(
            f"{who}: its placeholder ends at {offset + length}, the prompt has {num_tokens} tokens"
        )
    return replace(
        feature,
        offset=int(offset),
        length=int(length),
        is_embed=_checked_mask(feature.is_embed, int(length), who),
        grid=_checked_grid(feature.grid, who),
    )


def _checked_mask(mask: Any, length: int, who: str) -> np.ndarray | None:
    """The mask; None where it marks every position, so that equal placeholders have equal keys."""
    if mask is None:
        return None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (length,):
        found = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask)
        raise RequestError(f"{who}: is_embed must be a bool array [{length}], got {found}")
    if mask.all():
        return None
    mask = mask.copy()
    mask.setflags(write=False)
    return mask


def _checked_grid(grid: Any, who: str) -> tuple[int, int, int] | None:
    if grid is None:
        return None
    if not isinstance(grid, tuple | list) or len(grid) != 3 or not all(map(is_int, grid)):
        raise RequestError(f"{who}: grid={grid!r} must be three integers (t, h, w) or None")
    if min(grid) < 1:
        raise RequestError(f"{who}: grid={grid!r} must be at least 1 in each direction")
    t, h, w = (int(n) for n in grid)
    return t, h, w
