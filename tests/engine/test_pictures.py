"""The same picture gives the same pixels through every door, and what is no picture is refused."""

import base64
import io
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageSequence

from purestep.engine.pictures import FORMATS, PictureOptions, check_picture_options, read_picture
from purestep.state.errors import ConfigError, MediaError

LOSSLESS = ("PNG", "BMP", "TIFF", "PPM", "QOI", "WEBP")
sides = st.integers(1, 9)
sizes = st.tuples(sides, sides) | st.sampled_from([(1, 300), (300, 1), (3, 200), (200, 3)])


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image | np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(buffer, format, **({"lossless": True} if format == "WEBP" else {}), **options)
    return buffer.getvalue()


def data_url(raw: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


@given(size=sizes, seed=st.integers(0, 99), strided=st.booleans())
@settings(max_examples=40)
@example(size=(1, 1), seed=0, strided=False)
@example(size=(3, 500), seed=0, strided=False)
def test_every_door_gives_the_same_pixels(size: tuple[int, int], seed: int, strided: bool) -> None:
    """MP-01: thin pictures too, whose arrays fit two layouts, so that the caller says which."""
    rgb = noise(*size, seed=seed)
    chw = np.moveaxis(rgb, -1, 0) if strided else np.ascontiguousarray(np.moveaxis(rgb, -1, 0))
    before = rgb.copy()
    png = encoded(rgb)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "misnamed.jpg"  # MP-08: a PNG, whatever its name says
        path.write_bytes(png)
        doors: list[tuple[Any, str | None]] = [
            (Image.fromarray(rgb), None),
            (rgb, "HWC"),
            (chw, "CHW"),
            (torch.tensor(rgb), "HWC"),
            (torch.tensor(chw), "CHW"),
            (rgb.astype(np.float32) / 255, "HWC"),
            (torch.tensor(rgb).double() / 255, "HWC"),
            (rgb.astype(np.uint16) * 257, "HWC"),
            *((encoded(rgb, format), None) for format in LOSSLESS),
            (bytearray(png), None),
            (memoryview(png), None),
            (path, None),
            (str(path), None),
            (data_url(png), None),
            ("data:image/png," + quote(png), None),
        ]
        for source, layout in doors:
            got = read_picture(source, layout=layout)
            assert got.dtype == np.uint8
            assert not got.flags.writeable
            np.testing.assert_array_equal(got, rgb, err_msg=f"{type(source)} {layout}")
    np.testing.assert_array_equal(rgb, before)


@given(size=sizes, channels=st.integers(1, 4), first=st.booleans())
def test_a_layout_is_taken_only_where_it_is_the_only_one(
    size: tuple[int, int], channels: int, first: bool
) -> None:
    """MP-01: (3, 500, 3) may be either, and is never guessed."""
    hwc = noise(*size, channels)
    array = np.moveaxis(hwc, -1, 0) if first else hwc
    right, wrong = ("CHW", "HWC") if first else ("HWC", "CHW")
    want = read_picture(array, layout=right)
    other = array.shape[-1 if first else 0]
    if other in (1, 2, 3, 4):
        with pytest.raises(MediaError, match=r"picture: an array of shape .* say layout="):
            read_picture(array)
    else:
        np.testing.assert_array_equal(read_picture(array), want)
        with pytest.raises(MediaError, match="channels must be one of"):
            read_picture(array, layout=wrong)


def test_greys_and_alpha_of_arrays_are_those_of_pil() -> None:
    for mode, channels in (("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4)):
        array = noise(7, 5, channels)
        image = Image.fromarray(array[:, :, 0] if channels == 1 else array)
        assert image.mode == mode
        np.testing.assert_array_equal(read_picture(array), read_picture(image))
    np.testing.assert_array_equal(read_picture(array[:, :, 0]), read_picture(array[:, :, :1]))
    bits = noise(7, 5, 1)[:, :, 0] > 99
    want = np.repeat(bits[:, :, None].astype(np.uint8) * 255, 3, axis=2)
    np.testing.assert_array_equal(read_picture(bits), want)
    np.testing.assert_array_equal(read_picture(torch.tensor(bits)), want)
    one_bit = Image.fromarray(bits)
    assert one_bit.mode == "1"
    np.testing.assert_array_equal(read_picture(one_bit), want)
    np.testing.assert_array_equal(read_picture(encoded(one_bit)), want)


@given(values=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=12))
def test_16_bits_keep_their_upper_eight(values: list[int]) -> None:
    grey = np.array([values], np.uint16)
    want = np.repeat((grey >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    image = Image.fromarray(grey)
    assert image.mode == "I;16"
    doors = image, encoded(image), encoded(image, "TIFF"), grey, torch.from_numpy(grey)
    for source in doors:
        np.testing.assert_array_equal(read_picture(source), want)
    with pytest.raises(MediaError, match="mode I has no known range"):
        read_picture(Image.fromarray(grey.astype(np.int32)))


def test_a_colour_key_of_16_bits_is_transparent() -> None:
    grey = np.array([[0x1234, 0x1235, 0x8000]], np.uint16)
    png = encoded(Image.fromarray(grey), transparency=0x1234)
    assert read_picture(png)[0, :, 0].tolist() == [255, 0x12, 0x80]


def test_floats_are_rounded_and_run_from_0_to_1() -> None:
    array = np.array([[0.0, 0.5, 1.0, 0.001, 0.003]], np.float32)
    want = [0, 128, 255, 0, 1]
    for source in (array, torch.tensor(array), torch.tensor(array, requires_grad=True)):
        assert read_picture(source)[0, :, 0].tolist() == want
    assert read_picture(Image.fromarray(array))[0, :, 0].tolist() == want
    assert read_picture(torch.tensor(array).bfloat16())[0, :3, 0].tolist() == want[:3]
    for bad in (1.01, -0.01, np.nan, 255.0, np.inf):
        array[0, 0] = bad
        for source in (array, Image.fromarray(array)):
            with pytest.raises(MediaError, match=r"floats must lie in 0\.\.1"):
                read_picture(source)


def transparent(mode: str, left: int = 4) -> tuple[Image.Image, np.ndarray]:
    """A picture of noise whose left columns are invisible, and its colours without alpha."""
    rgba = noise(8, 8, 4, seed=3)
    rgba[:, :left, 3], rgba[:, left:, 3] = 0, 255
    image = Image.fromarray(rgba)
    if mode == "LA":
        image = image.convert("LA")
    elif mode == "La":
        image = image.convert("LA").convert("La")
    elif mode == "RGBa":
        image = image.convert("RGBa")
    elif mode in ("P", "PA"):
        image = Image.fromarray(noise(8, 8, 1)[:, :, 0] % 7 + 1, "P")
        image.putpalette(noise(1, 256).tobytes())
        if mode == "PA":
            image = image.convert("PA")
            image.putalpha(Image.fromarray(rgba[:, :, 3]))
        else:
            image.paste(0, (0, 0, left, 8))
            image.info["transparency"] = 0
    elif mode == "RGB":
        image = image.convert("RGB")
        image.paste((1, 2, 3), (0, 0, left, 8))
        image.info["transparency"] = (1, 2, 3)
    assert image.mode == mode
    colours = image.convert("LA") if mode == "La" else image
    return image, np.asarray(colours.convert("RGBA"))[..., :3]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "La", "P", "PA", "RGBa", "RGB"])
@pytest.mark.parametrize("background", [(255, 255, 255), (10, 20, 30)])
def test_transparency_shows_the_background(mode: str, background: tuple[int, int, int]) -> None:
    """MP-03: no hidden colours, whatever the kind of transparency; opaque parts are untouched."""
    image, colours = transparent(mode)
    options = PictureOptions(background=background)
    got = read_picture(image, options)
    assert (got[:, :4] == background).all()
    np.testing.assert_array_equal(got[:, 4:], colours[:, 4:])
    if mode in ("RGBA", "LA", "P", "RGB"):
        file = encoded(image)
        np.testing.assert_array_equal(
            read_picture(file, PictureOptions(background=background)), got
        )
    if mode == "P":
        np.testing.assert_array_equal(read_picture(image.convert("RGBA"), options), got)


def test_half_transparent_is_half_the_background() -> None:
    rgba = np.full((2, 2, 4), 0, np.uint8)
    rgba[..., 3] = 128
    assert {*read_picture(rgba, layout="HWC").flatten().tolist()} == {127}


GRADIENT = np.stack(
    [*np.meshgrid(np.arange(24) * 10, np.arange(16) * 10), np.full((16, 24), 128)], axis=-1
).astype(np.uint8)  # 24 x 16 pixels
TURNED = {  # what orientation says of how the picture was stored
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: np.swapaxes(a, 0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.swapaxes(a, 0, 1)[::-1, ::-1],
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("tag", TURNED)
@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied(tag: int, format: str) -> None:
    """MP-05: for files, and for PIL images that were opened from them; it can be switched off."""
    exif = Image.Exif()
    exif[0x0112] = tag
    file = encoded(GRADIENT, format, exif=exif)
    opened = Image.open(io.BytesIO(file)).convert("RGB")
    stored = GRADIENT if format == "TIFF" else np.asarray(opened)  # Pillow turns a TIFF by itself
    want = TURNED[tag](stored)
    assert want.shape[:2] == ((24, 16) if tag >= 5 else (16, 24))
    np.testing.assert_array_equal(read_picture(file), want)
    np.testing.assert_array_equal(read_picture(Image.open(io.BytesIO(file))), want)
    if format != "TIFF":
        as_stored = read_picture(file, PictureOptions(orient=False))
        np.testing.assert_array_equal(as_stored, stored)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "block", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0"]
)
def test_broken_exif_is_ignored(block: bytes) -> None:
    """MP-05."""
    file = encoded(GRADIENT, "JPEG", exif=b"Exif\0\0" + block)
    np.testing.assert_array_equal(
        read_picture(file), np.asarray(Image.open(io.BytesIO(encoded(GRADIENT, "JPEG"))))
    )


def test_an_unknown_orientation_is_none() -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    np.testing.assert_array_equal(read_picture(encoded(GRADIENT, "PNG", exif=exif)), GRADIENT)


def without_adobe_marker(jpeg: bytes) -> bytes:
    """The file without its APP14 segment."""
    at = jpeg.index(b"\xff\xee")
    (length,) = struct.unpack(">H", jpeg[at + 2 : at + 4])
    return jpeg[:at] + jpeg[at + 2 + length :]


def reds() -> dict[str, Any]:
    red = Image.new("RGB", (16, 16), (255, 0, 0))
    to_lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(red, *to_lab, outputMode="LAB")
    cmyk = encoded(red.convert("CMYK"), "JPEG")
    return {
        "CMYK": red.convert("CMYK"),
        "CMYK jpeg": cmyk,
        "CMYK jpeg without Adobe's marker": without_adobe_marker(cmyk),
        "CMYK tiff": encoded(red.convert("CMYK"), "TIFF"),
        "YCbCr": red.convert("YCbCr"),
        "YCbCr jpeg": encoded(red, "JPEG"),
        "HSV": red.convert("HSV"),
        "LAB": lab,
        "LAB tiff": encoded(lab, "TIFF"),
        "RGBX": red.convert("RGBX"),
        "P": red.convert("P"),
    }


@pytest.mark.parametrize("kind", reds())
def test_red_stays_red(kind: str) -> None:
    """MP-07."""
    got = read_picture(reds()[kind])
    assert got.shape == (16, 16, 3)
    assert np.abs(got.astype(int) - [255, 0, 0]).max() < 30


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(format: str) -> None:
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    frames = [Image.new("RGB", (6, 5), colour) for colour in colours]
    file = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    opened = Image.open(io.BytesIO(file))
    assert sum(1 for _ in ImageSequence.Iterator(opened)) == 3
    np.testing.assert_array_equal(read_picture(file), np.asarray(frames[0]))
    opened.seek(2)  # the caller's own frame
    np.testing.assert_array_equal(read_picture(opened), np.asarray(frames[2]))
    assert opened.tell() == 2


@pytest.mark.filterwarnings("ignore:Corrupt EXIF|Truncated File Read")
@pytest.mark.parametrize("format", [f for f in FORMATS if f != "MPO"])
def test_a_file_cut_short_is_refused_or_whole(format: str) -> None:
    """MP-08: never half a picture. A format whose end says nothing may do without it."""
    file = encoded(noise(12, 10), format)
    whole = read_picture(file)
    refused = 0
    for length in range(len(file)):
        try:
            got = read_picture(file[:length])
        except MediaError:
            refused += 1
        else:
            np.testing.assert_array_equal(got, whole)
    assert refused >= len(file) - 20


BROKEN: dict[str, Any] = {
    "jpeg minus 128 bytes": encoded(noise(64, 64), "JPEG")[:-128],
    "nothing": b"",
    "html": b"<html><body>not found</body></html>",
    "null": "null",
    "no file": "/no/such/file.png",
    "a folder": Path("/"),
    "null byte": "a\0b.png",
    "base64 without padding": data_url(encoded(noise(4, 4))).rstrip("=")[:-1],
    "base64 with other letters": "data:image/png;base64,!!!!",
    "no comma": "data:image/png;base64",
    "http": "https://example.com/cat.png",
    "file url": "file:///etc/hosts",
    "a number": 3,
    "none": None,
    "list": [[1, 2], [3, 4]],
    "empty image": Image.new("RGB", (0, 3)),
    "empty array": np.zeros((0, 4, 3), np.uint8),
    "four dimensions": np.zeros((1, 8, 8, 3), np.uint8),
    "one dimension": np.zeros(8, np.uint8),
    "five channels": np.zeros((8, 8, 5), np.uint8),
    "int64": torch.zeros(8, 8, 3, dtype=torch.int64),
    "int32": np.zeros((8, 8, 3), np.int32),
    "complex": np.zeros((8, 8), np.complex64),
    "objects": np.full((8, 8), None),
    "words": np.full((8, 8), "a"),
    "sparse": torch.eye(8).to_sparse(),
    "meta": torch.zeros(8, 8, device="meta"),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_picture_is_refused(kind: str) -> None:
    """MP-08: as a typed error that names the item."""
    with pytest.raises(MediaError, match=r"^image 2 of 3: ."):
        read_picture(BROKEN[kind], who="image 2 of 3")


def test_a_lazily_opened_pil_image_is_decoded_here() -> None:
    """MP-08: PIL decodes on first use, so its error must come now and not in a later step."""
    lazy = Image.open(io.BytesIO(BROKEN["jpeg minus 128 bytes"]))
    with pytest.raises(MediaError, match="JPEG cannot be decoded"):
        read_picture(lazy)
    closed = Image.open(io.BytesIO(encoded(noise(4, 4))))
    closed.close()
    with pytest.raises(MediaError, match="cannot be decoded"):
        read_picture(closed)


@given(height=st.integers(1, 12), width=st.integers(1, 12), limit=st.integers(1, 150))
def test_the_pixel_limit_counts_exactly_and_names_itself(
    height: int, width: int, limit: int
) -> None:
    rgb, options = noise(height, width), PictureOptions(max_pixels=limit)
    for source, layout in ((rgb, "HWC"), (Image.fromarray(rgb), None), (encoded(rgb), None)):
        if height * width <= limit:
            assert read_picture(source, options, layout=layout).shape == rgb.shape
        else:
            with pytest.raises(MediaError, match=rf"= {height * width} pixels .*={limit}"):
                read_picture(source, options, layout=layout)


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    """A PNG that says 30000 x 30000, and has no pixels at all; then one beyond Pillow's limit."""
    small = encoded(Image.new("1", (8, 8)))
    for side in (9_460, 30_000):
        header = b"IHDR" + struct.pack(">II", side, side) + small[24:29]
        bomb = small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]
        with pytest.raises(MediaError, match="max_pixels=89478485"):
            read_picture(bomb)


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 0},
        {"max_pixels": 1.5},
        {"max_pixels": True},
        {"background": (0, 0, 256)},
        {"background": [0, 0, 0]},
        {"background": "white"},
        {"orient": 1},
        {"hash": "md5"},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name}="):
        check_picture_options(PictureOptions(**options))
