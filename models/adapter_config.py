"""The part of PEFT's adapter_config.json that decides what an adapter computes.

The delta of a module is scaling * B @ A, where scaling is alpha / r, or alpha / sqrt(r) for
rank-stabilised adapters. What each field does was read in peft 0.21.2 (tuners/lora/config.py,
tuners/lora/layer.py, utils/other.py).
"""

import math
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from purestep.state.errors import AdapterError

T = TypeVar("T")

REQUIRED = ("r", "lora_alpha", "target_modules")

# Fields that make the forward pass something else than W x + scaling * B A x, and how.
REFUSED = {
    "use_dora": "DoRA rescales every output row of W + BA",
    "lora_bias": "it adds a bias to B",
    "modules_to_save": "it replaces whole modules",
    "layer_replication": "it repeats layers of the model",
    "trainable_token_indices": "it replaces rows of the embedding",
    "target_parameters": "it adapts bare parameters, such as stacked experts",
    "alora_invocation_tokens": "it starts to act in the middle of a prompt",
    "arrow_config": "it routes each token through several adapters",
    "kasa_config": "it truncates the base weight and puts a diagonal between A and B",
    "use_bdlora": "its factors are block-diagonal",
    "use_qalora": "it pools the inputs of A",
}

# Known and harmless at inference: they chose what was trained, how it started or how it ran.
# Tensor names say which modules are adapted. VeLoRA changes the backward pass only, MonteCLoRA
# samples A in training only.
# fmt: off
IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "monteclora_config", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type", "velora_config",
})
READ = frozenset({
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
    "target_modules", "use_rslora",
})
# fmt: on

# Initialisations that leave the base weight as it is. The others (pissa, olora, corda, loftq,
# lora_ga) subtract the first BA from it, so their deltas belong to another base model; peft saves
# `true` once an adapter was converted back.
HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What a PEFT LoRA config says about ranks and scalings. Made by `parse_adapter_config`."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...]  # in file order: the first match wins
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    target_modules: str | tuple[str, ...]  # a regular expression, or names


def parse_adapter_config(raw: Mapping[str, Any], label: str) -> AdapterConfig:
    """Check a PEFT config, as parsed JSON or as `LoraConfig.to_dict()`.

    `label` names the adapter in messages. A field that peft 0.21.2 does not know and that is set
    gives a warning.

    Raises AdapterError with every failed check at once: missing keys, values of a wrong type, and
    by name each setting that would change the forward pass.
    """
    problems = [*_missing(raw), *_refused(raw), *_misfits(raw)]
    if problems:
        raise AdapterError(f"{label}: {'; '.join(problems)}")
    unknown = [k for k, v in raw.items() if k not in READ | IGNORED | REFUSED.keys() and v]
    if unknown:
        names = ", ".join(repr(k) for k in unknown)
        warnings.warn(f"{label}: unknown settings are ignored: {names}", stacklevel=3)
    targets = raw["target_modules"] or ()
    return AdapterConfig(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        use_rslora=bool(raw.get("use_rslora")),
        rank_pattern=tuple((_compile(k), r) for k, r in (raw.get("rank_pattern") or {}).items()),
        alpha_pattern=tuple(
            (_compile(k), float(a)) for k, a in (raw.get("alpha_pattern") or {}).items()
        ),
        target_modules=targets if isinstance(targets, str) else tuple(sorted(targets)),
    )


def rank_of(config: AdapterConfig, module: str) -> int:
    """The rank of a module, named as in the file without `base_model.model.`."""
    return _first_match(config.rank_pattern, module, config.rank)


def scaling_of(config: AdapterConfig, module: str) -> float:
    """The factor of BA for a module, named as in the file without `base_model.model.`.

    Rank and alpha are looked up independently: one may follow a pattern and the other not.
    """
    rank, alpha = rank_of(config, module), _first_match(config.alpha_pattern, module, config.alpha)
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def unused_targets(config: AdapterConfig, modules: Iterable[str]) -> tuple[str, ...]:
    """The entries of `target_modules` that name none of `modules`; a regex counts as one entry."""
    targets, modules = config.target_modules, tuple(modules)
    if targets == "all-linear":
        return ()
    if isinstance(targets, str):
        try:
            return () if any(re.fullmatch(targets, m) for m in modules) else (targets,)
        except (re.error, OverflowError, RecursionError):
            return (targets,)
    suffixes = {m[i:] for m in modules for i in (0, *(d.end() for d in re.finditer(r"\.", m)))}
    return tuple(t for t in targets if t not in suffixes)


def _first_match(pattern: tuple[tuple[re.Pattern[str], T], ...], module: str, default: T) -> T:
    return next((value for key, value in pattern if key.match(module)), default)


def _compile(key: str) -> re.Pattern[str]:
    """peft's rule: a key is a regular expression for the name's tail, whole components only."""
    return re.compile(rf"(.*\.)?({key})$")


def _missing(raw: Mapping[str, Any]) -> Iterator[str]:
    if missing := [k for k in REQUIRED if k not in raw]:
        yield f"the config lacks {', '.join(missing)}"


def _refused(raw: Mapping[str, Any]) -> Iterator[str]:
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        yield f"peft_type is {getattr(kind, 'value', kind)!r}, must be 'LORA'"
    for field, why in REFUSED.items():
        if _is_set(raw.get(field)):
            yield f"{field}={reprlib.repr(raw[field])} is not supported: {why}"
    bias = raw.get("bias")
    if bias not in (None, "none"):
        yield f"bias={bias!r} is not supported, must be 'none': it trains biases of the base model"
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in HARMLESS_INITS:
        yield (
            f"init_lora_weights={init!r} is not supported: it rewrites the base weights (peft's "
            "save_pretrained converts with path_initial_model_for_weight_conversion)"
        )


def _is_set(value: Any) -> bool:
    """peft takes {} for a sub-config of defaults, so only empty lists and strings are unset."""
    return bool(value) or isinstance(value, Mapping)


def _misfits(raw: Mapping[str, Any]) -> Iterator[str]:
    if "r" in raw and not _is_rank(raw["r"]):
        yield f"r={reprlib.repr(raw['r'])} must be an integer above 0"
    if "lora_alpha" in raw and not _is_number(raw["lora_alpha"]):
        yield f"lora_alpha={reprlib.repr(raw['lora_alpha'])} must be a finite number"
    if raw.get("use_rslora") not in (None, False, True):
        yield f"use_rslora={reprlib.repr(raw['use_rslora'])} must be true or false"
    targets = raw.get("target_modules")
    if not isinstance(targets, str | list | tuple | set | frozenset | None) or not all(
        isinstance(t, str) for t in targets or ()
    ):
        yield f"target_modules={reprlib.repr(targets)} must be a string or a list of strings"
    yield from _misfits_of_pattern(raw, "rank_pattern", _is_rank, "an integer above 0")
    yield from _misfits_of_pattern(raw, "alpha_pattern", _is_number, "a finite number")


def _misfits_of_pattern(
    raw: Mapping[str, Any], field: str, fits: Callable[[Any], bool], want: str
) -> Iterator[str]:
    pattern = raw.get(field) or {}
    if not isinstance(pattern, Mapping):
        yield f"{field}={reprlib.repr(pattern)} must map module names to values"
        return
    for key, value in pattern.items():
        if not fits(value):
            yield f"{field}[{key!r}]={reprlib.repr(value)} must be {want}"
        try:
            _compile(key)
        except (re.error, OverflowError, RecursionError) as error:
            yield f"{field}[{key!r}] is no regular expression: {error}"


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    """JSON as Python reads it has NaN, Infinity and integers that no float can hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max
