"""Adapters of vision-language models, made by PEFT over the whole model (LF-09, LF-23)."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from purestep.engine import Request, init, load_adapter, load_program
from purestep.models.adapter_files import read_adapter
from purestep.models.tower_linears import tower_linears
from purestep.state.errors import AdapterError
from tests.engine.tiny import GREEDY, run
from tests.models.peft_fixtures import save, wrap
from tests.models.tiny_vision import load, picture, saved
from tests.models.tower_adapters import adapter, folder

KINDS = ["llava", "llava-siglip", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3"]
LANGUAGE = r".*language_model\..*\.(q|v|o|up|down)_proj"
ENGINE = {"num_blocks": 64, "block_size": 4, "max_rows": 2, "device": "cpu", "lora_rows": 16}
SPELLINGS = [
    "base_model.model.model.language_model.",  # PEFT over the model with the head
    "base_model.model.language_model.model.",  # the same, before transformers 4.52
    "base_model.model.language_model.",  # PEFT over the model without the head
    "base_model.model.model.",  # trained on the bare language model, or old Qwen2-VL
    "model.language_model.",
    "language_model.model.",
    "language_model.",
]


@cache
def peft_model(kind: str, targets: Any = LANGUAGE) -> PeftModel:
    return wrap(saved(kind)[1], seed=5, target_modules=targets)


def spelled(kind: str, prefix: str, folder: Path) -> Path:
    save(peft_model(kind), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all(name.startswith(SPELLINGS[0]) for name in tensors)
    renamed = {name.replace(SPELLINGS[0], prefix): t for name, t in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    return folder


def logprobs(model: Any, ids: list[int], generated: list[int], **given: Any) -> np.ndarray:
    with torch.inference_mode():
        answer = model(input_ids=torch.tensor([ids + generated]), **given).logits[0]
    rows = answer[len(ids) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(generated)[:, None])[:, 0].numpy()


def check_served(kind: str, request: Request, folder: Path, ids: list[int], **given: Any) -> None:
    """The adapter's logprobs are PEFT's, and not those of the base model."""
    program = load_program(saved(kind)[0], **ENGINE)
    state = load_adapter(init(program), folder, name="a")
    done = run(program, state, [request])[1]["r"]
    tokens = done.tokens.tolist()
    want = logprobs(peft_model(kind), ids, tokens, **given)
    np.testing.assert_allclose(done.logprobs, want, atol=1e-4)
    assert np.abs(want - logprobs(saved(kind)[1], ids, tokens, **given)).max() > 0.01


@pytest.mark.filterwarnings("ignore:.*target_modules without weights")  # of the renamed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", SPELLINGS)
def test_spellings_on_a_text_prompt(kind: str, prefix: str, tmp_path: Path) -> None:
    ids = [5, 9, 33, 70, 4]
    request = Request(id="r", tokens=ids, adapter="a", sampling=GREEDY)
    check_served(kind, request, spelled(kind, prefix, tmp_path), ids)


def test_on_an_image_prompt(tmp_path: Path) -> None:
    """The rows of the tower go in as embeddings, the adapter applies to them as to text."""
    model = load("llava")
    item = model.item(picture(60, 45))
    [rows] = model.encode([item])
    places, ids = [-1] * len(rows), [model.marker] * len(rows)
    request = Request(
        id="r",
        tokens=[5, 9, *places, 33],
        prompt_embeds=rows,
        adapter="a",
        sampling=GREEDY,
    )
    folder = spelled("llava", SPELLINGS[0], tmp_path)
    pixels = {"pixel_values": item["pixel_values"][None]}
    check_served("llava", request, folder, [5, 9, *ids, 33], **pixels)


@pytest.mark.parametrize(
    ("kind", "targets", "what", "tensors"),
    [
        ("llava", ["q_proj"], "4 of 10", "vision_tower"),
        ("llava_next", r".*vision_tower\..*\.v_proj", "0 of 6", "vision_tower"),
        ("llava", ["linear_1"], "0 of 2", "multi_modal_projector"),
        ("qwen2_vl", ["qkv"], "0 of 4", "visual"),
        ("qwen2_5_vl", "all-linear", "28 of", "visual"),
        ("qwen2_5_vl", r".*merger.mlp.0", "0 of 2", "merger"),
    ],
)
def test_what_adapts_the_tower_is_refused_without_it(
    kind: str, targets: Any, what: str, tensors: str, tmp_path: Path
) -> None:
    """Whole: the language model's part of it alone would be another adapter."""
    folder = save(wrap(saved(kind)[1], seed=5, target_modules=targets), tmp_path)
    state = init(load_program(saved(kind)[0], **ENGINE, image_limit=0))
    with pytest.raises(AdapterError) as caught:
        load_adapter(state, folder, name="a")
    message = str(caught.value)
    assert "tensors of a vision or audio tower, which this program does not have" in message
    assert tensors in message
    assert re.search(f"({what}) .*tensors pair up", message)
    assert not state.host.adapters.names


@pytest.mark.parametrize("change", [lambda n: n.replace("layers", "blocks"), str.upper])
def test_what_matches_nothing_is_refused(change: Callable[[str], str], tmp_path: Path) -> None:
    save(peft_model("qwen2_vl"), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file({change(n): t for n, t in tensors.items()}, tmp_path / "adapter_model.safetensors")
    state = init(load_program(saved("qwen2_vl")[0], **ENGINE))
    with pytest.raises(AdapterError, match=r"adapter 'a'.* 0 of 20 tensors pair up"):
        load_adapter(state, tmp_path, name="a")


@pytest.mark.parametrize("kind", ["llava", "idefics3", "qwen2_vl"])
@pytest.mark.parametrize("change", ["without the head", "bare", "old"])
def test_spellings_of_the_tower(kind: str, change: str, tmp_path: Path) -> None:
    """One adapter, whatever stands before the names and inside them."""
    want = adapter(kind, "all")
    tensors = load_file(folder(kind, "all") / "adapter_model.safetensors")
    start = "base_model.model.model."
    assert all(name.startswith((start, "base_model.model.lm_head")) for name in tensors)

    def renamed(name: str) -> str:
        if change == "old":
            return re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)
        return name.replace(start, "base_model.model." if change == "without the head" else "")

    text = (folder(kind, "all") / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(text)
    save_file({renamed(n): t for n, t in tensors.items()}, tmp_path / "adapter_model.safetensors")
    model = load(kind)
    tower = tower_linears(model.vision.family, model.vision.config)
    found = read_adapter(tmp_path, model.config, dtype=torch.float32, max_rank=None, tower=tower)
    assert found.version == want.version
    assert found.modules == want.modules


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (r"layers\.0\.self_attn", "layers.3.self_attn", "no such linear in the tower"),
        (r"vision_tower\.(.*)mlp\.fc1", r"vision_tower.\1mlp.fc3", "no such linear in the tower"),
        (r"linear_2\.lora_B", "linear_2.lora_C", "no such linear in the tower"),
        (r"linear_2\.lora_B.weight", "linear_2.lora_B.bias", r"a bias of B"),
    ],
)
def test_names_that_no_tower_has(old: str, new: str, why: str, tmp_path: Path) -> None:
    """A layer above all of them, a module and a role that do not exist."""
    tensors = load_file(folder("llava", "all") / "adapter_model.safetensors")
    towers = {n: t for n, t in tensors.items() if "language_model" not in n}
    changed = {re.sub(old, new, n): t for n, t in towers.items()}
    assert changed.keys() != towers.keys()
    text = (folder("llava", "all") / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(text)
    save_file(changed, tmp_path / "adapter_model.safetensors")
    state = init(load_program(saved("llava")[0], **ENGINE))
    with pytest.raises(AdapterError, match=why):
        load_adapter(state, tmp_path, name="a")
