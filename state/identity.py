"""What a media item is: digests over a canonical encoding, framed and tagged by type.

The encoding is injective: values that differ in type, dtype, shape, length or any byte differ in
it, and nothing else does: not the order of a mapping's keys, strides, the byte order of an array or
the device of a tensor. So no choice of bytes and options can be read as another one.

An item's digest covers the picture itself, the processor and its options. It says nothing of the
file the picture came in: equal pixels are one item, by whatever door. What only leads to a picture,
the bytes of a file or a name the caller gave it, has a digest in a domain of its own (`alias`), and
is never an identity: at most a processor cache looks up under it.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from purestep.state.errors import MediaError
from purestep.state.hashing import framed

HASHES = {"blake3": blake3, "sha256": hashlib.sha256, "sha512": hashlib.sha512}
DEFAULT_HASH = "blake3"


def content_digest(
    value: Any, processor: str, options: Mapping[str, Any], *, algorithm: str = DEFAULT_HASH
) -> str:
    """The digest (lower-case hex) of an item that `processor` turns into tensors under `options`.

    `value` is a picture as an array, or whatever `canonical` encodes. Raises MediaError for another
    kind of value.
    """
    return _digest("purestep/media/1", [value, processor, options], algorithm)


def alias(
    kind: str, scope: str | None, value: Any, processor: str, options: Mapping[str, Any]
) -> str:
    """A name under which a cache may find an item: of a `kind` ("file", "id"), within a scope.

    Aliases of different kinds, scopes (None is one of its own), processors or options never meet.
    """
    return _digest("purestep/media-alias/1", [kind, scope, value, processor, options], DEFAULT_HASH)


def identifier(digest: str, adapter_version: str | None = None) -> str:
    """The name of an item's encoder output: the digest itself, or with the version of an adapter
    that changes the tower, one of a domain of its own (hex)."""
    if adapter_version is None:
        return digest
    parts = digest.encode(), adapter_version.encode()
    return blake3(framed("purestep/encoder-output/1", *parts)).hexdigest()


def canonical(value: Any) -> Iterator[bytes | memoryview]:
    """The encoding of a value, in pieces: None, bool, int, float, str, bytes, list or tuple (which
    are the same), mapping with str keys, numpy array or scalar, tensor. Raises MediaError."""
    if value is None or isinstance(value, bool):
        yield framed({None: "none", False: "false", True: "true"}[value])
    elif isinstance(value, int):
        yield framed("int", str(int(value)).encode())  # of an enum too
    elif isinstance(value, float):
        yield framed("float", struct.pack("<d", value))
    elif isinstance(value, str):
        yield framed("str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        raw = memoryview(value).cast("B")
        yield framed("bytes", _count(len(raw)))
        yield raw
    elif isinstance(value, list | tuple):
        yield framed("list", _count(len(value)))
        for item in value:
            yield from canonical(item)
    elif isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise MediaError(f"{wrong[0]!r}, a key of {type(wrong[0])}, has no canonical encoding")
        yield framed("map", _count(len(value)))
        for key in sorted(value):
            yield from canonical(key)
            yield from canonical(value[key])
    elif isinstance(value, np.ndarray | np.generic):
        yield from _array(np.asarray(value))
    elif isinstance(value, Tensor):
        yield from _tensor(value)
    else:
        raise MediaError(f"{value!r} of {type(value)} has no canonical encoding")


def _array(array: np.ndarray) -> Iterator[bytes | memoryview]:
    if array.dtype.kind not in "biufc":
        raise MediaError(f"an array of dtype {array.dtype} has no canonical encoding")
    yield framed("array", array.dtype.name.encode(), _shape(array.shape))
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    yield little.tobytes() if little.ndim == 0 or not little.size else memoryview(little).cast("B")


def _tensor(tensor: Tensor) -> Iterator[bytes | memoryview]:
    yield framed("tensor", str(tensor.dtype).encode(), _shape(tensor.shape))
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    yield memoryview(raw) if raw.size else b""


def _shape(shape: tuple[int, ...]) -> bytes:
    return b"".join(map(_count, shape))


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _digest(domain: str, parts: list[Any], algorithm: str) -> str:
    hasher = HASHES[algorithm](framed(domain))
    for piece in canonical(parts):
        hasher.update(piece)
    return hasher.hexdigest()
