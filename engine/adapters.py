"""What a caller does with adapters between steps: load, register, pin, and deliver loads.

All return a new EngineState; files are read only by `load_adapter`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from purestep.engine.config import Config
from purestep.engine.ends import ended_request
from purestep.engine.pool import check_linears
from purestep.engine.requests import abort_host, bind
from purestep.engine.upload import on_gpu
from purestep.models.adapter_files import Adapter, adapter_from_tensors, read_adapter
from purestep.state import adapters as ledger_of
from purestep.state.adapters import AdapterInfo, AdapterLedger, count_users
from purestep.state.engine import EngineState, HostState, drop_blobs, progress
from purestep.state.errors import AdapterError
from purestep.state.request import FinishReason, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoaded:
    """A load that succeeded. `source` is None for tensors, which cannot be read again."""

    name: str
    source: str | None
    adapter: Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailed:
    """A load that failed, and why; only requests that wait for it end."""

    name: str
    error: str
    source: str | None = None  # what was read, where the caller knows


def load_adapter(state: EngineState, source: str | os.PathLike, *, name: str) -> EngineState:
    """Read a PEFT folder now and bind `name` to it.

    A name that is bound already is bound anew: requests that run keep the weights they started
    with, later ones get the new ones and never the old KV. Raises AdapterError before any change.
    """
    path = os.fspath(source)
    return deliver_loaded(
        state, AdapterLoaded(name=name, source=path, adapter=read(state.config, path, name))
    )


def load_adapter_tensors(
    state: EngineState,
    tensors: Mapping[str, Tensor],
    peft_config: Any,
    *,
    name: str,
    version: str | None = None,
) -> EngineState:
    """Bind `name` to tensors in memory, as `peft.get_peft_model_state_dict` gives them.

    The tensors are copied. `peft_config` is a LoraConfig or its dict. The version is a digest of
    the bytes, or of `version` where the caller has a cheaper name for them. Raises AdapterError.
    """
    adapter = adapter_from_tensors(
        tensors,
        peft_config,
        state.config.model,
        dtype=getattr(torch, state.config.dtype),
        max_rank=state.config.max_lora_rank,
        name=name,
        tower=state.config.tower,
        version=version,
        pinned=on_gpu(state.config.device),
    )
    return deliver_loaded(state, AdapterLoaded(name=name, source=None, adapter=adapter))


def read(
    config: Config, path: str, name: str, pause: Callable[[], object] = lambda: None
) -> Adapter:
    """An adapter in the engine's form; `pause` as in `read_adapter`. Raises AdapterError."""
    return read_adapter(
        path,
        config.model,
        dtype=getattr(torch, config.dtype),
        max_rank=config.max_lora_rank,
        name=name,
        tower=config.tower,
        pinned=on_gpu(config.device),
        pause=pause,
    )


def register_adapter(state: EngineState, source: str | os.PathLike, *, name: str) -> EngineState:
    """Make `name` known without reading its files: the first request for it causes the load.

    Raises AdapterError for what is no name, and where `name` is pinned and `source` another one.
    """
    return _with_ledger(
        state, ledger_of.add_source(state.host.adapters, _checked_name(name), os.fspath(source))
    )


def pin_adapter(state: EngineState, name: str) -> EngineState:
    """Never evict what `name` is bound to now.

    Raises UnknownAdapterError where nothing is loaded under that name, AdapterError where all that
    are pinned would not fit the slots and rows together.
    """
    return _with_ledger(state, ledger_of.pin(state.host.adapters, name))


def unpin_adapter(state: EngineState, name: str) -> EngineState:
    """Undo `pin_adapter`. Raises UnknownAdapterError where `name` is not pinned."""
    return _with_ledger(state, ledger_of.unpin(state.host.adapters, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """What a state knows of one adapter name. `version`, `rank` and `nbytes` are None until its
    weights are there (again)."""

    source: str | None  # None for tensors
    version: str | None
    rank: int | None
    nbytes: int | None
    loading: bool
    resident: bool  # on the device
    pinned: bool
    num_requests: int  # live ones that use this version, under whatever name


def list_adapters(state: EngineState) -> dict[str, AdapterStatus]:
    """Every adapter name a request may use, sorted. Raises nothing."""
    ledger = state.host.adapters
    return {name: _status(ledger, name) for name in ledger_of.known_names(ledger)}


def _status(ledger: AdapterLedger, name: str) -> AdapterStatus:
    version = ledger.names.get(name)
    info = None if version is None else ledger.registered[version]
    return AdapterStatus(
        source=ledger.sources.get(name),
        version=version,
        rank=info and info.rank,
        nbytes=info and info.nbytes,
        loading=name in ledger.loading,
        resident=version in ledger.resident,
        pinned=name in ledger.pins,
        num_requests=0 if version is None else ledger.users.get(version, 0),
    )


def unload_adapter(state: EngineState, name: str, *, running: str = "drain") -> EngineState:
    """Forget the adapter called `name`: from now on a request for it is refused.

    `running` says what becomes of live requests that name it: "drain" lets those that have their
    weights finish, which are freed with the last of them; "abort" ends them with an error in the
    next step's outputs; "refuse" raises AdapterError if there are any. Those that still wait for
    the load end with an error in any case. Raises UnknownAdapterError.
    """
    if running not in ("drain", "abort", "refuse"):
        raise AdapterError(f"unload: running={running!r} must be 'drain', 'abort' or 'refuse'")
    ledger = ledger_of.forget_name(state.host.adapters, name)
    mine = [r for r in state.host.requests.values() if r.request.adapter == name]
    if running == "refuse" and mine:
        raise AdapterError(f"unload: {len(mine)} live requests use adapter {name!r}")
    ends = [progress(state.host, r.key) for r in mine if r.loading or running == "abort"]
    why = f"adapter {name!r} was unloaded"
    host = end_records(state.config, replace(state.host, adapters=ledger), ends, why)
    return drop_blobs(replace(state, host=host))


def deliver(state: EngineState, event: AdapterLoaded | AdapterFailed) -> EngineState:
    """Tell the state how a load it asked for (`StepPlan.loads`) came out.

    The only way in for what was read in the background, so the order of completion is data. An
    adapter that cannot be registered counts as failed: requests that wait for it end with an error.
    Raises nothing.
    """
    if event.source not in (None, state.host.adapters.sources.get(event.name)):
        # The name was unloaded, or given another source, which is asked for by the next step.
        return _with_ledger(state, ledger_of.load_failed(state.host.adapters, event.name))
    if isinstance(event, AdapterLoaded):
        try:
            return deliver_loaded(state, event)
        except AdapterError as error:
            event = AdapterFailed(name=event.name, error=str(error))
    host = _fail_waiting(state.config, state.host, event)
    return drop_blobs(replace(state, host=host))


def deliver_loaded(state: EngineState, event: AdapterLoaded) -> EngineState:
    """Register a loaded adapter and bind the requests that wait for it. Raises AdapterError."""
    adapter = event.adapter
    check_linears(state.config, adapter, f"adapter {event.name!r}")
    ledger = ledger_of.add_adapter(
        state.host.adapters, _checked_name(event.name), info_of(adapter), event.source
    )
    records = {
        i: bind(state.config, ledger, record, adapter.version)
        for i, record in state.host.requests.items()
        if record.loading and record.request.adapter == event.name
    }
    ledger = count_users(ledger, [(adapter.version, 1)] * len(records))
    host = replace(state.host, requests=state.host.requests.update(records))
    blobs = state.blobs
    if adapter.version not in blobs:
        blobs = blobs.set(adapter.version, adapter)
    return _with_ledger(replace(state, host=host, blobs=blobs), ledger)


def info_of(adapter: Adapter) -> AdapterInfo:
    """What a host state knows of an adapter."""
    return AdapterInfo(
        version=adapter.version,
        rank=adapter.rank,
        nbytes=adapter.nbytes,
        modules=tuple(adapter.modules),
        linears=adapter.linears,
    )


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise AdapterError(f"adapter name {name!r} must be a non-empty string")
    return name


def _with_ledger(state: EngineState, ledger: AdapterLedger) -> EngineState:
    return drop_blobs(replace(state, host=replace(state.host, adapters=ledger)))


def _fail_waiting(config: Config, host: HostState, event: AdapterFailed) -> HostState:
    failed = [r for r in host.requests.values() if r.loading and r.request.adapter == event.name]
    ledger = ledger_of.load_failed(host.adapters, event.name)
    return end_records(config, replace(host, adapters=ledger), failed, event.error)


def end_records(
    config: Config, host: HostState, records: Iterable[RequestState], error: str
) -> HostState:
    """End live requests, whose records are complete, with an error that the next step tells."""
    for record in sorted(records, key=lambda record: record.arrival):
        host = abort_host(host, record.key)
        completion = ended_request(config, record, FinishReason.ERROR, error)
        host = replace(host, ended=(*host.ended, completion))
    return host
