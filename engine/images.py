"""The images of one prompt: what the caller gave, and the tensors and placeholders they become.

E encoder rows of an item, D their width, n positions of a placeholder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from immutables import Map
from torch import Tensor

from purestep.engine.embeds import checked_rows
from purestep.engine.image_processor import checked_options, process
from purestep.engine.pictures import decode_picture, encoded_bytes, is_encoded, read_picture
from purestep.models.vision import Words, marker_ids
from purestep.state.errors import ConfigError, MediaError, RequestError
from purestep.state.identity import alias, content_digest, identifier
from purestep.state.media import PART_MODALITIES, Feature
from purestep.state.processor_cache import Processed, ProcessorCache, find, remember
from purestep.state.sampling import is_int, is_list

if TYPE_CHECKING:
    from purestep.engine.program import Program

IMAGE_PARTS = {  # by the part's type, which is also the key of what it shows: the other keys
    "image": ("id", "layout", "options"),
    "image_url": ("id", "options"),
    "image_embeds": ("grid",),
}
OTHER_MEDIA = tuple(kind for kind in PART_MODALITIES if kind not in IMAGE_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """One image as the caller gave it: a picture, the `id` of one that was given before (or both),
    or its embeddings."""

    picture: Any = None
    id: str | None = None
    layout: str | None = None  # of an array whose shape does not say
    options: Mapping[str, Any] = field(default_factory=dict)  # the image processor's
    embeds: Any = None  # [E, D]
    grid: Any = None  # (t, h, w) of embeddings, for models that place by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One image that is ready: what stands in its marker's place, and what fills it."""

    digest: str
    ids: np.ndarray  # int32 [n]
    is_embed: np.ndarray | None  # bool [n]
    grid: tuple[int, int, int] | None
    data: dict[str, Tensor]  # as `VisionFamily.encode` takes it; {"embeds": [E, D]} needs none
    around: tuple[str, str] = ("", "")  # texts that the prompt has beside it


def image_part(given: Any, who: str) -> ImagePart:
    """A chat message's part of one of the types IMAGE_PARTS, or anything `read_picture` takes.

    Raises MediaError for unknown keys and for a part without what it is to show.
    """
    if not isinstance(given, Mapping):
        return ImagePart(picture=given)
    kind = given.get("type")
    if kind not in IMAGE_PARTS:
        raise MediaError(f"{who}: type={kind!r} is none of {', '.join(IMAGE_PARTS)}")
    keys = kind, *IMAGE_PARTS[kind]
    if unknown := [key for key in given if key not in ("type", *keys)]:
        raise MediaError(f"{who}: {unknown[0]!r} is no key of an {kind} part: {', '.join(keys)}")
    name, shown = given.get("id"), given.get(kind)
    if name is not None and not (isinstance(name, str) and name):
        raise MediaError(f"{who}: id={name!r} must be a non-empty string")
    if shown is None and name is None:
        raise MediaError(f"{who}: the part has no {kind!r}")
    if kind == "image_embeds":
        return ImagePart(embeds=shown, grid=given.get("grid"))
    if kind == "image_url" and shown is not None:
        shown = _data_url(shown, who)
    options = given.get("options", {})
    if not isinstance(options, Mapping):
        raise MediaError(f"{who}: options={options!r} must be a mapping of processor options")
    return ImagePart(picture=shown, id=name, layout=given.get("layout"), options=options)


def _data_url(shown: Any, who: str) -> str:
    if isinstance(shown, Mapping):
        others = {key: value for key, value in shown.items() if key != "url"}
        if others and others != {"detail": "auto"}:
            raise MediaError(f"{who}: image_url has {others}, but only its url is heeded")
        shown = shown.get("url")
    if not isinstance(shown, str) or not shown[:5].lower() == "data:":
        raise MediaError(
            f"{who}: image_url must be a data: URL, got {str(shown)[:40]!r}: nothing is fetched, "
            "and a file is given by its path in an image part"
        )
    return shown


def check_image_count(program: "Program", count: int, who: str) -> None:
    """Raises MediaError for more images than one prompt may have."""
    limit = program.config.image_limit
    if count > limit:
        why = "" if program.vision else " (it is a model of text, or was loaded without its tower)"
        raise MediaError(
            f"{who}: {count} images are given, but this program takes {limit} in one prompt: "
            f"image_limit={limit}{why}"
        )


def take_images(
    program: "Program",
    cache: ProcessorCache,
    parts: Sequence[ImagePart],
    *,
    salt: str | None,
    options: Mapping[str, Any],
    who: str,
) -> tuple[ProcessorCache, list[Item]]:
    """The items of a prompt, in order; pictures that neither the cache nor an earlier part of the
    prompt knows are processed, each alone.

    `options` are the image processor's for all pictures; a part's own go before them. Raises
    MediaError naming the image by its place in the prompt, from 1, and ConfigError where the
    program has no image processor.
    """
    if not isinstance(options, Mapping):
        raise MediaError(f"{who}: image_options={options!r} must be a mapping of processor options")
    known: dict[str, Processed] = {}
    used, items, num_processed = [], [], 0
    for number, part in enumerate(parts, 1):
        name = f"{who}: image {number} of {len(parts)}"
        if part.embeds is not None:
            items.append(_embedded(program, part, name))
            continue
        found, processed = _lookup(program, cache, known, part, salt, options, name)
        known |= dict.fromkeys((found.digest, *found.aliases), found)
        used.append(found)
        num_processed += processed
        items.append(_item(program, found))
    if not used:
        return cache, items
    return remember(cache, used, len(used) - num_processed, num_processed), items


def _lookup(
    program: "Program",
    cache: ProcessorCache,
    known: Mapping[str, Processed],
    part: ImagePart,
    salt: str | None,
    options: Mapping[str, Any],
    who: str,
) -> tuple[Processed, bool]:
    """The tensors of one picture, with the aliases it was found or is to be found by, and whether
    they had to be computed."""
    processor, reading = program.image_processor, program.pictures
    if processor is None:
        raise ConfigError("the program has no image processor: load_program reads the checkpoint's")
    chosen = checked_options(processor, {**options, **part.options}, reading.max_pixels, who)
    maker = f"{processor.identity}/{program.vision.config!r}"
    made = {"processor": chosen, "reading": asdict(reading)}

    def seen(name: str) -> Processed | None:
        return known.get(name) or find(cache, name)

    names, named = [], None
    if part.id is not None:
        names.append(alias("id", salt, part.id, maker, made))
        named = seen(names[0])
        if part.picture is None and named is None:
            raise MediaError(
                f"{who}: no picture is given, and the processor cache knows none by id={part.id!r} "
                f"with salt={salt!r} and these options"
            )
        if part.picture is None:
            return named, False
    pixels_HWC = None
    if is_encoded(part.picture) and part.layout is None:
        raw = encoded_bytes(part.picture, who)
        names.append(alias("file", None, raw, maker, made))
        found = seen(names[-1])
        if found is None:
            pixels_HWC = decode_picture(raw, reading, who)
    else:
        found = None
        pixels_HWC = read_picture(part.picture, reading, layout=part.layout, who=who)
    if found is None:
        digest = content_digest(pixels_HWC, maker, chosen, algorithm=reading.hash)
        found = seen(digest)
    if named is not None and (found is None or found.digest != named.digest):
        raise MediaError(f"{who}: id={part.id!r} stands for another picture in the processor cache")
    if found is not None:
        return replace(found, aliases=tuple(dict.fromkeys((*found.aliases, *names)))), False
    made_of = process(processor, pixels_HWC, chosen, reading.max_pixels, who)
    try:
        tensors = program.vision.family.item(program.vision.config, made_of)
    except RequestError as error:
        raise MediaError(f"{who}: {error}") from error
    owned = Map({key: x.clone(memory_format=torch.contiguous_format) for key, x in tensors.items()})
    return Processed(digest=digest, tensors=owned, aliases=tuple(names)), True


def _item(program: "Program", found: Processed) -> Item:
    family, config, tensors = program.vision.family, program.vision.config, dict(found.tensors)
    ids, is_embed = family.placeholder(config, tensors, words_of(program.tokenizer))
    return Item(
        digest=found.digest,
        ids=ids,
        is_embed=is_embed,
        grid=family.grid(config, tensors),
        around=family.around(config, tensors),
        data=tensors,
    )


def with_texts(program: "Program", items: Sequence[Item]) -> list[Item]:
    """The items with the texts around them as ids of their own, within their placeholders."""
    words, found = words_of(program.tokenizer), []
    for item in items:
        before, behind = (np.array(words(text) if text else [], np.int32) for text in item.around)
        inside = np.ones(len(item.ids), bool) if item.is_embed is None else item.is_embed
        mask = np.pad(inside, (len(before), len(behind)))
        ids = np.concatenate((before, item.ids, behind))
        found.append(replace(item, ids=ids, is_embed=mask, around=("", "")))
    return found


def words_of(tokenizer: Any) -> Words:
    """The ids of a text by a tokenizer. ConfigError, once asked, where there is none."""

    def words(text: str) -> list[int]:
        if tokenizer is None:
            raise ConfigError(
                f"the program has no tokenizer, but a picture's place has {text!r} in it"
            )
        return tokenizer.encode(text, add_special_tokens=False)

    return words


def _embedded(program: "Program", part: ImagePart, who: str) -> Item:
    """An item that needs no encoder: every position of its placeholder takes a row."""
    try:
        width = program.config.encoder_width
        rows_ED = checked_rows(program.config, part.embeds, width, f"{who}: image_embeds")
    except RequestError as error:
        raise MediaError(str(error)) from None
    grid = _grid_of_embeds(program, part.grid, len(rows_ED), who)
    return Item(
        digest=content_digest(rows_ED, "embeddings", {"grid": grid}),
        ids=marker_ids(program.vision.family.marker(program.vision.config), len(rows_ED)),
        is_embed=None,
        grid=grid,
        data={"embeds": rows_ED},
    )


def _grid_of_embeds(
    program: "Program", grid: Any, num_rows: int, who: str
) -> tuple[int, int, int] | None:
    """The patches (t, h, w) behind embeddings, where the model places them by that."""
    if not program.config.model.rope.sections:
        if grid is not None:
            raise MediaError(f"{who}: grid={grid!r}, but this model does not place by a grid")
        return None
    if not (is_list(grid) and len(grid) == 3 and all(is_int(n) and n > 0 for n in grid)):
        raise MediaError(
            f"{who}: grid={grid!r} must be three positive integers, the patches (t, h, w) behind "
            "the embeddings, by which this model places them"
        )
    t, h, w = map(int, grid)
    merge = program.vision.config.merge_size
    if h % merge or w % merge or t * h * w != num_rows * merge**2:
        raise MediaError(
            f"{who}: grid={(t, h, w)} does not make {num_rows} rows of {merge} x {merge} patches"
        )
    return t, h, w


def check_places(tokens: Sequence[int], marker: int, count: int, who: str) -> None:
    """Raises MediaError unless the prompt has a marker for each of `count` images."""
    places = sum(1 for token in tokens if token == marker)
    if places != count:
        raise MediaError(
            f"{who}: the prompt has {places} places for an image (id {marker}), but "
            f"{count} images are given"
        )


def place(
    tokens: Sequence[int], marker: int, items: Sequence[Item]
) -> tuple[list[int], tuple[Feature, ...]]:
    """The tokens with each item's placeholder instead of its marker, in order, and where they are.
    There is a marker for each item (`check_places`)."""
    tokens = np.asarray(tokens, dtype=np.int64)
    places = np.flatnonzero(tokens == marker)
    pieces, features, offset, done = [], [], 0, 0
    for at, item in zip(places.tolist(), items, strict=True):
        offset += at - done
        pieces += [tokens[done:at], item.ids]
        features.append(
            Feature(
                modality="image",
                digest=item.digest,
                identifier=identifier(item.digest),
                offset=offset,
                length=len(item.ids),
                is_embed=item.is_embed,
                grid=item.grid,
                data=item.data,
            )
        )
        offset, done = offset + len(item.ids), at + 1
    return np.concatenate([*pieces, tokens[done:]]).tolist(), tuple(features)
