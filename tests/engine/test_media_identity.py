"""Digests of media are injective over everything that matters, and blind to everything else."""

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from purestep.engine.pictures import read_picture
from purestep.state.errors import MediaError
from purestep.state.identity import HASHES, alias, canonical, content_digest, identifier

PICTURE = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from([b"", "", b"a", "a", 0, 1, 0.0, -0.0, 1.0, True, False])
    | arrays(
        st.sampled_from([np.uint8, np.int8, np.uint16, np.float32]),
        array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=2),
        elements=st.integers(0, 1),
    )
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


def encoding(value: Any) -> bytes:
    return b"".join(bytes(piece) for piece in canonical(value))


def told_apart(value: Any) -> Any:
    """A form that compares as two values should: with types, dtypes, shapes and signs of zero."""
    if isinstance(value, dict):
        return "map", tuple(sorted((key, told_apart(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return "list", tuple(told_apart(item) for item in value)
    if isinstance(value, np.ndarray):
        return "array", value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    return type(value).__name__, value


@given(one=values, other=values)
@settings(max_examples=100)
@example(one={"a": "bc"}, other={"ab": "c"})
@example(one={"a": 1}, other={"a": struct.pack("<q", 1)})
@example(one={"a": []}, other={})
@example(one=["raw", {"max_pixels": 4}], other=["raw" + "max_pixels" + "\x04" + "\0" * 7, {}])
@example(one=[1, [2]], other=[[1], 2])
@example(one=2**64 + 1, other=1)
def test_different_values_have_different_encodings(one: Any, other: Any) -> None:
    """W12: the unframed scheme takes each of the first four examples for one another, so that a
    picture with a setting of its own could be had under the name of another one."""
    assert (encoding(one) == encoding(other)) == (repr(told_apart(one)) == repr(told_apart(other)))


@given(prefix=values, suffix=values)
@settings(max_examples=50)
def test_no_encoding_is_the_beginning_of_another(prefix: Any, suffix: Any) -> None:
    """So that what is written one behind the other can be read back in one way only."""
    one, other = encoding(prefix), encoding(suffix)
    assert one == other or not (other.startswith(one) or one.startswith(other))


@settings(max_examples=50)
@given(items=st.dictionaries(st.text(max_size=3), leaves, max_size=5), data=st.data())
def test_the_order_of_keys_does_not_matter(items: dict[str, Any], data: st.DataObject) -> None:
    shuffled = dict(data.draw(st.permutations(list(items.items()))))
    assert encoding({"x": items}) == encoding({"x": shuffled})
    assert content_digest(PICTURE, "p", items) == content_digest(PICTURE, "p", shuffled)


def forms(array: np.ndarray) -> Iterator[np.ndarray]:
    """The same array in other memory."""
    yield np.asfortranarray(array)
    yield array[::-1].copy()[::-1]
    yield array.astype(array.dtype.newbyteorder(">"))
    yield array.T.copy().T


@given(
    array=arrays(
        st.sampled_from([np.uint8, np.uint16, np.int64, np.float32, np.float64]),
        array_shapes(min_dims=1, max_dims=3, max_side=4),
        elements=st.integers(0, 9),
    )
)
def test_memory_does_not_matter(array: np.ndarray) -> None:
    want = encoding(array)
    assert all(encoding(same) == want for same in forms(array))
    if array.dtype != np.uint16:
        tensor = torch.from_numpy(array.copy())
        moved = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        assert encoding(moved) == encoding(tensor) == encoding(tensor.clone())
        assert encoding(tensor) != want, "a tensor is another kind of value"


def test_every_dtype_of_a_tensor_has_an_encoding() -> None:
    """W12: the unframed scheme raises for tensors that require gradients, and for fp8."""
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
    found = {encoding(torch.ones(2, 3).to(dtype)) for dtype in dtypes}
    assert len(found) == len(dtypes)
    assert encoding(torch.ones(2, requires_grad=True)) == encoding(torch.ones(2))
    assert encoding(torch.ones(())) != encoding(torch.ones(1)) != encoding(torch.ones(1, 1))


@pytest.mark.parametrize("value", [object(), {1: 2}, np.array(["a"]), {2, 3}, np.array([None])])
def test_what_has_no_encoding_is_refused(value: Any) -> None:
    with pytest.raises(MediaError, match="no canonical encoding"):
        content_digest(value, "p", {})


@pytest.mark.parametrize("algorithm", HASHES)
def test_an_item_differs_in_pixels_shape_processor_and_options(algorithm: str) -> None:
    def digest(picture: np.ndarray, processor: str = "p", **options: Any) -> str:
        return content_digest(picture, processor, options, algorithm=algorithm)

    other = PICTURE.copy()
    other[1, 1, 2] += 1
    found = [
        digest(PICTURE),
        digest(other),
        digest(PICTURE.reshape(1, 4, 3)),
        digest(PICTURE, "q"),
        digest(PICTURE, max_pixels=1),
        digest(PICTURE, max_pixels=2),
        digest(PICTURE, min_pixels=1),
        digest(PICTURE, max_pixels=1.0),
    ]
    assert len({*found}) == len(found)
    assert digest(PICTURE.copy()) == found[0]
    assert {len(d) for d in found} == {128 if algorithm == "sha512" else 64}
    assert all(d == d.lower() and int(d, 16) >= 0 for d in found)


def test_digests_do_not_move() -> None:
    """They are names in snapshots and recordings: another encoding is another version of its tag.
    The unframed scheme's values for this picture begin with 0ad4d674 and 8d8c1de9."""
    found = [content_digest(PICTURE, "m", {}, algorithm=name)[:16] for name in HASHES]
    assert found == ["0de668335e50dbc0", "4c486a5fc316c20d", "3922b0f4d11bc99c"]


def test_aliases_of_kinds_and_scopes_never_meet() -> None:
    """W13: an id given by one caller is no id of another's, nor ever the name of a picture."""
    kinds, scopes = ("id", "file"), (None, "", "tenant", "None")
    found = [alias(kind, scope, "u", "p", {}) for kind in kinds for scope in scopes]
    found += [alias("id", None, "u", "p", {"max_pixels": 4}), alias("id", None, "u", "q", {})]
    found += [alias("id", None, b"u", "p", {}), content_digest("u", "p", {})]
    assert len({*found}) == len(found)


def test_an_adapter_of_the_tower_changes_the_output_and_not_the_picture() -> None:
    """ME-01: by its version, so that a reload under the same name is another one."""
    digest = content_digest(PICTURE, "p", {})
    names = [identifier(digest, version) for version in (None, "", "v1", "v2")]
    assert names[0] == digest
    assert len({*names}) == 4


def test_pixels_decide() -> None:
    """ME-03: two files with one ImageUniqueID are two pictures; 5,000 pictures have 5,000 names."""
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0xA420] = "0123456789abcdef0123456789abcdef"
    digests = set()
    for colour in ("red", "green"):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), colour).save(buffer, "JPEG", exif=exif)
        assert b"0123456789abcdef" in buffer.getvalue()
        digests.add(content_digest(read_picture(buffer.getvalue()), "p", {}))
    assert len(digests) == 2
    noise = np.random.default_rng(0).integers(0, 256, (5_000, 2, 2, 3), dtype=np.uint8)
    assert len({content_digest(picture, "p", {}) for picture in noise}) == 5_000
