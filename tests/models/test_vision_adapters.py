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
from purestep.state.errors import AdapterError
from tests.engine.tiny import GREEDY, run
from tests.models.peft_fixtures import save, wrap
from tests.models.tiny_vision import load, picture, saved

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
def test_what_adapts_the_tower_is_refused(
    kind: str, targets: Any, what: str, tensors: str, tmp_path: Path
) -> None:
    """Whole: the language model's part of it alone would be another adapter."""
    folder = save(wrap(saved(kind)[1], seed=5, target_modules=targets), tmp_path)
    state = init(load_program(saved(kind)[0], **ENGINE))
    with pytest.raises(AdapterError) as caught:
        load_adapter(state, folder, name="a")
    message = str(caught.value)
    assert "tensors of a vision or audio tower are not supported yet" in message
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
