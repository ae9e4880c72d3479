"""The tensors of a checkpoint folder, by one name whatever the layout, checked before read."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from purestep.state.errors import CheckpointError

FLOATS = ("F16", "BF16", "F32", "F64")
TOWER = re.compile(
    r"(?:vision_tower|vision_model|multi_modal_projector|connector|visual)\..+|image_newline"
)

_TOWER_PREFIX = re.compile(rf"(?:model\.)?(?={TOWER.pattern})")
_DECODER_PREFIX = re.compile(
    r"model\.(?:language|text)_model\.|language_model\.model\.|(?:language|text)_model\.|model\."
)
_FREQUENCIES = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")  # written by old transformers

Shapes = Mapping[str, tuple[int, ...]]


def plain_name(stored: str) -> str:
    """A tensor's name without what wraps the decoder, the tower or CLIP's model in a layout."""
    if match := _TOWER_PREFIX.match(stored):
        name = stored[match.end() :]
        return re.sub(r"^(?:vision_tower\.)?vision_model\.", "vision_tower.", name)
    match = _DECODER_PREFIX.match(stored)
    return stored[match.end() :] if match else stored


def read_tensors(
    path: Path,
    wanted: Shapes,
    optional: Shapes,
    unread: Callable[[str], bool],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    places: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], str]:
    """(the tensors by plain name, in `dtype` on `device`; the digest of what is stored).

    Those with a name in `places` are written there. Names for which `unread` is true may be there
    and are left alone. Raises CheckpointError, before
    anything is read, for names that are missing or unexpected, and for other shapes than wanted.
    """
    digest = blake3(b"purestep weights v1\n", max_threads=blake3.AUTO)
    tensors: dict[str, Tensor] = {}
    places = places or {}
    for name, tensor in _stored_tensors(path, wanted, optional, unread):
        header = f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.nbytes}".encode()
        digest.update(len(header).to_bytes(8, "little") + header)
        digest.update(tensor.flatten().view(torch.uint8).numpy())
        # A copy: safetensors maps the file, and the file may be replaced while we run.
        if name in places:
            tensors[name] = places[name].copy_(tensor)
        else:
            tensors[name] = tensor.to(device=device, dtype=dtype, copy=True)
    return tensors, digest.hexdigest()


def _stored_tensors(
    path: Path, wanted: Shapes, optional: Shapes, unread: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors by name, sorted; all names, shapes and dtypes are checked before."""
    with ExitStack() as stack:
        found: dict[str, tuple[Any, str]] = {}
        for file in _weight_files(path):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
            for stored in handle.keys():  # noqa: SIM118 (a safe_open handle is no dict)
                name = plain_name(stored)
                if name in found:
                    raise CheckpointError(f"{file}: tensor {name} is stored twice")
                needed = name in wanted or name in optional or not unread(name)
                if needed and not name.endswith(_FREQUENCIES):
                    found[name] = (handle, stored)
        _check_names(path, wanted, optional, set(found))
        shapes = {**wanted, **optional}
        for name, (handle, stored) in found.items():
            _check_tensor(path, stored, handle.get_slice(stored), shapes[name])
        for name in sorted(found):
            handle, stored = found[name]
            yield name, handle.get_tensor(stored)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if (single := path / "model.safetensors").exists():
        return [single]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        names = sorted(set(map(str, weight_map.values())))
        if strays := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"{index}: {strays[0]!r} is no file name in this folder")
        return [path / name for name in names]
    if others := sorted(file.name for file in path.glob("*.bin")):
        raise CheckpointError(
            f"{path} holds {', '.join(others)} but no safetensors file: convert it first "
            "(from_pretrained and save_pretrained of transformers do)"
        )
    raise CheckpointError(f"{path} holds neither {single.name} nor {index.name}")


def _check_names(path: Path, wanted: Shapes, optional: Shapes, found: set[str]) -> None:
    if missing := [name for name in wanted if name not in found]:
        shapes = ", ".join(f"{name} {wanted[name]}" for name in missing[:8])
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing: {shapes}")
    if foreign := sorted(found - wanted.keys() - optional.keys()):
        raise CheckpointError(
            f"{path}: {len(foreign)} tensors are unexpected: {', '.join(foreign[:8])}"
        )


def _check_tensor(path: Path, name: str, stored: Any, shape: tuple[int, ...]) -> None:
    if tuple(stored.get_shape()) != shape:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {tuple(stored.get_shape())}, wanted {shape}"
        )
    if stored.get_dtype() not in FLOATS:
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {stored.get_dtype()}, wanted one of {FLOATS}"
        )


def read_json(file: Path) -> dict[str, Any]:
    """Raises CheckpointError where that is no JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, wanted an object")
    return content
