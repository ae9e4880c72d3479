"""A checkpoint's own image processor, applied to one picture at a time.

transformers' AutoImageProcessor reads preprocessor_config.json. Its Pillow backend is used whether
or not torchvision is there, so that the pixels do not depend on what else is installed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from PIL import Image
from torch import Tensor

from purestep.state.errors import CheckpointError, MediaError
from purestep.state.hashing import framed
from purestep.state.sampling import is_int

FILES = ("preprocessor_config.json", "processor_config.json")  # AutoImageProcessor reads either
PIXELS = ("min_pixels", "max_pixels")  # of Qwen's processors: edges of `size`
SIZES = ("size", "crop_size", "pad_size")
ASKED = ("return_row_col_info",)  # Idefics3's tiles: how many rows and columns of them
OPTIONS = (
    *PIXELS,
    "crop_size",
    "do_center_crop",
    "do_image_splitting",
    "do_normalize",
    "do_pad",
    "do_rescale",
    "do_resize",
    "image_mean",
    "image_std",
    "pad_size",
    "resample",
    "rescale_factor",
    "size",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageProcessor:
    """A transformers image processor. Immutable; threads may share it."""

    call: Any  # (images=, return_tensors=, **options) -> mapping of tensors with a batch dimension
    identity: str  # digest of its class and settings
    options: tuple[str, ...]  # what a request may set
    asked: Mapping[str, Any]  # what every call says beside these

    @property
    def name(self) -> str:
        return type(self.call).__name__


def load_image_processor(folder: Path) -> ImageProcessor | None:
    """The image processor of a checkpoint folder, None where it has none. CheckpointError."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    from transformers import AutoImageProcessor  # here, since it takes seconds and text needs none

    try:
        call = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except Exception as error:  # as many kinds as there are files that may be missing or wrong
        raise CheckpointError(f"{folder}: the image processor cannot be loaded: {error}") from error
    return make_image_processor(call)


def make_image_processor(call: Any) -> ImageProcessor:
    """A processor for `make_program` from an object of one of transformers' own classes."""
    settings = json.dumps(call.to_dict(), sort_keys=True, default=str)
    parts = type(call).__name__.encode(), settings.encode()
    known = call.valid_kwargs.__annotations__
    return ImageProcessor(
        call=call,
        identity=blake3(framed("purestep/image-processor/1", *parts)).hexdigest(),
        options=tuple(name for name in OPTIONS if name in known),
        asked={name: True for name in ASKED if name in known},
    )


def checked_options(
    processor: ImageProcessor, options: Any, max_pixels: int, who: str
) -> dict[str, Any]:
    """Options for one picture, `min_pixels` and `max_pixels` written as edges of `size`.

    Raises MediaError naming the option, its value and what may be set, also for sizes of more than
    `max_pixels`. What else a value must be is
    said by the processor, when it is called.
    """
    if not isinstance(options, Mapping):
        raise MediaError(f"{who}: options={options!r} must be a mapping of processor options")
    if unknown := [name for name in options if name not in processor.options]:
        raise MediaError(
            f"{who}: {unknown[0]!r} is no option of {processor.name} that a request may set: "
            f"{', '.join(processor.options)} are"
        )
    for name in PIXELS:
        if name in options and not (is_int(options[name]) and options[name] > 0):
            raise MediaError(f"{who}: {name}={options[name]!r} must be an integer of at least 1")
    low, high = (options.get(name) for name in PIXELS)
    if low is not None and high is not None and low > high:
        raise MediaError(f"{who}: min_pixels={low} is more than max_pixels={high}")
    others = {name: value for name, value in options.items() if name not in PIXELS}
    edges = {"shortest_edge": low, "longest_edge": high}
    if given := {edge: value for edge, value in edges.items() if value is not None}:
        if "size" in others:
            raise MediaError(f"{who}: give size, or min_pixels and max_pixels, not both")
        others["size"] = dict(processor.call.size) | given
    for name in SIZES:
        _check_size(processor, name, others.get(name), max_pixels, who)
    return others


def _check_size(processor: ImageProcessor, name: str, size: Any, max_pixels: int, who: str) -> None:
    """Raises MediaError where a size may make more pixels of a picture than may be decoded."""
    edges = dict(size) if isinstance(size, Mapping) else {"height": size, "width": size}
    sides = [edges.get("height"), edges.get("width")]
    if PIXELS[0] in processor.options:  # these count pixels
        sides = [edges.get("shortest_edge"), 1] if "shortest_edge" in edges else sides
    elif "longest_edge" in edges:
        sides = [edges["longest_edge"]] * 2
    if all(map(is_int, sides)) and sides[0] * sides[1] > max_pixels:
        raise MediaError(
            f"{who}: {name}={size!r} asks for {sides[0] * sides[1]} pixels, more than "
            f"max_pixels={max_pixels}"
        )


def process(
    processor: ImageProcessor,
    pixels_HWC: np.ndarray,
    options: Mapping[str, Any],
    max_pixels: int,
    who: str,
) -> Mapping[str, Tensor]:
    """What the processor makes of one RGB picture, as a batch of one.

    Raises MediaError where the processor refuses the picture or an option, or would first resize it
    to more than `max_pixels`.
    """
    height, width = pixels_HWC.shape[:2]
    _check_resized(processor, height, width, options, max_pixels, who)
    picture = Image.fromarray(pixels_HWC)  # PIL, or thin arrays would be taken for other layouts
    try:
        return dict(
            processor.call(images=picture, return_tensors="pt", **processor.asked, **options)
        )
    except Exception as error:  # the processors check sizes and options in their own ways
        raise MediaError(
            f"{who}: {processor.name} refuses {width} x {height} pixels"
            f"{f' with {dict(options)}' if options else ''}: {error}"
        ) from error


def _check_resized(
    processor: ImageProcessor,
    height: int,
    width: int,
    options: Mapping[str, Any],
    max_pixels: int,
    who: str,
) -> None:
    """A processor that makes the shorter side a fixed length blows a thin picture up without bound
    before it crops: 1 x 100000 to 336 x 33600000."""
    size = options.get("size", processor.call.size)
    edges = {"shortest_edge": size} if is_int(size) else dict(size or {})
    edge, resizes = edges.get("shortest_edge"), options.get("do_resize", processor.call.do_resize)
    if not resizes or not is_int(edge) or len(edges) > 1:
        return
    resized = edge * math.ceil(edge * max(height, width) / min(height, width))
    if resized > max_pixels:
        raise MediaError(
            f"{who}: {width} x {height} pixels would be resized to {resized} pixels by "
            f"{processor.name}, more than max_pixels={max_pixels}"
        )
