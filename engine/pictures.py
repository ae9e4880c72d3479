"""Pictures as people have them, and the one form in which they are processed.

Every door ends in the same array: RGB, uint8, [H, W, 3]. On the way

* a file's EXIF orientation is applied (a broken EXIF block is ignored),
* transparency is composited on `PictureOptions.background`, whatever kind it is: an alpha channel,
  premultiplied alpha, a palette's or a colour key,
* 16 bits keep their upper 8, as Pillow reads 16-bit colour; floats run from 0 to 1 and are rounded,
* an animated file gives its first frame, a PIL image the frame at which it stands,
* CMYK, YCbCr, HSV and LAB are converted; colour profiles are not applied.

H height, W width, C channels: 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA.
"""

import base64
import binascii
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import torch
from PIL import Image, ImageCms
from torch import Tensor

from purestep.state.errors import ConfigError, MediaError
from purestep.state.identity import DEFAULT_HASH, HASHES
from purestep.state.sampling import is_int

# Raster formats that Pillow decodes by itself (EPS would start Ghostscript) and refuses when cut
# short (JPEG 2000 gives another picture).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "QOI", "TIFF", "WEBP")
CHANNELS = (1, 2, 3, 4)
LAYOUTS = ("HWC", "CHW", "HW")
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureOptions:
    """How pictures are read and named. `max_pixels` is the largest H x W that is decoded or resized
    to; a file's header tells it before anything is decoded."""

    max_pixels: int = 89_478_485  # where Pillow begins to warn of decompression bombs
    background: tuple[int, int, int] = (255, 255, 255)  # behind transparency: RGB, 0..255
    orient: bool = True  # apply EXIF orientation; Pillow itself always does so for TIFF
    hash: str = DEFAULT_HASH  # one of state/identity.py: HASHES


def check_picture_options(options: PictureOptions) -> PictureOptions:
    """The options themselves. Raises ConfigError naming the option and what it may be."""
    if not is_int(options.max_pixels) or options.max_pixels < 1:
        raise ConfigError(f"max_pixels={options.max_pixels!r} must be an integer of at least 1")
    colour = options.background
    if not (
        isinstance(colour, tuple)
        and len(colour) == 3
        and all(is_int(c) and 0 <= c <= 255 for c in colour)
    ):
        raise ConfigError(f"background={colour!r} must be a tuple of three integers in 0..255")
    if not isinstance(options.orient, bool):
        raise ConfigError(f"orient={options.orient!r} must be True or False")
    if options.hash not in HASHES:
        raise ConfigError(f"hash={options.hash!r} must be one of {', '.join(HASHES)}")
    return options


def read_picture(
    source: Any,
    options: PictureOptions = PictureOptions(),
    *,
    layout: str | None = None,
    who: str = "picture",
) -> np.ndarray:
    """`source` as a read-only uint8 array [H, W, 3].

    A PIL image; an array or tensor; the bytes of an image file; its path; a `data:` URL. Arrays are
    bool, uint8, uint16 or floats in 0..1, [H, W] or with channels first or last; where the shape
    allows both, `layout` ("HWC", "CHW" or "HW") has to say which. Nothing is ever downloaded.

    Raises MediaError that begins with `who` for what cannot be read, is empty, is too large, or is
    ambiguous.
    """
    if is_encoded(source):
        if layout is not None:
            raise MediaError(f"{who}: layout={layout!r} is for arrays, this is an image file")
        return decode_picture(encoded_bytes(source, who), options, who)
    if isinstance(source, Image.Image):
        if layout is not None:
            raise MediaError(f"{who}: layout={layout!r} is for arrays, this is a PIL image")
        return _rgb(source, options, who)
    if isinstance(source, np.ndarray | Tensor):
        return _rgb(_image_of_array(_as_array(source, who), layout, options, who), options, who)
    raise MediaError(
        f"{who}: a picture is a PIL image, an array, a tensor, bytes, a path or a data: URL, "
        f"not {type(source).__name__}"
    )


def is_encoded(source: Any) -> bool:
    """Whether `source` is, or leads to, the bytes of an image file."""
    return isinstance(source, bytes | bytearray | memoryview | str | os.PathLike)


def encoded_bytes(source: Any, who: str) -> bytes:
    """The bytes of the image file that `source` is or leads to. Raises MediaError."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    text = os.fspath(source) if isinstance(source, os.PathLike) else source
    if isinstance(text, str) and text[:5].lower() == "data:":
        return _data_url(text, who)
    if isinstance(text, str) and "://" in text[:16]:
        raise MediaError(f"{who}: {_short(text)} is not fetched: give bytes, a path or a data: URL")
    try:
        return Path(text).read_bytes()
    except (OSError, TypeError, ValueError) as error:  # ValueError: an embedded null byte
        reason = getattr(error, "strerror", None) or error
        raise MediaError(f"{who}: cannot read the file {_short(text)}: {reason}") from None


def decode_picture(raw: bytes, options: PictureOptions, who: str) -> np.ndarray:
    """The picture in an image file's bytes, as `read_picture` gives it. Raises MediaError."""
    if not raw:
        raise MediaError(f"{who}: the image file is empty (0 bytes)")
    Image.init()  # or the names of some formats are not known yet
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(raw), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaError(f"{who}: max_pixels={options.max_pixels}: {error}") from None
    except Exception as error:  # a plugin may raise anything on bytes it does not understand
        raise MediaError(
            f"{who}: {len(raw)} bytes that begin with {raw[:12]!r} are no image file that can be "
            f"read ({', '.join(formats)}): {type(error).__name__}"
        ) from None
    return _rgb(image, options, who)


def _data_url(url: str, who: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise MediaError(f"{who}: {_short(url)} is no data: URL, it has no comma")
    raw = unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return raw
    try:
        return base64.b64decode(raw, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{who}: the base64 of {_short(url)} is broken: {error}") from None


def _as_array(source: np.ndarray | Tensor, who: str) -> np.ndarray:
    if isinstance(source, np.ndarray):
        return source
    if source.layout != torch.strided or source.is_nested or source.is_meta:
        kind = "meta" if source.is_meta else "nested" if source.is_nested else source.layout
        raise MediaError(f"{who}: a picture must be a dense tensor, this one is {kind}")
    tensor = source.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _image_of_array(
    array: np.ndarray, layout: str | None, options: PictureOptions, who: str
) -> Image.Image:
    what = f"an array of shape {array.shape} and {array.dtype}"
    if layout is not None and layout not in LAYOUTS:
        raise MediaError(f"{who}: layout={layout!r} must be one of {', '.join(LAYOUTS)}")
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise MediaError(f"{who}: {what} is no picture: [H, W], [H, W, C] or [C, H, W] is")
    fits = _layouts(array.shape)
    if layout is None and len(fits) > 1:
        raise MediaError(f"{who}: {what} may be {' or '.join(fits)}: say layout={fits[0]!r}")
    if not fits or layout not in (None, *fits):
        raise MediaError(
            f"{who}: {what} is not {layout or 'a picture'}: channels must be one of {CHANNELS}"
        )
    array_HWC = np.moveaxis(array, 0, -1) if (layout or fits[0]) == "CHW" else array
    _check_size(array_HWC.shape[1], array_HWC.shape[0], options, who)
    array_HWC = _to_uint8(array_HWC, what, who)
    if array_HWC.ndim == 3 and array_HWC.shape[2] == 1:
        array_HWC = array_HWC[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array_HWC))


def _layouts(shape: tuple[int, ...]) -> list[str]:
    if len(shape) == 2:
        return ["HW"]
    places = {"HWC": shape[-1], "CHW": shape[0]}
    return [name for name, channels in places.items() if channels in CHANNELS]


def _to_uint8(array: np.ndarray, what: str, who: str) -> np.ndarray:
    kind = array.dtype.kind
    if array.dtype == np.uint8:
        return array
    if kind == "b":
        return array.astype(np.uint8) * 255
    if kind == "u" and array.dtype.itemsize == 2:
        return (array >> 8).astype(np.uint8)
    if kind != "f":
        raise MediaError(f"{who}: {what} has no known range: use uint8, uint16 or floats in 0..1")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # also where one is NaN
        raise MediaError(f"{who}: {what} holds {low}..{high}, floats must lie in 0..1")
    return np.rint(array.astype(np.float64) * 255).astype(np.uint8)


def _rgb(image: Image.Image, options: PictureOptions, who: str) -> np.ndarray:
    """The pixels, read-only. The size is checked before they are decoded."""
    _check_size(*image.size, options, who)
    try:
        image.load()
        pixels = np.array(_converted(_oriented(image) if options.orient else image, options, who))
    except MediaError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and many others
        kind = image.format or f"PIL image of mode {image.mode}"
        raise MediaError(f"{who}: the {kind} cannot be decoded: {error}") from None
    pixels.setflags(write=False)
    return pixels


def _check_size(width: int, height: int, options: PictureOptions, who: str) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"{who}: the picture is empty ({width} x {height} pixels)")
    if width * height > options.max_pixels:
        raise MediaError(
            f"{who}: {width} x {height} = {width * height} pixels are more than "
            f"max_pixels={options.max_pixels}"
        )


def _oriented(image: Image.Image) -> Image.Image:
    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION))
    except Exception:  # whatever is wrong with the EXIF block, the pixels may be fine
        turn = None
    return image if turn is None else image.transpose(turn)


def _converted(image: Image.Image, options: PictureOptions, who: str) -> Image.Image:
    image = _in_8_bits(image, who)
    if image.has_transparency_data:
        if image.mode == "La":  # Pillow converts it to nothing but LA
            image = image.convert("LA")
        rgba = image.convert("RGBA")
        behind = Image.new("RGBA", rgba.size, (*options.background, 255))
        return Image.alpha_composite(behind, rgba).convert("RGB")
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    return image.convert("RGB")


def _in_8_bits(image: Image.Image, who: str) -> Image.Image:
    """Grey of 16 bits, or floats, as L; with a colour key as LA, since the key is of 16 bits."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    array = np.asarray(image)
    if image.mode == "I":
        # Pillow before 11 opens 16-bit grey files so; other images of 32 bits may hold anything.
        if image.format not in ("PNG", "PPM") or array.min() < 0 or array.max() > 0xFFFF:
            raise MediaError(
                f"{who}: a PIL image of mode I has no known range: convert it to L or I;16"
            )
        array = array.astype(np.uint16)
    grey = Image.fromarray(_to_uint8(array, f"a PIL image of mode {image.mode}", who))
    key = image.info.get("transparency")
    if key is not None:
        grey.putalpha(Image.fromarray((array != key).astype(np.uint8) * 255))
    return grey


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
