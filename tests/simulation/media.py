"""Media stubs: pictures of a few sizes, whose "encoder" tells of each row whose it is and which.

An item of an event is `(picture, offset, spread, lead)`: its placeholder begins at `offset` with
`lead` places without a row, and has `spread` such places between any two rows.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from purestep.engine.config import Config
from purestep.state.media import Feature
from purestep.state.request import Request

SIZES = (1, 3, 4, 6, 9)  # embeddings of each picture
Item = tuple[int, int, int, int]


def with_media(config: Config, words: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
    """The words with these items, as far as each fits into the prompt and fills no place twice.
    Where media are placed by grids they neither overlap nor have gaps."""
    features: list[Feature] = []
    taken = {place for place, token in enumerate(words["tokens"]) if token == -1}
    for picture, offset, spread, lead in items:
        feature = toy_feature(picture, offset, *((0, 0) if config.mrope_merge else (spread, lead)))
        places = filled(feature)
        clear = range(feature.offset, feature.end) if config.mrope_merge else places
        if feature.end <= len(words["tokens"]) and taken.isdisjoint(clear):
            features.append(feature)
            taken.update(clear)
    return {**words, "features": tuple(features)}


def toy_feature(picture: int, offset: int, spread: int = 0, lead: int = 0) -> Feature:
    size = SIZES[picture]
    mask = np.zeros(lead + size + (size - 1) * spread, bool)
    mask[lead :: spread + 1] = True
    return Feature(
        modality="image",
        digest=f"pixels of {picture}",
        identifier=f"picture {picture}",
        offset=offset,
        length=len(mask),
        is_embed=mask if spread or lead else None,
        grid=(1, 2, 2 * size),
        data={"pixels": torch.tensor([picture])},
    )


def filled(feature: Feature) -> list[int]:
    """The positions of its embeddings, in order."""
    mask = feature.is_embed
    places = range(feature.length)
    return [feature.offset + k for k in places if mask is None or mask[k]]


def content(data: Mapping[str, torch.Tensor], reader: bytes) -> bytes:
    """What the toy's encoder makes of an item, with the adapter that it has as `reader`."""
    return blake3(data["pixels"].numpy().tobytes() + reader).digest(8)


def media_number(output: bytes, row: int) -> int:
    """What the toy reads in place of an id where an encoder's row stands; below -1."""
    return -2 - int.from_bytes(blake3(output + struct.pack("<q", row)).digest(4), "little")


def moved_number(token: int, place: int, position: tuple[int, int, int]) -> int:
    """What the toy reads where a token's position is not its place in the sequence; below -1."""
    if position == (place, place, place):
        return token
    return -2 - int.from_bytes(blake3(struct.pack("<4q", token, *position)).digest(4), "little")


def positions_alone(request: Request, merge: int) -> tuple[list[tuple[int, int, int]], int]:
    """The rule of M-RoPE, token by token: (positions of the prompt, what behind it is added)."""
    starts = {filled(f)[0]: f for f in request.features}
    found: list[tuple[int, int, int]] = []
    following = 0
    while len(found) < len(request.tokens):
        feature = starts.get(len(found))
        if feature is None:
            found.append((following, following, following))
            following += 1
            continue
        t, h, w = feature.grid[0], feature.grid[1] // merge, feature.grid[2] // merge
        for i in range(t * h * w):
            place = (i // (h * w), i // w % h, i % w)
            found.append(tuple(following + n for n in place))
        following += max(t, h, w)
    return found, following - len(found)


def too_large(config: Config, request: Request) -> bool:
    """Whether a request's items can never be encoded in one step, or computed in one where they
    may not be split: those that overlap count together."""
    spans = sorted((f.offset, f.end, f.identifier, len(filled(f))) for f in request.features)
    while spans:
        first, end, name, size = spans.pop(0)
        sizes = {name: size}
        while spans and spans[0][0] < end:
            _, other_end, name, size = spans.pop(0)
            end, sizes[name] = max(end, other_end), size
        chunk = config.long_prefill_threshold or config.max_batched_tokens
        longest = min(chunk, config.max_batched_tokens)
        if sum(sizes.values()) > config.max_encoder_tokens:
            return True
        if config.disable_chunked_mm_input and end - first > longest:
            return True
    return False


def facts(request: Request, end: int) -> tuple:
    """What a prefix of `end` tokens depends on beside what is read: whose placeholder is where, and
    the ids in it, which are keyed though an encoder's rows stand in their place. A mask that marks
    every place says what no mask says."""
    found = [
        (f.identifier, f.offset, f.length, () if _fills(f) else tuple(f.is_embed.tolist()))
        for f in request.features
        if f.offset < end and f.length
    ]
    places = sorted(place for f in request.features for place in filled(f) if place < end)
    return (*sorted(found), *(request.tokens[place] for place in places))


def _fills(feature: Feature) -> bool:
    return feature.is_embed is None or bool(feature.is_embed.all())
