"""Checkpoints of vision-language models: layouts of names, what is read, what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import LlamaConfig, LlavaConfig, OPTConfig, Qwen2_5_VLConfig, Qwen2VLConfig

from purestep.engine import load_program
from purestep.models.checkpoint import load_checkpoint, load_vision, stop_ids
from purestep.models.config import RopeConfig
from purestep.models.families import model_config_from_hf, vision_config_from_hf
from purestep.models.tensor_files import TOWER, plain_name
from purestep.state.errors import CheckpointError, ConfigError
from tests.models.tiny import SIZES, save_checkpoint
from tests.models.tiny_vision import saved

KINDS = [
    "llava",
    "llava-siglip",
    "llava_next",
    "qwen2_vl",
    "qwen2_vl-tied",
    "qwen2_5_vl",
    "qwen3_vl",
]
ENGINE = {"num_blocks": 8, "max_rows": 2, "device": "cpu", "lora_rows": 8}


def edited(kind: str, folder: Path, edit: Callable[[str], str | None]) -> Path:
    """A copy of a checkpoint whose tensors have the names that `edit` gives, None for none."""
    shutil.copytree(saved(kind)[0], folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    renamed = {new: t for name, t in tensors.items() if (new := edit(name)) is not None}
    save_file(renamed, folder / "model.safetensors")
    return folder


def old_name(name: str) -> str:
    """As transformers before 4.52 wrote it."""
    if TOWER.fullmatch(plain := plain_name(name)):
        return plain.replace("vision_tower.", "vision_tower.vision_model.")
    return f"language_model.{'' if plain.startswith('lm_head') else 'model.'}{plain}"


def new_name(name: str) -> str:
    """As the modules of transformers are called since then."""
    if TOWER.fullmatch(plain := plain_name(name)):
        return f"model.{plain}"
    return plain if plain.startswith("lm_head") else f"model.language_model.{plain}"


def whole(name: str) -> str:
    """The same, with CLIP's own parent inside."""
    return new_name(name).replace("vision_tower.", "vision_tower.vision_model.")


def everything(folder: Path) -> tuple[list[Tensor], str, str]:
    _, params, digest = load_checkpoint(folder, dtype=torch.float32)
    found = load_vision(folder, dtype=torch.float32)
    assert found is not None
    leaves = pytree.tree_leaves((params, found[0].params))
    return [leaf for leaf in leaves if leaf is not None], digest, found[1]


def old_qwen(name: str) -> str:
    """As transformers before 4.52 wrote Qwen2-VL."""
    plain = plain_name(name)
    return plain if TOWER.fullmatch(plain) or plain.startswith("lm_head") else f"model.{plain}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [old_name, new_name, whole, old_qwen])
def test_layouts_are_one_model(kind: str, layout: Callable[[str], str], tmp_path: Path) -> None:
    want, *digests = everything(saved(kind)[0])
    got, *others = everything(edited(kind, tmp_path, layout))
    assert digests == others
    assert all(map(torch.equal, got, want))
    assert len(got) == len(want)


def test_tensors_above_the_taken_layer_may_be_missing(tmp_path: Path) -> None:
    """LLaVA-1.5 takes the states before the last layer, so a file may leave that one out."""
    want = everything(saved("llava")[0])
    pattern = r".*vision_tower\..*(layers\.2|post_layernorm)\..*"
    folder = edited("llava", tmp_path, lambda n: None if re.fullmatch(pattern, n) else n)
    assert everything(folder)[1:] == want[1:]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda n: None if "linear_2.bias" in n else n, r"multi_modal_projector.linear_2.bias"),
        (lambda n: n.replace("fc1", "fc3"), "missing: vision_tower.encoder.layers.0.mlp.fc1"),
        (lambda n: n.replace("linear_1.bias", "linear_9.bias"), "missing"),
    ],
)
def test_broken_towers_are_refused(
    edit: Callable[[str], str | None], match: str, tmp_path: Path
) -> None:
    folder = edited("llava", tmp_path, edit)
    load_checkpoint(folder, dtype=torch.float32)  # the language model is whole
    with pytest.raises(CheckpointError, match=match):
        load_vision(folder, dtype=torch.float32)


def test_foreign_tensors_are_refused(tmp_path: Path) -> None:
    folder = edited("llava", tmp_path, lambda n: n)
    tensors = load_file(folder / "model.safetensors")
    for name in ("vision_tower.gate.weight", "resampler.weight"):
        save_file(tensors | {name: torch.zeros(2)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"1 tensors are unexpected: {name}"):
            everything(folder)


def test_a_text_checkpoint_has_no_tower(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    assert load_vision(tmp_path, dtype=torch.float32) is None
    assert vision_config_from_hf(LlamaConfig()) is None
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["vision_tower.embeddings.class_embedding"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected: vision_tower"):
        load_checkpoint(tmp_path, dtype=torch.float32)


def test_the_language_model_is_the_text_model_inside() -> None:
    llava = LlavaConfig(text_config=LlamaConfig(**SIZES))
    assert model_config_from_hf(llava) == model_config_from_hf(LlamaConfig(**SIZES))
    tied = LlavaConfig(text_config=LlamaConfig(**SIZES, tie_word_embeddings=True))
    assert model_config_from_hf(tied).tie_embeddings
    with pytest.raises(CheckpointError, match="language model 'opt' in a llava model"):
        model_config_from_hf(LlavaConfig(text_config=OPTConfig()))
    with pytest.raises(CheckpointError, match="quantised"):
        vision_config_from_hf(llava.to_dict() | {"quantization_config": {"bits": 4}})


@pytest.mark.parametrize(
    ("config_class", "kind"), [(Qwen2VLConfig, "qwen2_vl"), (Qwen2_5_VLConfig, "qwen2_5_vl")]
)
def test_old_configs_of_qwen_are_flat(config_class: type, kind: str) -> None:
    """As the published checkpoints have them: the language model's settings beside the tower's."""
    tower = {"model_type": kind, "spatial_patch_size": 14, "in_chans": 3}
    rope = {"type": "mrope", "mrope_section": [1, 2, 1]}
    flat = {"model_type": kind, **SIZES, "rope_theta": 5e5, "rope_scaling": rope}
    flat |= {"vision_config": tower, "tie_word_embeddings": True, "image_token_id": 77}
    new = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 2, 1]}
    nested = config_class(
        text_config={**SIZES, "rope_parameters": new},
        tie_word_embeddings=True,
        image_token_id=77,
    )
    config = model_config_from_hf(flat)
    assert config == model_config_from_hf(nested)
    assert config.tie_embeddings
    assert config.rope == RopeConfig(theta=5e5, sections=(1, 2, 1))
    family, vision = vision_config_from_hf(flat)
    assert (family, vision) == vision_config_from_hf(nested)
    assert family.marker(vision) == 77


def test_stop_ids_inside_the_text_config(tmp_path: Path) -> None:
    given = {"model_type": "llava", "text_config": {"eos_token_id": [2, 7]}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert stop_ids(tmp_path) == (2, 7)


# Programs


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_has_the_tower(kind: str) -> None:
    program = load_program(saved(kind)[0], **ENGINE)
    assert program.config.image_limit == 999
    assert program.vision.config == program.config.vision
    hash(program.config)
    assert load_program(saved(kind)[0], **ENGINE, image_limit=2).config.image_limit == 2


def test_without_images_the_tower_is_not_read(tmp_path: Path) -> None:
    with_tower = load_program(saved("llava")[0], **ENGINE)
    folder = edited("llava", tmp_path, lambda n: None if "vision_tower" in n else n)
    program = load_program(folder, **ENGINE, image_limit=0)
    assert program.vision is program.config.vision is None
    assert program.config.image_limit == 0
    assert program.config.weights == load_checkpoint(folder, dtype=torch.float32)[2]
    assert program.config.weights != with_tower.config.weights


def test_the_weights_digest_covers_the_tower(tmp_path: Path) -> None:
    program = load_program(saved("llava")[0], **ENGINE)
    folder = edited("llava", tmp_path, lambda n: n)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("multi_modal_projector.linear_2.bias"))
    tensors[name] = tensors[name] + 1.0
    save_file(tensors, folder / "model.safetensors")
    assert load_program(folder, **ENGINE).config.weights != program.config.weights


@pytest.mark.parametrize("limit", [-1, 3])
def test_impossible_limits_are_refused(limit: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=f"image_limit={limit} must be"):
        load_program(tmp_path, **ENGINE, image_limit=limit)
    assert load_program(tmp_path, **ENGINE, image_limit=0).vision is None
