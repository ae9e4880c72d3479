"""What a caller does with adapters between steps: load, register, pin, and deliver loads.

All return a new EngineState; files are read only by `load_adapter`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from purestep.engine.admission import ended_request
from purestep.engine.config import Config
from purestep.engine.pool import check_linears
from purestep.engine.requests import bind
from purestep.models.adapter_files import Adapter, adapter_from_tensors, read_adapter
from purestep.state import adapters as ledger_of
from purestep.state.adapters import AdapterInfo, AdapterLedger, count_users
from purestep.state.engine import EngineState, HostState, drop_blobs
from purestep.state.errors import AdapterError
from purestep.state.request import FinishReason


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
        version=version,
    )
    return deliver_loaded(state, AdapterLoaded(name=name, source=None, adapter=adapter))


def read(config: Config, path: str, name: str) -> Adapter:
    """An adapter's tensors in the engine's form. Raises AdapterError."""
    return read_adapter(
        path,
        config.model,
        dtype=getattr(torch, config.dtype),
        max_rank=config.max_lora_rank,
        name=name,
    )


def register_adapter(state: EngineState, source: str | os.PathLike, *, name: str) -> EngineState:
    """Make `name` known without reading its files: the first request for it causes the load."""
    return _with_ledger(
        state, ledger_of.add_source(state.host.adapters, _checked_name(name), os.fspath(source))
    )


def pin_adapter(state: EngineState, name: str) -> EngineState:
    """Never evict what `name` is bound to now. Raises UnknownAdapterError."""
    return _with_ledger(state, ledger_of.pin(state.host.adapters, name))


def unpin_adapter(state: EngineState, name: str) -> EngineState:
    """Undo `pin_adapter`. Raises UnknownAdapterError."""
    return _with_ledger(state, ledger_of.unpin(state.host.adapters, name))


def deliver(state: EngineState, event: AdapterLoaded | AdapterFailed) -> EngineState:
    """Tell the state how a load it asked for (`StepPlan.loads`) came out.

    The only way in for what was read in the background, so the order of completion is data. An
    adapter that cannot be registered counts as failed: requests that wait for it end with an error.
    """
    source = state.host.adapters.sources.get(event.name)
    if source is not None and event.source not in (None, source):
        # The name was given another source meanwhile; that one is asked for by the next step.
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
    info = AdapterInfo(
        version=adapter.version,
        rank=adapter.rank,
        nbytes=adapter.nbytes,
        modules=tuple(adapter.modules),
        linears=tuple(sorted(adapter.arenas)),
    )
    ledger = ledger_of.add_adapter(
        state.host.adapters, _checked_name(event.name), info, event.source
    )
    records = {
        i: bind(state.config, record, adapter.version)
        for i, record in state.host.requests.items()
        if record.loading and record.request.adapter == event.name
    }
    ledger = count_users(ledger, [(adapter.version, 1)] * len(records))
    host = replace(state.host, requests=state.host.requests.update(records))
    blobs = state.blobs
    if adapter.version not in blobs:
        blobs = blobs.set(adapter.version, adapter)
    return _with_ledger(replace(state, host=host, blobs=blobs), ledger)


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise AdapterError(f"adapter name {name!r} must be a non-empty string")
    return name


def _with_ledger(state: EngineState, ledger: AdapterLedger) -> EngineState:
    return drop_blobs(replace(state, host=replace(state.host, adapters=ledger)))


def _fail_waiting(config: Config, host: HostState, event: AdapterFailed) -> HostState:
    failed = sorted(
        (r for r in host.requests.values() if r.loading and r.request.adapter == event.name),
        key=lambda record: record.arrival,
    )
    ended = tuple(ended_request(config, r, FinishReason.ERROR, event.error) for r in failed)
    gone = {c.key for c in ended}
    with host.requests.mutate() as requests:
        for key in gone:
            del requests[key]
        records = requests.finish()
    return replace(
        host,
        requests=records,
        waiting=tuple(i for i in host.waiting if i not in gone),
        adapters=ledger_of.load_failed(host.adapters, event.name),
        ended=(*host.ended, *ended),
    )
