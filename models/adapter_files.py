"""LoRA adapters from PEFT folders and from tensors in memory, checked against one model.

Settings, names, kinds and shapes are checked before the first value is read; the values are then
read once, for the version, the check for NaN and the copy into the arenas.

Where an adapter targets embed_tokens or lm_head, peft also saves a copy of that module's base
weight (`save_embedding_layers="auto"`). Its shape is checked, so a resized vocabulary is refused;
its values are not used: the base weight is the checkpoint's, as it is for every other module.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from purestep.models.adapter_arenas import (
    Arena,
    empty_arenas,
    hash_fields_,
    hash_piece_,
    misfit,
    pieces,
    version_hasher,
    write_a_,
    write_b_,
)
from purestep.models.adapter_config import (
    AdapterConfig,
    parse_adapter_config,
    rank_of,
    scaling_of,
    unused_targets,
)
from purestep.models.adapter_names import (
    AdaptedModule,
    Findings,
    describe,
    find_modules,
    live_tensors,
    quote,
)
from purestep.models.config import FusedLinear, ModelConfig
from purestep.state.errors import AdapterError
from purestep.state.pytree import static, tree

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@tree
class Adapter:
    """One LoRA adapter, checked against a model and ready to be uploaded."""

    version: str = static()  # 64 hex digits; equal versions are the same weights and scalings
    rank: int = static()  # the largest of its modules
    num_tensors: int = static()  # A and B tensors used
    nbytes: int = static()  # host memory of the arenas
    modules: tuple[str, ...] = static()  # the model's names, sorted; fused ones as in the file
    unused_targets: tuple[str, ...] = static()  # target_modules that the weights do not have
    arenas: dict[str, Arena]  # by FusedLinear.name, for the linears that the adapter touches

    @property
    def linears(self) -> tuple[str, ...]:
        """The linears that it touches, sorted; `tower` stands for all those of a tower."""
        return tuple(sorted({name.partition(".")[0] for name in self.arenas}))


class SupportsToDict(Protocol):
    """What is needed of a `peft.LoraConfig`, so that peft is no dependency."""

    def to_dict(self) -> dict[str, Any]: ...


def read_adapter(
    source: str | os.PathLike[str],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    max_rank: int | None,
    name: str = "",
    tower: Sequence[FusedLinear] = (),
    pinned: bool = False,
    pause: Callable[[], object] = lambda: None,
) -> Adapter:
    """Read a folder as PEFT's `save_pretrained` writes it.

    Weights are taken from adapter_model.safetensors, else .bin, else .pt: when several are there,
    safetensors wins. Pickles go through torch's restricted unpickler and run no code. `~` is
    expanded; names on a hub are not looked up. `max_rank` is the option `max_lora_rank`, None for
    no limit; `tower` are the linears of the program's tower (`tower_linears`). `dtype` is what the
    arenas hold; scalings are folded into B in float32 before the cast. `pinned` arenas are uploaded
    to a GPU without waiting. `pause` is called behind each piece of about 1 MiB.

    Raises AdapterError naming the adapter, the file or tensor, the value and the limit. Warns
    about target modules that the weights do not have and about unknown settings.
    """
    folder = Path(os.path.expanduser(source))
    label = f"adapter {quote(name)} ({folder})" if name else f"adapter {quote(str(folder))}"
    if not folder.is_dir():
        raise AdapterError(f"{label}: no such folder (hub names are not supported yet)")
    adapter_config = parse_adapter_config(_read_config(folder / CONFIG_FILE, label), label)
    path = next((folder / f for f in WEIGHT_FILES if (folder / f).is_file()), None)
    if path is None:
        raise AdapterError(f"{label}: the folder holds none of {', '.join(WEIGHT_FILES)}")
    tensors = _read_tensors(path, label)
    where = f"{label}, {path.name}"
    return _build(
        tensors, adapter_config, config, dtype, max_rank, where, tower, pinned=pinned, pause=pause
    )


def adapter_from_tensors(
    tensors: Mapping[str, Tensor],
    peft_config: Mapping[str, Any] | SupportsToDict,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    max_rank: int | None,
    name: str = "",
    tower: Sequence[FusedLinear] = (),
    version: str | None = None,
    pinned: bool = False,
) -> Adapter:
    """An adapter from tensors in memory, copied: later changes to them change nothing here.

    `tensors` is named as `peft.get_peft_model_state_dict(model)` or as `model.state_dict()` names
    them. In the latter the base model's parameters are left out, and of several adapters the one
    called `name` is taken. With `version`, a name for these weights that the caller vouches for,
    their bytes are not hashed. Everything else is as in `read_adapter`; equal tensors and settings
    get the same version there and here.
    """
    label = f"adapter {quote(name)}" if name else "adapter in memory"
    raw = peft_config if isinstance(peft_config, Mapping) else peft_config.to_dict()
    adapter_config = parse_adapter_config(raw, label)
    try:
        sources = live_tensors(tensors, name)
    except ValueError as error:
        raise AdapterError(f"{label}: {error}") from None
    chosen = {saved: tensors[source] for saved, source in sources.items()}
    return _build(chosen, adapter_config, config, dtype, max_rank, label, tower, version, pinned)


def _read_config(path: Path, label: str) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise AdapterError(f"{label}: the folder holds no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{label}: cannot read {path.name}: {error}") from error
    if not isinstance(raw, dict):
        raise AdapterError(f"{label}: {path.name} holds a {type(raw).__name__}, must be an object")
    return raw


def _read_tensors(path: Path, label: str) -> Mapping[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)  # a private mapping of the file: nothing is read yet
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails anywhere inside the two readers
        reason = f"{type(error).__name__}: {error}"
        raise AdapterError(f"{label}: cannot read {path.name}: {reason}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(k, str) for k in tensors):
        raise AdapterError(f"{label}: {path.name} is no mapping of names to tensors")
    return tensors


def _build(
    tensors: Mapping[str, Tensor],
    adapter_config: AdapterConfig,
    config: ModelConfig,
    dtype: torch.dtype,
    max_rank: int | None,
    label: str,
    tower: Sequence[FusedLinear],
    version: str | None = None,
    pinned: bool = False,
    pause: Callable[[], object] = lambda: None,
) -> Adapter:
    modules = _check(tensors, adapter_config, config, tower, max_rank, label)
    rank = max(rank_of(adapter_config, module.file_name) for module in modules)
    arenas = empty_arenas(modules, config, dtype, rank, pinned)
    hasher = version_hasher(version)
    for module in modules:
        scaling = scaling_of(adapter_config, module.file_name)
        arena = arenas.get(module.linear.name)  # None of what a tower never runs
        for role, name, factor in (("A", module.a, 1.0), ("B", module.b, scaling)):
            bounds = []
            if version is None:
                hash_fields_(hasher, module.name, role, tensors[name], scaling)
            for first, rows in pieces(tensors[name]):
                if version is None:
                    hash_piece_(hasher, rows)
                bounds.append(torch.aminmax(rows))
                if arena is None:
                    pass
                elif role == "A":
                    write_a_(arena, module, first, rows)
                else:
                    write_b_(arena, module, first, rows, scaling)
                pause()
            if problem := misfit(bounds, factor, dtype):
                raise AdapterError(f"{label}: tensor {quote(name)} {problem}")
    return Adapter(
        version=hasher.hexdigest(),
        rank=rank,
        num_tensors=2 * len(modules),
        nbytes=sum(arena.a_LSRD.nbytes + arena.b_LRO.nbytes for arena in arenas.values()),
        modules=tuple(module.name for module in modules),
        unused_targets=_report_unused(modules, adapter_config, label),
        arenas=arenas,
    )


def _check(
    tensors: Mapping[str, Tensor],
    adapter_config: AdapterConfig,
    config: ModelConfig,
    tower: Sequence[FusedLinear],
    max_rank: int | None,
    label: str,
) -> tuple[AdaptedModule, ...]:
    """The modules to load, all of whose tensors have the right names, kinds and shapes."""
    modules, findings = find_modules(tensors, config, tower)
    _check_tensors(modules, tensors, adapter_config, config, findings)
    ranks = {module.name: rank_of(adapter_config, module.file_name) for module in modules}
    if max_rank is not None and (wide := {m: r for m, r in ranks.items() if r > max_rank}):
        what = f"rank {max(wide.values())} is above the limit max_lora_rank={max_rank}"
        findings[what] = [quote(name) for name in wide]
    if findings or not modules:
        usage = f"{2 * len(modules)} of {len(tensors)} tensors pair up as LoRA of this model"
        raise AdapterError(f"{label}: {'; '.join([*describe(findings), usage])}")
    return modules


def _check_tensors(
    modules: Sequence[AdaptedModule],
    tensors: Mapping[str, Tensor],
    adapter_config: AdapterConfig,
    config: ModelConfig,
    findings: Findings,
) -> None:
    """Add to `findings` each tensor whose kind, dtype or shape is not the one it must have."""
    for module in modules:
        rank = rank_of(adapter_config, module.file_name)
        wants = {module.a: (rank, module.linear.in_features), module.b: (module.out_features, rank)}
        if module.base_copy is not None:
            wants[module.base_copy] = (config.vocab_size, config.hidden_size)
        for name, want in wants.items():
            tensor = tensors[name]
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                findings.setdefault("not a plain tensor", []).append(quote(name))
            elif tensor.dtype not in DTYPES:
                item = f"{quote(name)} is {tensor.dtype}"
                findings.setdefault("not a float of 16, 32 or 64 bits", []).append(item)
            elif tensor.shape != want:
                item = f"{quote(name)} is {list(tensor.shape)}, must be {list(want)} (r={rank})"
                findings.setdefault("wrong shape", []).append(item)


def _report_unused(
    modules: Sequence[AdaptedModule], adapter_config: AdapterConfig, label: str
) -> tuple[str, ...]:
    names = {name for module in modules for name in (module.name, module.file_name)}
    unused = unused_targets(adapter_config, names)
    if unused:
        listed = ", ".join(map(quote, unused))
        warnings.warn(f"{label}: target_modules without weights: {listed}", stacklevel=4)
    return unused
