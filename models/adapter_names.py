"""From the tensor names of an adapter file to the linears of the decoder and of a tower.

One decoder has several spellings: peft puts `base_model.model.` before every name, and the same
language model sits under another parent inside a multimodal wrapper, as a tower does. Names decide
what is adapted; a name that means nothing here is a finding, never skipped in silence.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from purestep.models.config import FusedLinear, ModelConfig, fused_linears, vocab_linears
from purestep.models.tensor_files import TOWER, plain_name

PEFT_PREFIX = "base_model.model."
DECODER_PREFIXES = (
    "model.",
    "model.language_model.",  # transformers since 4.52, saved from the model with the head
    "language_model.model.",  # before
    "language_model.",  # saved from the model without it
    "model.text_model.",  # Idefics3
    "text_model.",
)

Findings = dict[str, list[str]]  # what is wrong -> the items it is wrong with

EMBED, HEAD = "model.embed_tokens", "lm_head"

_TENSOR = re.compile(r"((?:(?!\.lora_).)+)\.lora_(?:([AB])\.weight|embedding_([AB]))")
_BASE_COPY = re.compile(r"(.+)\.base_layer\.weight")
_PREFIXES = "|".join(map(re.escape, DECODER_PREFIXES))
_MODULE = re.compile(rf"(?:{_PREFIXES})layers\.(0|[1-9][0-9]{{0,8}})\.([a-z_]+)\.([a-z_]+)")
_VOCAB = {
    EMBED: re.compile(rf"(?:{_PREFIXES})embed_tokens"),
    HEAD: re.compile(r"(?:language_model\.)?lm_head"),
}
# Buffers that peft saves beside A and B, for training alone (see adapter_config.IGNORED).
_TRAINING_ONLY = re.compile(r".+\.(lora_velora_embed|lora_monteclora_sampler\.[a-z_]+)")
# What peft names after the adapter in a live model's state_dict: `lora_A.default.weight`.
_LIVE = re.compile(r"(.+?\.(?:lora_\w+|modules_to_save|trainable_tokens_\w+))\.([^.]+)(\..+)?")
_MEDIA = re.compile(r"vision|visual|audio|image|tower|projector|connector|merger|resampler")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """One pair of A and B in a file, and the slices of a fused linear that it adapts.

    A projection that is split in the file has one slice. One that is fused there (`qkv_proj`) has
    all slices of its linear: A is shared by them, the rows of B are stacked in their order.
    """

    name: str  # the decoder's or the tower's own name, whatever the spelling in the file
    file_name: str  # as in the file without `base_model.model.`: what peft's patterns match
    layer: int  # 0 for the embedding, the head and what belongs to a tower
    linear: FusedLinear
    slices: tuple[int, ...]
    a: str  # tensor names in the file
    b: str
    base_copy: str | None  # of the embedding and the head: their base weight, which peft may add

    @property
    def columns(self) -> slice:
        """The outputs of the linear that B's rows belong to."""
        sizes = self.linear.out_sizes
        return slice(sum(sizes[: self.slices[0]]), sum(sizes[: self.slices[-1] + 1]))

    @property
    def out_features(self) -> int:
        return self.columns.stop - self.columns.start


def find_modules(
    names: Iterable[str], config: ModelConfig, tower: Sequence[FusedLinear] = ()
) -> tuple[tuple[AdaptedModule, ...], Findings]:
    """The modules that `names` adapt, sorted by name, and everything that does not fit the model;
    `tower` are the linears of the program's tower (`tower_linears`).

    Findings are names of no such module or of a kind that is not supported, half pairs, one module
    under two spellings, and projections that come both fused and split.
    """
    targets, findings = _targets(config) | _tower_targets(tower), Findings()
    pairs: dict[str, dict[str, list[str]]] = {}
    copies: dict[str, list[str]] = {}
    for name in sorted(names):
        if (match := _BASE_COPY.fullmatch(name)) and (module := _vocab_name(match[1])):
            copies.setdefault(module, []).append(name)
            continue
        match = _TENSOR.fullmatch(name)
        module = _module_name(match[1], config, targets) if match else None
        if module is not None and (module == EMBED) == (match[3] is not None):
            pairs.setdefault(module, {}).setdefault(match[2] or match[3], []).append(name)
        elif not _TRAINING_ONLY.fullmatch(name):
            findings.setdefault(_refusal(name, config, tower), []).append(quote(name))
    modules = []
    for name, roles in sorted(pairs.items()):
        copied = copies.pop(name, [])
        if any(len(spellings) > 1 for spellings in (*roles.values(), copied)):
            findings.setdefault("stored under two spellings", []).append(quote(name))
        elif len(roles) < 2:
            half = f"{quote(name)} has lora_{next(iter(roles))} alone"
            findings.setdefault("only one of lora_A and lora_B", []).append(half)
        else:
            base_copy = copied[0] if copied else None
            modules.append(_module(name, roles["A"][0], roles["B"][0], base_copy, targets))
    for spellings in copies.values():
        strays = map(quote, spellings)
        findings.setdefault("base weights of modules without lora_A and lora_B", []).extend(strays)
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


Targets = Mapping[str, tuple[FusedLinear, tuple[int, ...]]]


def _targets(config: ModelConfig) -> Targets:
    """The end of a module's name -> the linear and its slices, for split and fused spellings."""
    targets = {linear.children[0]: (linear, (0,)) for linear in vocab_linears(config)}
    for linear in fused_linears(config):
        if len(linear.children) > 1:
            everything = tuple(range(len(linear.children)))
            targets[f"{linear.parent}.{linear.name}_proj"] = (linear, everything)
        for i, child in enumerate(linear.children):
            targets[f"{linear.parent}.{child}"] = (linear, (i,))
    return targets


def _tower_targets(tower: Sequence[FusedLinear]) -> Targets:
    return {child: (linear, (i,)) for linear in tower for i, child in enumerate(linear.children)}


def _module_name(name: str, config: ModelConfig, targets: Targets) -> str | None:
    if (module := _vocab_name(name)) is not None:
        return module
    own = plain_name(name.removeprefix(PEFT_PREFIX))
    if TOWER.fullmatch(own):
        return own if own in targets else None
    match = _MODULE.fullmatch(name.removeprefix(PEFT_PREFIX))
    if match is None or int(match[1]) >= config.num_layers:
        return None
    if f"{match[2]}.{match[3]}" not in targets:
        return None
    return f"model.layers.{match[1]}.{match[2]}.{match[3]}"


def _vocab_name(name: str) -> str | None:
    stem = name.removeprefix(PEFT_PREFIX)
    return next((module for module, names in _VOCAB.items() if names.fullmatch(stem)), None)


def _module(name: str, a: str, b: str, base_copy: str | None, targets: Targets) -> AdaptedModule:
    match = _MODULE.fullmatch(name)
    layer, key = (int(match[1]), f"{match[2]}.{match[3]}") if match else (0, name)
    linear, slices = targets[key] if key in targets else targets[name.split(".")[-1]]
    return AdaptedModule(
        name=name,
        file_name=_TENSOR.fullmatch(a.removeprefix(PEFT_PREFIX))[1],
        layer=layer,
        linear=linear,
        slices=slices,
        a=a,
        b=b,
        base_copy=base_copy,
    )


def _find_overlaps(modules: Iterable[AdaptedModule], findings: Findings) -> None:
    owners: dict[tuple[int, str, int], str] = {}
    for module in modules:
        for i in module.slices:
            owner = owners.setdefault((module.layer, module.linear.name, i), module.name)
            if owner != module.name:
                both = f"{quote(owner)} and {quote(module.name)}"
                findings.setdefault("fused and split at once", []).append(both)


def _refusal(name: str, config: ModelConfig, tower: Sequence[FusedLinear]) -> str:
    """Why a tensor of this name cannot be used, most specific reason first."""
    is_lora = ".lora_" in name
    stem = name.removeprefix(PEFT_PREFIX)
    if is_lora and not tower and _MEDIA.search(name):
        return "tensors of a vision or audio tower, which this program does not have"
    if "lora_magnitude_vector" in name:
        return "DoRA magnitudes (use_dora) are not supported"
    if name.endswith(".lora_B.bias"):
        return "a bias of B (lora_bias) is not supported"
    if name.endswith(".bias"):
        return "trained biases (bias='all' or 'lora_only') are not supported"
    match = _TENSOR.fullmatch(name)
    if match and match[1].endswith("embed_tokens") == (match[3] is None):
        return "lora_embedding_A and lora_embedding_B belong to embed_tokens, and to it alone"
    if not is_lora:
        return "weights that are not LoRA (modules_to_save and the like) are not supported"
    if (match := _LIVE.fullmatch(name)) and match[3] == ".weight":
        return "an adapter's name inside, as in state_dict(): save with save_pretrained"
    if (match := _MODULE.match(stem)) and int(match[1]) >= config.num_layers:
        return f"no such layer, the model has {config.num_layers}"
    if _MEDIA.search(name):
        return "no such linear in the tower or the projector, and of these nothing else is adapted"
    return "no such module in this model"
