"""Adapter files against PEFT's own deltas, and everything that must be refused by name.

PEFT makes the adapters (init_lora_weights=False, so that B is not zero); some are then edited by
hand. `delta` is scaling * B @ A of one projection, [out, in]. Cases: lora-files and LK-07.
"""

import atexit
import copy
import json
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from peft import get_peft_model_state_dict
from peft.tuners.lora import config as lora_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from purestep.models.adapter_files import Adapter, adapter_from_tensors, read_adapter
from purestep.models.config import fused_linears, vocab_linears
from purestep.state.errors import AdapterError
from tests.models.peft_fixtures import (
    deltas,
    make_adapter,
    model_config,
    save,
    tiny_llama,
    tiny_qwen2,
    wrap,
)
from tests.models.tiny import SIZES

LLAMA = tiny_llama()
CONFIG = model_config(LLAMA)
PROJECTIONS = [
    f"{linear.parent}.{child}" for linear in fused_linears(CONFIG) for child in linear.children
]
MODULES = [f"model.layers.{i}.{p}" for i in range(CONFIG.num_layers) for p in PROJECTIONS]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def load_weights(model: Any, **options: Any) -> dict[str, Tensor]:
    return load_file(make_adapter(model, **options) / "adapter_model.safetensors")


# One adapter of rank 4 and scaling 2 on q_proj and v_proj, for the tests that edit or damage it.
PLAIN = {
    suffix: make_adapter(LLAMA, seed=17, safe_serialization=suffix == "safetensors")
    for suffix in ("safetensors", "bin")
}
PLAIN_TENSORS = load_file(PLAIN["safetensors"] / "adapter_model.safetensors")
PLAIN_DELTAS = deltas(wrap(LLAMA, seed=17))


def plain_config(**fields: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | fields


def plain_adapter(suffix: str = "safetensors") -> Path:
    """A copy of the plain adapter's folder, to be edited."""
    path = Path(tempfile.mkdtemp(prefix="purestep-adapter-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return shutil.copytree(PLAIN[suffix], path, dirs_exist_ok=True)


def read(folder: Path, **options: Any) -> Adapter:
    return read_adapter(folder, CONFIG, **{"dtype": torch.float32, "max_rank": None} | options)


def from_tensors(tensors: Mapping[str, Tensor], config: Any, **options: Any) -> Adapter:
    options = {"dtype": torch.float32, "max_rank": None} | options
    return adapter_from_tensors(tensors, config, CONFIG, **options)


def edit_config(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path)
    return folder


def rename(folder: Path, old: str, new: str) -> Path:
    return edit_tensors(folder, lambda ts: {n.replace(old, new): t for n, t in ts.items()})


def products(adapter: Adapter) -> dict[str, Tensor]:
    """The delta of every module of the model, in float64, read off the arenas."""
    found = {}
    for linear, name in zip(vocab_linears(CONFIG), ("model.embed_tokens", "lm_head"), strict=True):
        found[name] = torch.zeros(linear.out_features, linear.in_features, dtype=torch.float64)
        if (arena := adapter.arenas.get(linear.name)) is not None:
            assert len(arena.a_LSRD) == len(arena.b_LRO) == 1
            found[name] += arena.b_LRO[0].double().T @ arena.a_LSRD[0, 0].double()
    for linear in fused_linears(CONFIG):
        arena = adapter.arenas.get(linear.name)
        for layer in range(CONFIG.num_layers):
            start = 0
            for s, (child, size) in enumerate(zip(linear.children, linear.out_sizes, strict=True)):
                delta = torch.zeros(size, linear.in_features, dtype=torch.float64)
                if arena is not None:
                    b_RO = arena.b_LRO[layer, :, start : start + size].double()
                    delta = b_RO.T @ arena.a_LSRD[layer, s].double()
                found[f"model.layers.{layer}.{linear.parent}.{child}"] = delta
                start += size
    return found


def assert_deltas(adapter: Adapter, want: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    """The arenas hold these deltas, and exactly nothing for every other module."""
    got = products(adapter)
    assert set(want) <= set(got)
    for module, delta in got.items():
        if module in want:
            assert want[module].any()  # or the comparison would say nothing
            scale = want[module].abs().max().item()
            torch.testing.assert_close(delta, want[module], rtol=0, atol=tolerance * scale)
        else:
            assert not delta.any(), module


def assert_same(one: Adapter, other: Adapter) -> None:
    assert one.version == other.version
    for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
        assert torch.equal(a, b)


def refusal(act: Callable[[], Any], *words: str) -> str:
    """The message of the AdapterError that `act` raises; it holds each of `words`."""
    with pytest.raises(AdapterError) as caught:
        act()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message


def reason_to_refuse(act: Callable[[], Any]) -> str | None:
    """The message of the AdapterError that `act` raises, if it does; others pass through."""
    try:
        act()
    except AdapterError as error:
        return str(error)
    return None


# What is computed


@pytest.mark.parametrize(("use_rslora", "scale"), [(True, 4.0), (False, 1.0)])
def test_rank_stabilised_scaling(use_rslora, scale):
    """LF-01: r=16, alpha=16 scales by 4 with use_rslora and by 1 without."""
    model = wrap(LLAMA, seed=1, r=16, lora_alpha=16, use_rslora=use_rslora)
    adapter = read(save(model))
    assert model.base_model.model.model.layers[0].self_attn.q_proj.scaling == {"default": scale}
    assert_deltas(adapter, deltas(model))
    assert adapter.rank == 16
    b_LRO = adapter.arenas["qkv"].b_LRO
    raw = model.state_dict()[f"{Q0}.lora_B.default.weight"]
    torch.testing.assert_close(b_LRO[0, :, : CONFIG.q_size], scale * raw.T)


def test_the_flag_alone_makes_another_adapter():
    """LF-01: the same weight file with and without use_rslora gives other deltas and versions."""
    folder = make_adapter(LLAMA, seed=1, r=16, lora_alpha=16)
    plain = read(folder)
    stabilised = read(edit_config(folder, use_rslora=True))
    assert plain.version != stabilised.version
    delta = products(plain)[MODULES[0]]
    torch.testing.assert_close(products(stabilised)[MODULES[0]], 4 * delta)


def test_patterns_of_the_specification():
    """multi_lora.md 4.2: q_proj r=8, s=8; v_proj r=16, s=2; rank and alpha looked up apart."""
    model = wrap(
        LLAMA,
        seed=2,
        r=16,
        lora_alpha=32,
        rank_pattern={"self_attn.q_proj": 8},
        alpha_pattern={"q_proj": 64},
    )
    attention = model.base_model.model.model.layers[0].self_attn
    assert (attention.q_proj.scaling["default"], attention.v_proj.scaling["default"]) == (8.0, 2.0)
    adapter = read(save(model))
    assert_deltas(adapter, deltas(model))
    assert adapter.rank == 16
    assert not adapter.arenas["qkv"].a_LSRD[:, 0, 8:].any()  # q has 8 rows of its own


def test_the_first_pattern_that_matches_wins():
    """multi_lora.md 4.2: keys are tried in file order, from the name's start, to its end."""
    tensors = {n: t for n, t in load_weights(LLAMA, seed=3).items() if "q_proj" in n}
    patterns = {"proj": 999.0, "q_pro": 999.0, "layers.1.*": 12.0, "q_proj": 20.0, ".*": 999.0}
    adapter = from_tensors(
        tensors, plain_config(target_modules="all-linear", alpha_pattern=patterns)
    )
    reference = from_tensors(tensors, plain_config(target_modules="all-linear", lora_alpha=4))
    got, unscaled = products(adapter), products(reference)
    for layer, scaling in ((0, 5.0), (1, 3.0)):
        module = f"model.layers.{layer}.self_attn.q_proj"
        torch.testing.assert_close(got[module], scaling * unscaled[module])


@pytest.mark.parametrize(
    "partial",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["k_proj"]},
        {"target_modules": ["v_proj"]},
        {"target_modules": ["q_proj", "k_proj"]},
        {"target_modules": ["gate_proj"]},
        {"target_modules": ["o_proj", "down_proj"]},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_partial_coverage(partial):
    """LF-11, LF-21: absent projections and layers of a fused linear get exactly no delta."""
    model = wrap(LLAMA, seed=4, **partial)
    adapter = read(save(model))
    assert_deltas(adapter, deltas(model))
    assert adapter.modules == tuple(sorted(deltas(model)))
    assert adapter.num_tensors == 2 * len(adapter.modules)
    assert adapter.unused_targets == ()


def test_biased_projections_of_the_base_model():
    """LF-16: bias="none" works on a model whose q/k/v have biases (T-QWEN2)."""
    model = wrap(tiny_qwen2(), seed=5, target_modules=["q_proj", "k_proj", "v_proj"])
    assert_deltas(read(save(model)), deltas(model))


@pytest.mark.parametrize("r", [1, 5, 8, 9, 64])
def test_layout(r):
    """Design 4: arenas are contiguous, rows are padded with zeros to a multiple of 8."""
    adapter = read(make_adapter(LLAMA, seed=6, r=r))
    R = -(-r // 8) * 8
    arena = adapter.arenas["qkv"]
    assert set(adapter.arenas) == {"qkv"}
    assert arena.a_LSRD.shape == (2, 3, R, 32)
    assert arena.b_LRO.shape == (2, R, 64)
    assert arena.a_LSRD.is_contiguous()
    assert arena.b_LRO.is_contiguous()
    assert not arena.a_LSRD[:, :, r:].any()
    assert not arena.b_LRO[:, r:].any()
    assert adapter.rank == r
    assert adapter.nbytes == 4 * (2 * 3 * R * 32 + 2 * R * 64)
    assert len(adapter.version) == 64
    leaves, structure = pytree.tree_flatten(adapter)
    assert_same(pytree.tree_unflatten(leaves, structure), adapter)


@pytest.mark.parametrize(
    ("field", "kind"),
    [("velora_config", "VeloraConfig"), ("monteclora_config", "MontecloraConfig")],
)
def test_variants_that_only_train_differently(field, kind):
    """Their forward pass in eval mode is plain LoRA; the extra buffers they save are known."""
    if not hasattr(lora_config, kind):
        pytest.skip(f"this peft has no {kind}")
    model = wrap(LLAMA, seed=7, **{field: getattr(lora_config, kind)()})
    folder = save(model)
    extra = [n for n in load_file(folder / "adapter_model.safetensors") if ".lora_" in n]
    assert any("embed" in n or "sampler" in n for n in extra)
    adapter = read(folder)
    assert_deltas(adapter, deltas(model))
    assert_same(from_tensors(model.state_dict(), model.peft_config["default"]), adapter)
    token_1T = torch.arange(9)[None]
    with torch.no_grad():
        got = model(token_1T).logits
        merged = copy.deepcopy(LLAMA)
        for module in adapter.modules:
            merged.get_submodule(module).weight += products(adapter)[module].float()
        torch.testing.assert_close(got, merged(token_1T).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scaling_is_folded_before_the_cast(stored, dtype):
    """LK-07: B is scaled in float32 and rounded once; scaling 1/3 would round twice otherwise."""
    tensors = {n: t.to(stored) for n, t in load_weights(LLAMA, seed=8, r=3).items()}
    adapter = from_tensors(tensors, plain_config(r=3, lora_alpha=1), dtype=dtype)
    arena = adapter.arenas["qkv"]
    a, b = tensors[f"{Q0}.lora_A.weight"], tensors[f"{Q0}.lora_B.weight"]
    assert arena.a_LSRD.dtype == arena.b_LRO.dtype == dtype
    assert torch.equal(arena.a_LSRD[0, 0, :3], a.to(dtype))
    assert torch.equal(arena.b_LRO[0, :3, :32], (b.float() * (1 / 3)).to(dtype).T)


COVERAGE = st.dictionaries(
    st.sampled_from(MODULES),
    st.tuples(st.integers(1, 20), st.integers(1, 64)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=COVERAGE, use_rslora=st.booleans(), seed=st.integers(0, 99))
def test_any_mix_of_ranks_and_modules(chosen, use_rslora, seed):
    """LF-01, LF-11: random modules, each of its own rank and alpha, equal PEFT's deltas."""
    model = wrap(
        LLAMA,
        seed=seed,
        target_modules=sorted(chosen),
        rank_pattern={m: r for m, (r, _) in chosen.items()},
        alpha_pattern={m: a for m, (_, a) in chosen.items()},
        use_rslora=use_rslora,
    )
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    adapter = from_tensors(tensors, model.peft_config["default"])
    assert_deltas(adapter, deltas(model))
    assert adapter.rank == max(r for r, _ in chosen.values())
    assert adapter.modules == tuple(sorted(chosen))


# Spellings


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
@pytest.mark.parametrize(
    "targets",
    [
        r".*layers\.[01]\.self_attn\.(q|v)_proj",
        "all-linear",
        ["q_proj", "v_proj"],
        [m for m in MODULES if m.endswith(("q_proj", "v_proj"))],
        ["self_attn.q_proj", "v_proj"],
    ],
    ids=["regex", "all-linear", "short", "full", "mixed"],
)
def test_spellings_of_target_modules(targets, suffix):
    """LF-07, LF-15: the weight file decides; every spelling and format gives one adapter."""
    want = read(plain_adapter())
    folder = edit_config(
        plain_adapter("safetensors" if suffix == "safetensors" else "bin"),
        target_modules=targets,
    )
    if suffix == "pt":
        (folder / "adapter_model.bin").rename(folder / "adapter_model.pt")
    assert (folder / f"adapter_model.{suffix}").is_file()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(read(folder), want)


@pytest.mark.parametrize(
    ("targets", "unused"),
    [
        (["q_proj", "v_proj", "w_pack", "proj"], ("proj", "w_pack")),
        (r".*\.h\..*", (r".*\.h\..*",)),
        ("(", ("(",)),
    ],
    ids=str,
)
def test_targets_without_weights_are_reported(targets, unused):
    """multi_lora.md 4.2: modules that are listed and found nowhere give a warning, no error."""
    folder = edit_config(plain_adapter(), target_modules=targets)
    with pytest.warns(UserWarning, match="'sql'.*target_modules without weights") as caught:
        adapter = read(folder, name="sql")
    assert caught[0].filename == __file__
    assert adapter.unused_targets == unused


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.",
        "model.",
        "model.language_model.",
        "language_model.model.",
        "base_model.model.model.language_model.",
        "base_model.model.language_model.model.",
        "language_model.",
        "base_model.model.language_model.",
    ],
)
def test_wrapper_spellings(prefix):
    """LF-09: the decoder has several spellings; all give one adapter, its version included."""
    want = read(plain_adapter())
    folder = rename(plain_adapter(), "base_model.model.model.", prefix)
    assert_same(read(folder), want)


def test_mixed_spellings():
    """LF-09: the version does not depend on how each module is spelled."""
    want = read(plain_adapter())
    folder = rename(plain_adapter(), "base_model.model.model.layers.0", "model.layers.0")
    assert_same(read(folder), want)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_full_target_names_of_a_wrapper(prefix):
    """LF-09: target_modules may name modules as the file spells them, or as the decoder does."""
    folder = rename(plain_adapter(), "base_model.model.model.", "model.language_model.")
    targets = [f"{prefix}layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"]
    assert read(edit_config(folder, target_modules=targets)).unused_targets == ()


def test_patterns_match_the_spelling_of_the_file():
    """LF-09, multi_lora.md 4.2: patterns see the file's name, before it is mapped to ours."""
    tensors = {
        n.replace("base_model.model.model.", "base_model.model.model.language_model."): t
        for n, t in load_weights(LLAMA, seed=10).items()
    }
    pattern = {"^model.language_model.layers.0.self_attn.q_proj": 80}
    adapter = from_tensors(tensors, plain_config(alpha_pattern=pattern))
    plain = products(from_tensors(tensors, plain_config()))
    for module, delta in products(adapter).items():
        factor = 10 if module == MODULES[0] else 1
        torch.testing.assert_close(delta, factor * plain[module])


def test_one_module_under_two_spellings():
    """LF-09: two spellings of one module in a file are refused, whichever would win."""
    folder = edit_tensors(
        plain_adapter(),
        lambda ts: ts | {n.removeprefix("base_model.model."): t + 1 for n, t in ts.items()},
    )
    refusal(lambda: read(folder), "two spellings (4)", "'model.layers.0.self_attn.q_proj'")


# Fused projections


def phi3() -> Phi3ForCausalLM:
    return untrained(Phi3ForCausalLM, Phi3Config(**SIZES, pad_token_id=0))


def untrained(cls: type[PreTrainedModel], config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        return cls(config)


def test_fused_projections_of_the_file():
    """LF-21: qkv_proj and gate_up_proj of a Phi-3 adapter are cut into their slices."""
    model = wrap(phi3(), seed=11, target_modules=["qkv_proj", "gate_up_proj", "o_proj"])
    folder = save(model)
    want = {}
    for name, delta in deltas(model).items():
        if name.endswith("o_proj"):
            want[name] = delta
            continue
        stem, fused = name.rsplit(".", 1)
        linear = next(x for x in fused_linears(CONFIG) if f"{x.name}_proj" == fused)
        parts = delta.split(linear.out_sizes)
        want |= {f"{stem}.{child}": d for child, d in zip(linear.children, parts, strict=True)}
    adapter = read(folder)
    assert_deltas(adapter, want)
    assert "model.layers.0.self_attn.qkv_proj" in adapter.modules
    arena = adapter.arenas["qkv"]
    assert torch.equal(arena.a_LSRD[:, 0], arena.a_LSRD[:, 2])  # one A for all slices


def test_fused_and_split_at_once():
    """LF-21: a linear that comes both fused and split is refused."""
    folder = make_adapter(phi3(), seed=11, target_modules=["qkv_proj"])
    split = load_weights(LLAMA, seed=1, target_modules=["v_proj"], layers_to_transform=[1])
    edit_tensors(folder, lambda ts: ts | split)
    refusal(lambda: read(folder), "fused and split at once (1)", "layers.1.self_attn.qkv_proj")


# Names that do not fit


def test_renamed_keys():
    """LF-08: keys of another model are refused, with samples and counts."""
    folder = rename(plain_adapter(), "model.layers", "transformer.h")
    refusal(
        lambda: read(folder, name="sql"),
        "'sql'",
        "0 of 8 tensors",
        "no such module in this model (8)",
        "base_model.model.transformer.h.0.self_attn.q_proj.lora_A.weight",
    )


def test_messages_do_not_depend_on_the_order_of_keys():
    """LF-08: equal files are refused in equal words."""
    tensors = {n.replace("layers.1", "h.1"): t for n, t in PLAIN_TENSORS.items()}
    backwards = dict(reversed(tensors.items()))
    message = refusal(lambda: from_tensors(tensors, plain_config()))
    assert refusal(lambda: from_tensors(backwards, plain_config())) == message


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("model.layers.1.", "transformer.h.1.", "no such module in this model (4)"),
        ("model.layers.1.", "model.layers.2.", "no such layer, the model has 2 (4)"),
        ("layers.1.self_attn", "layers.1.mlp", "no such module in this model (4)"),
        ("layers.1.self_attn.q_proj", "layers.1.self_attn.out_proj", "no such module"),
        ("layers.1.", "layers.01.", "no such module in this model (4)"),
        ("layers.1.", f"layers.{'9' * 5000}.", "no such module in this model (4)"),
        ("layers.1.self_attn.", "layers.1.self_attn.\n", "no such module in this model (4)"),
    ],
)
def test_partly_renamed_keys(old, new, why):
    """LF-08: one layer whose names do not exist makes the whole file unusable."""
    folder = rename(plain_adapter(), old, new)
    message = refusal(lambda: read(folder), " of 8 tensors", why)
    assert len(message) < 2000


def test_vision_tower():
    """LF-23: short target names that also hit the tower are refused where there is none, with the
    tensors counted."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
    )
    config = LlavaConfig(
        text_config=LlamaConfig(**SIZES), vision_config=vision, image_token_index=5
    )
    llava = untrained(LlavaForConditionalGeneration, config)
    folder = make_adapter(llava, seed=13, target_modules=["q_proj"])
    refusal(lambda: read(folder), "4 of 8 tensors", "vision or audio tower", "(4)", "vision_tower")

    language = r".*language_model\..*\.q_proj"
    model = wrap(llava, seed=13, target_modules=language)
    want = {n.replace("language_model.", ""): d for n, d in deltas(model).items()}
    assert_deltas(read(save(model)), want)


# The embedding and the head. peft warns that it saves their base weights too.

VOCAB = ["q_proj", "embed_tokens", "lm_head"]
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


@cache
def vocab_folder() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_adapter(LLAMA, seed=14, target_modules=VOCAB)


def vocab_adapter() -> Path:
    """A copy of an adapter on q_proj, the embedding and the head, to be edited."""
    path = Path(tempfile.mkdtemp(prefix="purestep-adapter-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return shutil.copytree(vocab_folder(), path, dirs_exist_ok=True)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"], "use_rslora": True},
        {"target_modules": ["model.embed_tokens", "lm_head"]},
        {"target_modules": r".*(embed_tokens|lm_head|up_proj)"},
        {
            "target_modules": VOCAB,
            "rank_pattern": {"embed_tokens": 3, "lm_head": 9},
            "alpha_pattern": {"model.embed_tokens": 5, "lm_head": 6},
        },
    ],
    ids=str,
)
def test_head_and_embedding_adapters(fields, tied):
    """LF-06: as peft computes them, saved with and without base weights or taken live."""
    model = wrap(tiny_llama(tie_word_embeddings=tied), seed=14, **fields)
    want, config = deltas(model), model.peft_config["default"]
    folder = save(model)
    adapter = read(folder)
    assert_deltas(adapter, want)
    assert adapter.modules == tuple(sorted(want))
    assert adapter.num_tensors == 2 * len(want)
    assert adapter.rank == max(config.rank_pattern.values(), default=4)
    assert adapter.unused_targets == ()
    assert_same(from_tensors(model.state_dict(), config), adapter)
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert len(saved) <= len(load_file(folder / "adapter_model.safetensors"))
    assert_same(from_tensors(saved, config), adapter)


def test_a_tied_adapter_is_stored_as_two_pairs():
    """ensure_weight_tying: the head's A is the embedding's B, transposed, and both are saved."""
    model = tiny_llama(tie_word_embeddings=True)
    tied = make_adapter(model, seed=14, target_modules=["lm_head"], ensure_weight_tying=True)
    got = products(read(tied))
    assert got["lm_head"].any()
    assert torch.equal(got["lm_head"], got["model.embed_tokens"].T)


@pytest.mark.parametrize(
    ("decoder", "head"),
    [
        ("model.", "lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("base_model.model.model.language_model.", "base_model.model.lm_head."),
        ("base_model.model.language_model.model.", "base_model.model.language_model.lm_head."),
        ("base_model.model.language_model.", "base_model.model.lm_head."),
    ],
)
def test_wrapper_spellings_of_head_and_embedding(decoder, head):
    """LF-09: copies of base weights are known under every spelling too."""
    want = read(vocab_adapter())
    folder = rename(vocab_adapter(), "base_model.model.model.", decoder)
    assert_same(read(rename(folder, f"{HEAD}.", head)), want)


def test_every_value_of_the_embedding_is_in_the_version():
    """One bit of one value; a copy of the base weight is no part of the adapter."""

    def change(name: str, place: tuple[int, ...]) -> Adapter:
        def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            value = tensors[name][place].clone()
            tensors[name][place] = torch.nextafter(value, torch.tensor(9.0))
            return tensors

        return read(edit_tensors(vocab_adapter(), edit))

    want = read(vocab_adapter()).version
    versions = {
        change(f"{EMBED}.lora_embedding_A", (3, 127)).version,
        change(f"{EMBED}.lora_embedding_B", (31, 0)).version,
        change(f"{HEAD}.lora_A.weight", (0, 5)).version,
        change(f"{HEAD}.lora_B.weight", (127, 3)).version,
    }
    assert len(versions | {want}) == 5
    assert change(f"{EMBED}.base_layer.weight", (0, 0)).version == want


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        (f"{EMBED}.lora_embedding_A", (4, 130), [4, 128]),
        (f"{EMBED}.lora_embedding_A", (4, 127), [4, 128]),
        (f"{EMBED}.lora_embedding_A", (128, 4), [4, 128]),
        (f"{EMBED}.lora_embedding_B", (31, 4), [32, 4]),
        (f"{EMBED}.lora_embedding_B", (32, 5), [32, 4]),
        (f"{EMBED}.base_layer.weight", (130, 32), [128, 32]),
        (f"{HEAD}.lora_A.weight", (4, 64), [4, 32]),
        (f"{HEAD}.lora_B.weight", (130, 4), [128, 4]),
        (f"{HEAD}.base_layer.weight", (130, 32), [128, 32]),
    ],
)
def test_wrong_shapes_of_head_and_embedding(name, shape, want):
    """multi_lora.md 4.7, LF-14: another vocabulary or width, a resized base weight among them."""
    folder = edit_tensors(vocab_adapter(), lambda ts: ts | {name: torch.zeros(shape)})
    refusal(lambda: read(folder), f"wrong shape (1): '{name}' is {list(shape)}", f"be {want} (r=4)")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (".lora_embedding_A", ".lora_A.weight", ["lora_embedding_A and lora_embedding_B belong"]),
        ("lm_head.lora_B.weight", "lm_head.lora_embedding_B", ["to embed_tokens, and to it alone"]),
        ("0.self_attn.q_proj.lora_A.weight", "0.self_attn.q_proj.lora_embedding_A", ["it alone"]),
        (".lora_embedding_B", ".lora_embedding_C", ["no such module"]),
        ("lm_head.lora_A", "head.lora_A", ["no such module", "'lm_head' has lora_B alone"]),
        (".model.embed_tokens.lora", ".embed_tokens.lora", ["no such module", "base weights of"]),
        ("lm_head.base_layer", "q.base_layer", ["weights that are not LoRA", "q.base_layer"]),
        ("lm_head.base_layer.weight", "lm_head.weight", ["modules_to_save", "lm_head.weight"]),
    ],
)
def test_wrong_names_of_head_and_embedding(old, new, words):
    """LF-08: half pairs, the wrong kind, base weights that belong to nothing."""
    refusal(lambda: read(rename(vocab_adapter(), old, new)), *words)


def test_two_spellings_of_head_and_embedding():
    for name in (f"{EMBED}.lora_embedding_A", f"{HEAD}.lora_B.weight", f"{HEAD}.base_layer.weight"):
        other = name.removeprefix("base_model.model.")
        folder = edit_tensors(vocab_adapter(), lambda ts, n=name, o=other: ts | {o: ts[n].clone()})
        refusal(
            lambda f=folder: read(f), "stored under two spellings (1)", other.split(".lora")[0][:7]
        )


def test_a_live_model_of_two_adapters_with_embeddings():
    """The adapter's name in a state_dict: `lora_embedding_A.default`, without `.weight`."""
    model = wrap(LLAMA, seed=14, target_modules=VOCAB)
    with torch.random.fork_rng(devices=[]):
        model.add_adapter("other", model.peft_config["default"])
    for name in ("default", "other"):
        live = from_tensors(model.state_dict(), model.peft_config[name], name=name)
        assert_deltas(live, deltas(model, name))


# Settings that are refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True, "target_modules": ["q_proj", "down_proj"]}, ["use_dora=True"]),
        (
            {"modules_to_save": ["lm_head", "embed_tokens"]},
            ["modules_to_save=['lm_head', 'embed_tokens']", "it replaces whole modules"],
        ),
        ({"bias": "lora_only"}, ["bias='lora_only'"]),
        ({"bias": "all"}, ["bias='all'"]),
        ({"lora_bias": True}, ["lora_bias=True"]),
        ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices=[1, 2]"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'"]),
        ({"init_lora_weights": "olora"}, ["init_lora_weights='olora'"]),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_peft_features_that_are_refused(fields, words):
    """LF-03, LF-04, LF-16: as PEFT itself saves them, refused by the setting's name."""
    folder = make_adapter(tiny_qwen2(), seed=15, **fields)
    refusal(lambda: read(folder, name="sql"), "'sql'", *words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "trained biases (bias="),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_tokens_delta"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_config_that_hides_them(fields, words):
    """LF-03, LF-04, LF-16: the tensors give them away when the config does not."""
    folder = make_adapter(tiny_qwen2(), seed=15, **fields)
    hidden = dict.fromkeys(fields) | {"bias": "none"}
    edit_config(folder, **hidden)
    refusal(lambda: read(folder), words)
    model = wrap(tiny_qwen2(), seed=15, **fields)
    config = model.peft_config["default"].to_dict() | hidden
    if "bias" not in fields:  # a trained bias of a live model looks like any other
        refusal(lambda: from_tensors(model.state_dict(), config), words)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_replication", [[0, 2], [1, 2]]),
        ("alora_invocation_tokens", [1, 2]),
        ("kasa_config", {}),
        ("arrow_config", {"top_k": 3}),
        ("use_bdlora", {"nblocks": 2}),
        ("use_qalora", True),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("peft_type", "ADALORA"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
    ],
)
def test_settings_that_are_refused(field, value):
    """multi_lora.md 4.2: what changes the forward pass or the base weights is refused by name."""
    folder = edit_config(plain_adapter(), **{field: value})
    refusal(lambda: read(folder), field)


@pytest.mark.parametrize(
    "fields",
    [{"init_lora_weights": value} for value in (True, "gaussian", "eva", "orthogonal", "mica")]
    + [
        {"modules_to_save": []},
        {"lora_dropout": 0.1, "fan_in_fan_out": True, "task_type": "CAUSAL_LM"},
        {"layers_to_transform": [0, 1], "exclude_modules": ["k_proj"]},
        {"rank_pattern": None, "alpha_pattern": None, "bias": None},
        {"some_future_flag": False, "other_future_flag": None, "third": {}},
        {"base_model_name_or_path": "/nowhere"},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_here(fields):
    """multi_lora.md 4.2: training-only and unset settings change nothing and warn of nothing."""
    want = read(plain_adapter())
    folder = edit_config(plain_adapter(), **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(read(folder), want)


def test_unknown_settings_are_named():
    """A setting of a later PEFT, if set, is named in a warning."""
    folder = edit_config(plain_adapter(), use_flux=True, third={"a": 1}, fourth=None)
    with pytest.warns(UserWarning, match="unknown settings are ignored: 'use_flux', 'third'") as w:
        read(folder)
    assert w[0].filename == __file__


def test_all_failed_checks_in_one_error():
    """multi_lora.md 4.2: a user sees every reason at once."""
    folder = plain_adapter()
    edit_config(folder, use_dora=True, modules_to_save=["lm_head"], bias="all", lora_alpha="8")
    refusal(lambda: read(folder), "use_dora", "modules_to_save", "bias='all'", "lora_alpha='8'")
    config = {"rank_pattern": {"(": 4, "v": 0}}
    refusal(
        lambda: from_tensors({}, config),
        "lacks r, lora_alpha, target_modules",
        "rank_pattern['('] is no regular expression",
        "rank_pattern['v']=0 must be an integer above 0",
    )


@pytest.mark.parametrize(
    ("field", "value", "want"),
    [
        ("r", 0, "an integer above 0"),
        ("r", True, "an integer above 0"),
        ("r", 4.0, "an integer above 0"),
        ("lora_alpha", float("nan"), "a finite number"),
        ("lora_alpha", float("inf"), "a finite number"),
        ("lora_alpha", 10**400, "a finite number"),
        ("lora_alpha", None, "a finite number"),
        ("use_rslora", "false", "true or false"),
        ("target_modules", 7, "a string or a list of strings"),
        ("target_modules", ["q_proj", 7], "a string or a list of strings"),
        ("rank_pattern", ["q_proj"], "map module names"),
        ("alpha_pattern", {"q_proj": float("nan")}, "a finite number"),
        ("alpha_pattern", {"q{1,99999999999}": 1}, "is no regular expression"),
    ],
)
def test_values_of_settings(field, value, want):
    """multi_lora.md 4.2: values that cannot be meant are refused with the field and the value."""
    config = plain_config(**{field: value})
    refusal(lambda: from_tensors(PLAIN_TENSORS, config), field, want)


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
JUNK = JUNK | st.lists(JUNK, max_size=3) | st.dictionaries(st.text(max_size=4), JUNK, max_size=3)
FIELDS = ["r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora"]
FIELDS += ["bias", "peft_type", "init_lora_weights", "use_dora", "modules_to_save", "new"]


@settings(max_examples=150, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3))
@pytest.mark.filterwarnings("ignore")
def test_any_config_is_read_or_refused(fields):
    """LF-14: no value of any setting leads to another error than AdapterError."""
    reason = reason_to_refuse(lambda: from_tensors(PLAIN_TENSORS, plain_config(**fields)))
    assert reason is None or "adapter in memory" in reason


# Files that are damaged


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")


def huge_header(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


def trailing_comma(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 4,}')


def a_list(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")


def deep(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[" * 100_000)


def not_text(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b"\xff\xfe\xfd")


def no_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def no_tensors(folder: Path) -> None:
    edit_tensors(folder, lambda ts: {})


def half_pair(folder: Path) -> None:
    edit_tensors(folder, lambda ts: {n: t for n, t in ts.items() if n != f"{Q0}.lora_B.weight"})


def wrong_width(folder: Path) -> None:
    edit_tensors(folder, lambda ts: ts | {f"{Q0}.lora_A.weight": torch.ones(4, 31)})


def wrong_height(folder: Path) -> None:
    edit_tensors(folder, lambda ts: ts | {f"{Q0}.lora_B.weight": torch.ones(33, 4)})


def other_rank(folder: Path) -> None:
    edit_tensors(folder, lambda ts: ts | {f"{Q0}.lora_A.weight": torch.ones(8, 32)})


def flat(folder: Path) -> None:
    edit_tensors(folder, lambda ts: ts | {f"{Q0}.lora_A.weight": torch.ones(4 * 32)})


def integers(folder: Path) -> None:
    ones = torch.ones(4, 32, dtype=torch.int32)
    edit_tensors(folder, lambda ts: ts | {f"{Q0}.lora_A.weight": ones})


def eight_bits(folder: Path) -> None:
    ones = torch.ones(4, 32).to(torch.float8_e4m3fn)
    edit_tensors(folder, lambda ts: ts | {f"{Q0}.lora_A.weight": ones})


def state_dict_names(folder: Path) -> None:
    rename(folder, ".lora_A.weight", ".lora_A.default.weight")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "cannot read adapter_model.safetensors: SafetensorError: "),
        (empty, "cannot read adapter_model.safetensors: SafetensorError: "),
        (huge_header, "cannot read adapter_model.safetensors: SafetensorError: "),
        (trailing_comma, "cannot read adapter_config.json: "),
        (a_list, "adapter_config.json holds a list, must be an object"),
        (deep, "cannot read adapter_config.json: "),
        (not_text, "cannot read adapter_config.json: "),
        (no_config, "the folder holds no adapter_config.json"),
        (no_weights, "the folder holds none of adapter_model.safetensors, "),
        (no_tensors, "0 of 0 tensors pair up"),
        (half_pair, "only one of lora_A and lora_B (1): 'model.layers.0.self_attn.q_proj' has"),
        (wrong_width, f"wrong shape (1): '{Q0}.lora_A.weight' is [4, 31], must be [4, 32]"),
        (wrong_height, f"wrong shape (1): '{Q0}.lora_B.weight' is [33, 4], must be [32, 4]"),
        (other_rank, f"wrong shape (1): '{Q0}.lora_A.weight' is [8, 32], must be [4, 32] (r=4)"),
        (flat, "is [128], must be [4, 32]"),
        (integers, f"(1): '{Q0}.lora_A.weight' is torch.int32"),
        (eight_bits, f"(1): '{Q0}.lora_A.weight' is torch.float8_e4m3fn"),
        (state_dict_names, "an adapter's name inside"),
    ],
)
def test_damaged_files(damage, words):
    """LF-14: each is an AdapterError with the file and the reason; a good one then loads."""
    bad = plain_adapter()
    damage(bad)
    refusal(lambda: read(bad, name="sql"), f"adapter 'sql' ({bad})", words)
    assert_deltas(read(plain_adapter(), name="sql"), PLAIN_DELTAS)


def test_rank_against_the_config():
    """multi_lora.md 4.7: A and B that agree with each other must agree with the config too."""
    folder = edit_config(plain_adapter(), r=8)
    refusal(lambda: read(folder), "wrong shape (8)", "is [4, 32], must be [8, 32] (r=8)")


def test_an_adapter_of_a_narrower_model():
    """multi_lora.md 4.7: an adapter that would fit inside the slot is still another model's."""
    narrow = tiny_llama(hidden_size=16, intermediate_size=32)
    refusal(lambda: read(make_adapter(narrow, seed=18)), "wrong shape (8)", "must be [4, 32]")


@pytest.mark.parametrize("source", ["no/such/folder", "someone/some-adapter", "~nobody/x", "\0"])
def test_no_folder(source):
    """multi_lora.md 4.1: a path that is no folder is said to be none; no hub is asked."""
    refusal(lambda: read(Path(source)), "no such folder", "hub names are not supported yet")


def test_a_file_is_no_folder():
    """multi_lora.md 4.1: the weight file itself is not what is wanted."""
    path = plain_adapter() / "adapter_model.safetensors"
    refusal(lambda: read(path), "no such folder")


def test_home_is_expanded(tmp_path, monkeypatch):
    """multi_lora.md 4.1: a leading ~ is the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    plain_adapter().rename(tmp_path / "sql")
    assert read(Path("~/sql")).rank == 4


class Bomb:
    """Runs code when it is unpickled without restriction."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("suffix", ["bin", "pt"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "among tensors"])
def test_malicious_pickle(suffix, inside, tmp_path, monkeypatch):
    """LF-15: refused without running anything, even if torch is told to trust pickles."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    folder = plain_adapter()
    weights, trace = folder / f"adapter_model.{suffix}", tmp_path / "executed"
    bomb = Bomb(trace)
    tensors = load_file(folder / "adapter_model.safetensors")
    torch.save(tensors | {f"{Q0}.lora_A.weight": bomb} if inside else bomb, weights)
    (folder / "adapter_model.safetensors").unlink()
    refusal(lambda: read(folder), f"cannot read adapter_model.{suffix}: UnpicklingError")
    assert not trace.exists()
    torch.load(weights, weights_only=False)
    assert trace.exists()  # so the file was dangerous


def test_safetensors_win(tmp_path):
    """LF-15: with both formats in a folder, the documented choice is safetensors."""
    folder = make_adapter(LLAMA, tmp_path, seed=20)
    want = read(folder)
    make_adapter(LLAMA, folder, seed=21, safe_serialization=False)
    assert (folder / "adapter_model.bin").is_file()
    assert_same(read(folder), want)
    (folder / "adapter_model.safetensors").unlink()
    assert read(folder).version != want.version


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "no mapping of names to tensors"),
        ({1: torch.ones(2)}, "no mapping of names to tensors"),
        ({f"{Q0}.lora_A.weight": 3, f"{Q0}.lora_B.weight": "x"}, "not a plain tensor (2)"),
        (
            {
                f"{Q0}.lora_A.weight": torch.ones(4, 32).to_sparse(),
                f"{Q0}.lora_B.weight": torch.ones(32, 4, device="meta"),
            },
            "not a plain tensor (2)",
        ),
    ],
    ids=["list", "numbers", "values", "layouts"],
)
def test_pickles_of_something_else(content, words):
    """LF-14: a pickle that holds no named dense tensors."""
    folder = plain_adapter("bin")
    torch.save(content, folder / "adapter_model.bin")
    refusal(lambda: read(folder), words)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), suffix=st.sampled_from(["safetensors", "bin"]))
@pytest.mark.filterwarnings("ignore")
def test_any_bytes_are_read_or_refused(data, suffix):
    """LF-14: random damage to either format leads to no other error than AdapterError."""
    folder = plain_adapter(suffix)
    path = folder / f"adapter_model.{suffix}"
    good = path.read_bytes()
    bad = bytearray(good[: data.draw(st.just(len(good)) | st.integers(0, len(good)))])
    for _ in range(data.draw(st.integers(0, 4)) if bad else 0):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bad)
    reason = reason_to_refuse(lambda: read(folder))
    assert reason is None or path.name in reason


# Values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("role", ["A", "B"])
def test_values_that_are_not_finite(value, dtype, role):
    """LF-18: one NaN or infinity is refused at load, naming the tensor."""
    name = f"{Q0}.lora_{role}.weight"
    tensors = {n: t.to(dtype, copy=True) for n, t in PLAIN_TENSORS.items()}
    tensors[name][2, 3] = value
    what = "holds NaN" if value != value else "holds infinity"
    refusal(lambda: from_tensors(tensors, plain_config(), name="sql"), "'sql'", name, what)


@pytest.mark.parametrize(
    ("stored", "dtype", "peak", "fits"),
    [
        (torch.float16, torch.float16, 40000.0, False),  # 80000 once scaled by 2
        (torch.float16, torch.float16, -40000.0, False),
        (torch.float16, torch.float16, 32752.0, True),  # 65504, the largest
        (torch.float16, torch.float32, 65504.0, True),
        (torch.float32, torch.float16, 32759.9, True),  # 65519.8 rounds down to 65504
        (torch.float32, torch.float16, 32760.0, False),  # 65520 rounds up
        (torch.float32, torch.bfloat16, 1e38, True),
        (torch.float32, torch.bfloat16, 3e38, False),
        (torch.float32, torch.float32, 3e38, False),
        (torch.float64, torch.float32, 1e300, False),
    ],
)
def test_overflow_of_scaled_values(stored, dtype, peak, fits):
    """LK-07, LF-07: values beyond the compute dtype are refused with tensor, value and limit."""
    name = f"{Q0}.lora_B.weight"
    tensors = {n: t.to(stored, copy=True) for n, t in PLAIN_TENSORS.items()}
    tensors[name][2, 3] = peak
    if fits:
        adapter = from_tensors(tensors, plain_config(), dtype=dtype)
        assert adapter.arenas["qkv"].b_LRO.isfinite().all()
        assert adapter.arenas["qkv"].b_LRO[0, 3, 2].item() == pytest.approx(2 * peak, rel=5e-3)
        return
    refusal(
        lambda: from_tensors(tensors, plain_config(), dtype=dtype, name="sql"),
        "'sql'",
        name,
        f"{abs(2 * peak):g}",
        str(dtype),
        f"{torch.finfo(dtype).max:g}",
    )


def test_overflow_of_a():
    """LK-07: A is not scaled, but is cast as well."""
    tensors = {n: t.clone() for n, t in PLAIN_TENSORS.items()}
    tensors[f"{Q0}.lora_A.weight"][0, 0] = 1e6
    act = lambda: from_tensors(tensors, plain_config(), dtype=torch.float16)  # noqa: E731
    refusal(act, f"{Q0}.lora_A.weight", "1e+06", "65504")


@pytest.mark.parametrize("alpha", [1e300, -1e300])
def test_overflow_of_the_scaling(alpha):
    """LK-07: a scaling that float32 cannot hold is refused, also where B is zero."""
    tensors = {n: t * 0 for n, t in PLAIN_TENSORS.items()}
    refusal(lambda: from_tensors(tensors, plain_config(lora_alpha=alpha)), "lora_B.weight")


def test_rank_limit():
    """LF-12: adapter, its rank, the limit and the name of the option."""
    folder = make_adapter(LLAMA, seed=22, r=4, rank_pattern={"layers.1.self_attn.v_proj": 16})
    assert read(folder, max_rank=16).rank == 16
    refusal(
        lambda: read(folder, max_rank=8, name="sql"),
        "adapter 'sql'",
        "rank 16",
        "max_lora_rank=8 (1)",
        "layers.1.self_attn.v_proj",
    )


def test_a_large_r_that_no_module_uses():
    """LF-12: what counts is the rank of the modules, not the config's default."""
    folder = make_adapter(LLAMA, seed=22, r=64, rank_pattern={"proj.*|.*_proj": 4})
    assert read(folder, max_rank=4).rank == 4


# In memory


def test_in_memory_equals_file():
    """Design 4: tensors from a live model, under either naming, are the adapter of the file."""
    model = wrap(LLAMA, seed=23, r=6, use_rslora=True, target_modules=["q_proj", "up_proj"])
    config = model.peft_config["default"]
    want = read(save(model))
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert_same(from_tensors(saved, config), want)
    assert_same(from_tensors(saved, config.to_dict()), want)
    assert_same(from_tensors(model.state_dict(), config), want)
    assert_same(from_tensors(dict(model.named_parameters()), config, name="any"), want)


def test_live_model_with_several_adapters():
    """Design 4: one adapter of several is chosen by name, and never by luck."""
    model = wrap(LLAMA, seed=24)
    other = wrap(LLAMA, seed=25, r=8).peft_config["default"]
    torch.manual_seed(0)
    model.add_adapter("lora_B", other)
    for name in ("default", "lora_B"):
        adapter = from_tensors(model.state_dict(), model.peft_config[name], name=name)
        assert_deltas(adapter, deltas(model, name))
    refusal(
        lambda: from_tensors(model.state_dict(), other, name="sql"),
        "'sql'",
        "the adapters 'default', 'lora_B'",
        "name=",
    )


@pytest.mark.parametrize("tensors", [{}, {"model.norm.weight": torch.ones(32)}])
def test_no_adapter_in_memory(tensors):
    """multi_lora.md 4.7: zero usable tensors are an error."""
    refusal(lambda: from_tensors(tensors, plain_config()), f"0 of {len(tensors)} tensors")


def test_nothing_of_the_caller_is_kept():
    """Design 4: an adapter from a training loop does not change when training goes on."""
    model = wrap(LLAMA, seed=26)
    live = {n: p for n, p in model.named_parameters() if "lora" in n}
    assert all(p.requires_grad for p in live.values())
    adapter = from_tensors(live, model.peft_config["default"])
    before = [leaf.clone() for leaf in pytree.tree_leaves(adapter)]
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(adapter))
    with torch.no_grad():
        for parameter in live.values():
            parameter.fill_(7)
    after = pytree.tree_leaves(adapter)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_strided_tensors():
    """Views of a training loop's flat buffer have the version of their contents."""
    strided = {n: t.T.contiguous().T for n, t in PLAIN_TENSORS.items()}
    assert not strided[f"{Q0}.lora_A.weight"].is_contiguous()
    want = from_tensors(PLAIN_TENSORS, plain_config())
    assert_same(from_tensors(strided, plain_config()), want)


# Versions


def version(tensors: Mapping[str, Tensor] = PLAIN_TENSORS, **fields: Any) -> str:
    return from_tensors(tensors, plain_config(**fields)).version


def test_what_a_version_depends_on():
    """Design 4: weights to the last bit, dtype, modules and scaling; nothing else."""
    want = version()
    assert version(dict(reversed(PLAIN_TENSORS.items()))) == want
    assert version(lora_dropout=0.5, target_modules="all-linear") == want
    assert version(lora_alpha=4, use_rslora=True) == want  # 4 / sqrt(4) = 8 / 4

    flipped = {n: t.clone() for n, t in PLAIN_TENSORS.items()}
    flipped[f"{Q0}.lora_A.weight"].view(torch.int32)[3, 31] ^= 1
    half = {n: t.half() for n, t in PLAIN_TENSORS.items()}
    other_bits = {n: t.view(torch.bfloat16) for n, t in half.items()}
    values = {n: t for n, t in PLAIN_TENSORS.items() if "0.self_attn.v_proj" in n}
    keys = {n.replace("v_proj", "k_proj"): t for n, t in values.items()}
    fewer = {n: t for n, t in PLAIN_TENSORS.items() if "layers.1" not in n}
    targets = {"target_modules": "all-linear"}
    others = [
        version(lora_alpha=9),
        version(alpha_pattern={"layers.1.self_attn.v_proj": 9}),
        version(flipped),
        version(half),
        version({n: t.float() for n, t in half.items()}),
        version(other_bits),
        version(values, **targets),
        version(keys, **targets),
        version(fewer),
    ]
    assert len({want, *others}) == 1 + len(others)


def test_the_compute_dtype_is_no_part_of_the_version():
    """Design 4: the version names what was stored; a program has one dtype for all."""
    half = from_tensors(PLAIN_TENSORS, plain_config(), dtype=torch.bfloat16)
    assert half.version == version()


def test_versions_given_by_the_caller():
    """Design 4: a caller's version is used instead of the bytes, in a domain of its own."""
    given = [
        from_tensors(PLAIN_TENSORS, plain_config(), version=v).version
        for v in ("step 1", "step 2", version())
    ]
    assert len({*given, version()}) == 4
    assert all(len(v) == 64 for v in given)
    doubled = {n: 2 * t for n, t in PLAIN_TENSORS.items()}
    assert from_tensors(doubled, plain_config(), version="step 1").version == given[0]


def test_version_is_pinned():
    """Design 3: snapshots name versions, so the encoding may not change by accident."""
    tensors = {
        f"{Q0}.lora_A.weight": torch.arange(4 * 32, dtype=torch.float32).view(4, 32),
        f"{Q0}.lora_B.weight": torch.arange(32 * 4, dtype=torch.float32).view(32, 4),
    }
    config = plain_config(target_modules=["q_proj"])
    assert from_tensors(tensors, config).version[:16] == "4b5d745b99ea9ebf"
    assert from_tensors(tensors, config, version="step 1").version[:16] == "87539526c6a7ddaf"


def test_fixtures_leave_the_global_generator_alone():
    """peft_fixtures: equal seeds give equal weights, and no draw of the caller's moves."""
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    one, two = (wrap(tiny_llama(seed=3), seed=4).state_dict() for _ in range(2))
    assert torch.equal(torch.rand(3), want)
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not any(".lora_" in n for n in LLAMA.state_dict())
