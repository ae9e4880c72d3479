"""One canonical form of host state: JSON, for digests and snapshots.

Trees become `{"tree": class, field: ...}`, arrays `{"array": dtype, "shape", "hex"}`, maps lists of
pairs in the order of their encoded keys. So the form depends on the value alone, never on insertion
order, hash seed or machine; floats keep every bit (they and array bytes are written in hex).
"""

import json
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from immutables import Map

from purestep.state.adapters import AdapterInfo, AdapterLedger, Reservation, Residence
from purestep.state.blocks import BlockLedger
from purestep.state.digests import Digests
from purestep.state.encoder import EncoderLedger, EncoderOutput
from purestep.state.engine import HostState
from purestep.state.errors import SnapshotError
from purestep.state.hashing import framed
from purestep.state.media import Feature
from purestep.state.plan import (
    BatchDescriptor,
    EmbeddedSpan,
    EncodedItem,
    HiddenRow,
    MergedSpan,
    Outputs,
    Overwrites,
    SamplingRows,
    ScoredRow,
    StepPlan,
    StepResult,
)
from purestep.state.request import (
    Completion,
    FinishReason,
    Request,
    RequestState,
)
from purestep.state.rows import Rows
from purestep.state.sampling import LogitEdits, SamplingParams
from purestep.state.scores import Scores
from purestep.state.tables import Tables

TREES = {
    cls.__name__: cls
    for cls in (
        AdapterInfo,
        AdapterLedger,
        BatchDescriptor,
        BlockLedger,
        Completion,
        Digests,
        EmbeddedSpan,
        EncodedItem,
        EncoderLedger,
        EncoderOutput,
        Feature,
        HiddenRow,
        HostState,
        LogitEdits,
        MergedSpan,
        Outputs,
        Overwrites,
        Request,
        RequestState,
        Reservation,
        Residence,
        Rows,
        SamplingParams,
        SamplingRows,
        ScoredRow,
        Scores,
        StepPlan,
        StepResult,
        Tables,
    )
}

ARRAYS = {"bool", "int32", "int64", "uint64", "float32", "float64"}


def to_plain(value: Any) -> Any:
    """A value of plain JSON types. Raises TypeError for what no host state may hold."""
    if isinstance(value, FinishReason):
        return {"reason": value.value}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Map):
        pairs = [[to_plain(k), to_plain(v)] for k, v in value.items()]
        return {"map": sorted(pairs, key=lambda pair: json.dumps(pair[0]))}
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
        return {
            "array": value.dtype.name,
            "shape": list(value.shape),
            "hex": little.tobytes().hex(),
        }
    if is_dataclass(value) and type(value).__name__ in TREES:
        members = {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
        return {"tree": type(value).__name__, **members}
    raise TypeError(f"host state cannot hold a {type(value).__name__}: {value!r}")


def from_plain(plain: Any) -> Any:
    """The value `to_plain` was given. Raises SnapshotError for anything else."""
    try:
        return _from_plain(plain)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"not a canonical form: {error!r} in {str(plain)[:80]}") from None


def _from_plain(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_from_plain(item) for item in plain)
    if plain is None or isinstance(plain, bool | int | str):
        return plain
    match plain:
        case {"reason": name}:
            return FinishReason(name)
        case {"float": digits}:
            return float.fromhex(digits)
        case {"bytes": digits}:
            return bytes.fromhex(digits)
        case {"map": pairs}:
            return Map([(_from_plain(k), _from_plain(v)) for k, v in pairs])
        case {"array": dtype, "shape": shape, "hex": digits} if dtype in ARRAYS:
            little = np.frombuffer(bytes.fromhex(digits), np.dtype(dtype).newbyteorder("<"))
            array = little.astype(dtype).reshape(shape)
            array.setflags(write=False)
            return array
        case {"tree": name, **members}:
            return TREES[name](**{key: _from_plain(item) for key, item in members.items()})
    raise ValueError("unknown kind")


def digest(host: HostState) -> str:
    """64 hex digits naming the value of a host state; equal states have equal digests.

    Raises TypeError for a state in which somebody has put what none may hold.
    """
    text = json.dumps(to_plain(host), sort_keys=True, separators=(",", ":"))
    return blake3(framed("purestep/host/1", text.encode())).hexdigest()
