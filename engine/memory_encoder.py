"""What encoding takes beside weights and outputs that are kept: measured on a GPU, else computed.

The largest step is meant: as many of the largest items as `max_encoder_tokens` admits.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from purestep.engine.config import Config
from purestep.engine.memory import itemsize_of
from purestep.engine.pool import tower_rows
from purestep.engine.upload import sent
from purestep.models.tower_rows import ItemAdapters
from purestep.models.vision import Tensors, Vision, VisionFamily, Words
from purestep.state.adapters import ROW_BLOCK
from purestep.state.errors import ConfigError


def encoder_peak_bytes(config: Config, vision: Vision, settings: Mapping[str, Any]) -> int:
    """Bytes of the largest step's encoding; `settings` are the image processor's.

    On a GPU the items, made of zeros, are encoded and the allocator counts. Raises ConfigError
    where they do not fit.
    """
    items = vision.family.heaviest(vision.config, settings, config.max_encoder_tokens)
    if torch.device(config.device).type == "cpu":
        return computed_bytes(vision.family, vision.config, items, itemsize_of(config.dtype))
    try:
        return measured_bytes(vision, items, config.device, largest_adapter(config, len(items)))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"max_encoder_tokens={config.max_encoder_tokens}: {len(items)} of the largest images "
            f"do not fit the memory of {config.device} beside the weights ({error}). Lower it or "
            "the image processor's largest size, or leave this out with skip_encoder_profile=True"
        ) from error


def most_embeds(family: VisionFamily, geometry: Any, settings: Mapping[str, Any]) -> int:
    """The embeddings of the largest item that an image processor makes with these settings."""
    ids, is_embed = family.placeholder(
        geometry, family.largest(geometry, settings), lambda text: ()
    )
    return len(ids) if is_embed is None else int(is_embed.sum())


def most_positions(
    family: VisionFamily, geometry: Any, settings: Mapping[str, Any], words: Words
) -> int:
    """The positions that the same item takes in a prompt of ids, texts around it included."""
    item = family.largest(geometry, settings)
    texts = sum(len(words(text)) for text in family.around(geometry, item) if text)
    return texts + len(family.placeholder(geometry, item, words)[0])


def tower_bytes(family: VisionFamily, geometry: Any, itemsize: int) -> int:
    """Of the checkpoint's tensors for tower and projector; every card holds them all."""
    return itemsize * sum(map(math.prod, family.shapes(geometry).values()))


def computed_bytes(
    family: VisionFamily, geometry: Any, items: Sequence[Tensors], itemsize: int
) -> int:
    """An upper estimate: pixels as they come, in float32, and stacked, and what a tower makes."""
    pixels = 8 * sum(x.numel() for item in items for x in item.values() if x.is_floating_point())
    return pixels + itemsize * sum(family.working(geometry, item) for item in items)


def largest_adapter(config: Config, num_items: int) -> ItemAdapters | None:
    """One adapter that takes all rows of a tower, for each item; None where there are no rows."""
    if not config.lora_tower:
        return None
    return ItemAdapters(
        rows=tower_rows(config),
        places=((0, tuple(range(config.lora_rows // ROW_BLOCK))),),
        slots=(0,) * num_items,
        send=partial(sent, device=config.device),
    )


@torch.inference_mode()
def measured_bytes(
    vision: Vision, items: Sequence[Tensors], device: str, adapters: ItemAdapters | None
) -> int:
    """By the allocator of a GPU, whose cache is emptied afterwards."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        vision.family.encode(vision.params, vision.config, items, adapters)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    finally:
        torch.cuda.empty_cache()
