"""A state on disk: host state as canonical JSON, KV and adapters as safetensors. No pickle.

A snapshot is a folder: `state.json`, `kv.safetensors`, `adapters.safetensors`, of prompts given as
embeddings `prompts.safetensors`, and of media `media.safetensors`; encoder outputs are made anew.
It can be restored by another process or machine into a program over the same weights.
"""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from immutables import Map
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from purestep.engine.adapters import read
from purestep.engine.config import Config
from purestep.engine.embeds import embeds_name
from purestep.engine.media import check_media
from purestep.engine.pool import Pool, allocate_pool, check_linears, claim, upload_adapter_
from purestep.engine.program import Program
from purestep.models.adapter_files import Adapter, Arena
from purestep.state.blocks import held_blocks
from purestep.state.canonical import from_plain, to_plain
from purestep.state.encoder import empty_encoder
from purestep.state.engine import DeviceState, EngineState, HostState, quiet
from purestep.state.errors import AdapterError, RequestError, SnapshotError

FORMAT = "purestep/snapshot/6"
STATE, KV, ADAPTERS = "state.json", "kv.safetensors", "adapters.safetensors"
PROMPTS, MEDIA = "prompts.safetensors", "media.safetensors"


def snapshot(state: EngineState, path: str | os.PathLike) -> None:
    """Write `state` into the folder `path`, replacing a snapshot that is there.

    Holds live and cached KV blocks, the host state, and the tensors of adapters that cannot be read
    again from their files. `state` stays valid. Raises SnapshotError when `path` is something else
    than a snapshot, DonatedStateError for a spent state.
    """
    pool, host, target = claim(state.device), quiet(state.host, "snapshot"), Path(path)
    if target.exists() and not (target / STATE).is_file():
        raise SnapshotError(f"{target} exists and is not a snapshot")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename is atomic and a killed writer leaves the old one whole.
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(building, state, pool, host)
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _write(folder: Path, state: EngineState, pool: Pool, host: HostState) -> None:
    blocks = sorted({*held_blocks(host.blocks), *host.blocks.digest_of})
    index = torch.tensor(blocks, dtype=torch.int64, device=state.config.device)
    save_file(
        {f"layer.{i}": kv[:, index].cpu().contiguous() for i, kv in enumerate(pool.kv)}, folder / KV
    )
    carried = {v: state.blobs[v] for v in host.adapters.registered if not _sources(host, v)}
    save_file(
        {
            f"{version}/{linear}/{part}": getattr(arena, part)
            for version, adapter in carried.items()
            for linear, arena in adapter.arenas.items()
            for part in ("a_LSRD", "b_LRO")
        },
        folder / ADAPTERS,
    )
    save_file({name: state.blobs[name] for name in _prompts(host)}, folder / PROMPTS)
    save_file(
        {
            f"{number}/{name}": tensor.clone(memory_format=torch.contiguous_format)
            for number, digest in enumerate(_media(host))
            for name, tensor in state.blobs[digest].items()
        },
        folder / MEDIA,
    )
    meta = {
        "format": FORMAT,
        "versions": _versions(),
        "identity": _identity(state.config),
        "num_blocks": state.config.num_blocks,
        "blocks": blocks,
        "adapters": {version: _facts(adapter) for version, adapter in carried.items()},
        "host": to_plain(replace(host, encoder=empty_encoder())),
    }
    (folder / STATE).write_text(json.dumps(meta, sort_keys=True))


def _prompts(host: HostState) -> list[str]:
    """The digests of the prompts that were given as embeddings."""
    names = {record.request.prompt_embeds for record in host.requests.values()}
    return sorted(names - {None})


def _media(host: HostState) -> list[str]:
    """The digests of live requests' media."""
    requests = (record.request for record in host.requests.values())
    return sorted({feature.digest for request in requests for feature in request.features})


def _sources(host: HostState, version: str) -> list[tuple[str, str]]:
    """(name, path) pairs the version can be read from again."""
    ledger = host.adapters
    names = sorted(name for name, v in ledger.names.items() if v == version)
    return [(name, ledger.sources[name]) for name in names if name in ledger.sources]


def _versions() -> dict[str, str | None]:
    """What may change the last bits of logits from one machine to another."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {"torch": torch.__version__, "triton": triton}


def _identity(config: Config) -> dict[str, Any]:
    """What must be equal for the KV and the ledgers to mean the same."""
    return {
        "weights": config.weights,
        "model": asdict(config.model),
        "vision": None if config.vision is None else asdict(config.vision),
        "dtype": config.dtype,
        "block_size": config.block_size,
        "adapter_block_quota": config.adapter_block_quota,
        "max_active_adapters": config.max_active_adapters,
        "lora_rows": config.lora_rows,
        "prefix_caching": config.prefix_caching,
        "mrope_merge": config.mrope_merge,
    }


def _facts(adapter: Adapter) -> dict[str, Any]:
    return {
        "rank": adapter.rank,
        "num_tensors": adapter.num_tensors,
        "nbytes": adapter.nbytes,
        "modules": list(adapter.modules),
        "linears": sorted(adapter.arenas),
    }


def restore(program: Program, path: str | os.PathLike) -> EngineState:
    """The state a snapshot holds, in a new pool.

    Raises SnapshotError naming what differs (format, weights, model, dtype, block size, adapter
    rows), what live requests need and the program lacks (a token table, a logits processor), or
    what is damaged, and AdapterError when an adapter's files changed or are gone, or when it adapts
    the embedding, the head or a tower and the program's `lora_vocab` or `lora_tower` is off.
    Another torch or triton only warns: host states are equal, but the last bits of logits may
    differ.
    """
    folder = Path(path)
    meta = _read_state(folder)
    _check_identity(meta["identity"], _identity(program.config))
    if meta["versions"] != _versions():
        warnings.warn(
            f"snapshot made with {meta['versions']}, restored with {_versions()}", stacklevel=2
        )
    config = replace(program.config, num_blocks=meta["num_blocks"])
    encoder = empty_encoder(config.encoder_cache_tokens, config.encoder_row_bytes)
    host = replace(from_plain(meta["host"]), encoder=encoder)
    _check_requests(config, host)
    adapters = _read_adapters(folder, config, host, meta["adapters"])
    for version, adapter in adapters.items():
        names = sorted(n for n, v in host.adapters.names.items() if v == version)
        check_linears(config, adapter, f"adapter {names or version[:12]}")
    prompts = _read_prompts(folder / PROMPTS, config, host) | _read_media(folder / MEDIA, host)
    pool = allocate_pool(config, program.room)
    _read_blocks_(folder, pool, meta["blocks"])
    for place in host.adapters.resident.values():
        upload_adapter_(pool, place, adapters[place.version])
    device = DeviceState(pool=pool, generation=pool.generation)
    return EngineState(config=config, host=host, device=device, blobs=Map(adapters | prompts))


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / STATE).read_text())
    except OSError as error:
        raise SnapshotError(f"{folder} is no snapshot: {error}") from None
    except ValueError as error:
        raise SnapshotError(f"{folder / STATE} is damaged: {error}") from None
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != FORMAT:
        raise SnapshotError(f"{folder / STATE}: format {found!r}, this version reads {FORMAT!r}")
    return meta


def _check_identity(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(wanted))  # tuples are lists in the file
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        facts = "; ".join(f"{k}: snapshot {found.get(k)}, program {wanted[k]}" for k in differing)
        raise SnapshotError(f"the snapshot does not fit the program: {facts}")


def _check_requests(config: Config, host: HostState) -> None:
    """Raises SnapshotError where a live request needs what the program does not have."""
    for record in host.requests.values():
        if record.text is not None and config.tokens is None:
            raise SnapshotError(
                f"request {record.key!r} has stop strings or streams, but the program has no "
                "token table"
            )
        name = record.request.sampling.processor
        if name is not None and name not in config.processors:
            raise SnapshotError(
                f"request {record.key!r} needs the logits processor {name!r}, the program has "
                f"{list(config.processors)}"
            )
        try:
            check_media(config, record.request)
        except RequestError as error:
            raise SnapshotError(f"the program cannot go on with {error}") from None


def _read_prompts(file: Path, config: Config, host: HostState) -> dict[str, torch.Tensor]:
    prompts = {}
    with _opened(file) as tensors:
        saved = set(tensors.keys())
        for name in _prompts(host):
            rows = tensors.get_tensor(name) if name in saved else torch.empty(0)
            if rows.shape[1:] != (config.model.hidden_size,) or embeds_name(config, rows) != name:
                raise SnapshotError(
                    f"{file} is damaged: embeddings {name[:12]} are missing or changed"
                )
            prompts[name] = rows
    return prompts


def _read_media(file: Path, host: HostState) -> dict[str, Map[str, torch.Tensor]]:
    media: dict[str, Map[str, torch.Tensor]] = {}
    with _opened(file) as tensors:
        saved = set(tensors.keys())
        for number, digest in enumerate(_media(host)):
            mine = [key for key in saved if key.startswith(f"{number}/")]
            if not mine:
                raise SnapshotError(f"{file} is damaged: the media item {digest[:12]} is missing")
            media[digest] = Map({k.split("/", 1)[1]: tensors.get_tensor(k) for k in mine})
    return media


def _read_adapters(
    folder: Path, config: Config, host: HostState, carried: Mapping[str, Mapping[str, Any]]
) -> dict[str, Adapter]:
    adapters = {}
    with _opened(folder / ADAPTERS) as tensors:
        for version, facts in carried.items():
            arenas = {
                linear: Arena(
                    a_LSRD=tensors.get_tensor(f"{version}/{linear}/a_LSRD"),
                    b_LRO=tensors.get_tensor(f"{version}/{linear}/b_LRO"),
                )
                for linear in facts["linears"]
            }
            adapters[version] = Adapter(
                version=version,
                rank=facts["rank"],
                num_tensors=facts["num_tensors"],
                nbytes=facts["nbytes"],
                modules=tuple(facts["modules"]),
                unused_targets=(),
                arenas=arenas,
            )
    for version in host.adapters.registered:
        if version not in adapters:
            name, source = _sources(host, version)[0]
            adapters[version] = read(config, source, name)
            if adapters[version].version != version:
                raise AdapterError(
                    f"adapter {name!r}: {source} has changed since the snapshot, which has "
                    f"version {version[:12]} and not {adapters[version].version[:12]}"
                )
    return adapters


def _read_blocks_(folder: Path, pool: Pool, blocks: list[int]) -> None:
    index = torch.tensor(blocks, dtype=torch.int64, device=pool.config.device)
    with _opened(folder / KV) as tensors:
        for i, kv in enumerate(pool.kv):
            saved = tensors.get_tensor(f"layer.{i}")
            if saved.shape[1] != len(blocks):
                raise SnapshotError(f"{folder / KV}: {saved.shape[1]} blocks, want {len(blocks)}")
            kv[:, index] = saved.to(kv.device)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{file} is damaged: {error}") from None
