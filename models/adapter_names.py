"""From the tensor names of an adapter file to the linears of the decoder.

One decoder has several spellings: peft puts `base_model.model.` before every name, and the same
language model sits under another parent inside a multimodal wrapper. Names decide what is adapted;
a name that means nothing here is a finding, never skipped in silence.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from purestep.models.config import FusedLinear, ModelConfig, fused_linears

PEFT_PREFIX = "base_model.model."
DECODER_PREFIXES = ("model.", "model.language_model.", "language_model.model.")

Findings = dict[str, list[str]]  # what is wrong -> the items it is wrong with

_TENSOR = re.compile(r"((?:(?!\.lora_).)+)\.lora_([AB])\.weight")
_MODULE = re.compile(
    rf"(?:{'|'.join(map(re.escape, DECODER_PREFIXES))})"
    r"layers\.(0|[1-9][0-9]{0,8})\.([a-z_]+)\.([a-z_]+)"
)
# Buffers that peft saves beside A and B, for training alone (see adapter_config.IGNORED).
_TRAINING_ONLY = re.compile(r".+\.(lora_velora_embed|lora_monteclora_sampler\.[a-z_]+)")
# What peft names after the adapter in a live model's state_dict: `lora_A.default.weight`.
_LIVE = re.compile(r"(.+?\.(?:lora_\w+|modules_to_save|trainable_tokens_\w+))\.([^.]+)(\..+)?")
_TOWER = re.compile(r"vision|visual|audio|image|tower|projector|connector|merger|resampler")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """One pair of A and B in a file, and the slices of a fused linear that it adapts.

    A projection that is split in the file has one slice. One that is fused there (`qkv_proj`) has
    all slices of its linear: A is shared by them, the rows of B are stacked in their order.
    """

    name: str  # the decoder's own name, whatever the spelling in the file
    file_name: str  # as in the file without `base_model.model.`: what peft's patterns match
    layer: int
    linear: FusedLinear
    slices: tuple[int, ...]
    a: str  # tensor names in the file
    b: str

    @property
    def columns(self) -> slice:
        """The outputs of the linear that B's rows belong to."""
        sizes = self.linear.out_sizes
        return slice(sum(sizes[: self.slices[0]]), sum(sizes[: self.slices[-1] + 1]))

    @property
    def out_features(self) -> int:
        return self.columns.stop - self.columns.start


def find_modules(
    names: Iterable[str], config: ModelConfig
) -> tuple[tuple[AdaptedModule, ...], Findings]:
    """The modules that `names` adapt, sorted by name, and everything that does not fit the model.

    Findings are names of no such module or of a kind that is not supported, half pairs, one module
    under two spellings, and projections that come both fused and split.
    """
    targets, findings = _targets(config), Findings()
    pairs: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        match = _TENSOR.fullmatch(name)
        module = _decoder_name(match[1], config, targets) if match else None
        if module is not None:
            pairs.setdefault(module, {}).setdefault(match[2], []).append(name)
        elif not _TRAINING_ONLY.fullmatch(name):
            findings.setdefault(_refusal(name, config), []).append(quote(name))
    modules = []
    for name, roles in sorted(pairs.items()):
        if any(len(spellings) > 1 for spellings in roles.values()):
            findings.setdefault("stored under two spellings", []).append(quote(name))
        elif len(roles) < 2:
            half = f"{quote(name)} has lora_{next(iter(roles))} alone"
            findings.setdefault("only one of lora_A and lora_B", []).append(half)
        else:
            modules.append(_module(name, roles["A"][0], roles["B"][0], targets))
    _find_overlaps(modules, findings)
    return tuple(modules), findings


def live_tensors(names: Iterable[str], adapter: str) -> dict[str, str]:
    """Names as peft saves them -> names in `names`, for one adapter of a live model's state_dict.

    Names that peft already saved come back as they are. In a state_dict, names without an
    adapter's name in them are the base model's parameters and are left out. Of several adapters
    there, the one called `adapter` is taken.

    Raises ValueError when the choice is open, naming the adapters.
    """
    names = tuple(names)
    if any(_TENSOR.fullmatch(name) for name in names):
        return {name: name for name in names}
    live = {name: match for name in names if (match := _LIVE.fullmatch(name))}
    adapters = sorted({match[2] for match in live.values()})
    if not adapters:
        return {name: name for name in names}
    if len(adapters) > 1 and adapter not in adapters:
        choice = ", ".join(quote(a) for a in adapters)
        raise ValueError(f"the state_dict holds the adapters {choice}: give one of them as name=")
    chosen = adapters[0] if len(adapters) == 1 else adapter
    return {m[1] + (m[3] or ""): name for name, m in live.items() if m[2] == chosen}


def describe(findings: Findings) -> Iterator[str]:
    """Each finding with the number of its items and the first three of them."""
    for what, items in findings.items():
        yield f"{what} ({len(items)}): {', '.join(items[:3])}{', ...' if len(items) > 3 else ''}"


def quote(name: str) -> str:
    """A name for a message: names come from files, and may be long or hold control characters."""
    return repr(name if len(name) <= 200 else f"{name[:200]}...")


Targets = Mapping[tuple[str, str], tuple[FusedLinear, tuple[int, ...]]]


def _targets(config: ModelConfig) -> Targets:
    """(parent, projection) -> the linear and its slices, for split and for fused spellings."""
    targets = {}
    for linear in fused_linears(config):
        if len(linear.children) > 1:
            everything = tuple(range(len(linear.children)))
            targets[linear.parent, f"{linear.name}_proj"] = (linear, everything)
        for i, child in enumerate(linear.children):
            targets[linear.parent, child] = (linear, (i,))
    return targets


def _decoder_name(name: str, config: ModelConfig, targets: Targets) -> str | None:
    match = _MODULE.fullmatch(name.removeprefix(PEFT_PREFIX))
    if match is None or int(match[1]) >= config.num_layers or (match[2], match[3]) not in targets:
        return None
    return f"model.layers.{match[1]}.{match[2]}.{match[3]}"


def _module(name: str, a: str, b: str, targets: Targets) -> AdaptedModule:
    _, _, layer, parent, projection = name.split(".")
    linear, slices = targets[parent, projection]
    return AdaptedModule(
        name=name,
        file_name=a.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight"),
        layer=int(layer),
        linear=linear,
        slices=slices,
        a=a,
        b=b,
    )


def _find_overlaps(modules: Iterable[AdaptedModule], findings: Findings) -> None:
    owners: dict[tuple[int, str, int], str] = {}
    for module in modules:
        for i in module.slices:
            owner = owners.setdefault((module.layer, module.linear.name, i), module.name)
            if owner != module.name:
                both = f"{quote(owner)} and {quote(module.name)}"
                findings.setdefault("fused and split at once", []).append(both)


def _refusal(name: str, config: ModelConfig) -> str:
    """Why a tensor of this name cannot be used, most specific reason first."""
    is_lora = ".lora_" in name
    stem = name.removeprefix(PEFT_PREFIX)
    if is_lora and _TOWER.search(name):
        return "tensors of a vision or audio tower are not supported yet"
    if "lora_magnitude_vector" in name:
        return "DoRA magnitudes (use_dora) are not supported"
    if name.endswith(".lora_B.bias"):
        return "a bias of B (lora_bias) is not supported"
    if name.endswith(".bias"):
        return "trained biases (bias='all' or 'lora_only') are not supported"
    if "lora_embedding_" in name or (is_lora and "embed_tokens" in name):
        return "embedding adapters are not supported yet"
    if is_lora and "lm_head." in name:
        return "lm_head adapters are not supported yet"
    if not is_lora:
        return "weights that are not LoRA (modules_to_save and the like) are not supported"
    if (match := _LIVE.fullmatch(name)) and match[3] == ".weight":
        return "an adapter's name inside, as in state_dict(): save with save_pretrained"
    if (match := _MODULE.match(stem)) and int(match[1]) >= config.num_layers:
        return f"no such layer, the model has {config.num_layers}"
    return "no such module in this model"
