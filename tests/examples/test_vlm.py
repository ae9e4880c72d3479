"""The small model that sees shapes: its checkpoint, against transformers, and what it answers."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    LlavaForConditionalGeneration,
)

from purestep.engine import Program, SamplingParams, generate, prepare
from purestep.engine.demo_model import smollm2_dir
from purestep.models.checkpoint import load_checkpoint, load_vision
from tests.examples.demo import ADAPTERS, demo_program
from tests.examples.evaluate_vlm import FORMS, answers, picture_request, samples
from tests.examples.prompts import HELD_OUT, messages
from tests.examples.train_vlm import answer_logits
from tests.examples.train_vlm_data import chat_encoder, collate
from tests.examples.vlm import HERE, KEY_MAPPING, MARKER, VISION, shapes_vlm_dir
from tests.models.tiny_vision import Loaded, computed, expected

pytestmark = pytest.mark.model

SAMPLE = list(samples(6))  # 24 questions


@cache
def program() -> Program:
    return demo_program()


@cache
def oracle() -> Any:
    model, loading = LlavaForConditionalGeneration.from_pretrained(
        shapes_vlm_dir(), dtype=torch.float32, key_mapping=KEY_MAPPING, output_loading_info=True
    )
    assert not any(loading.values()), "transformers reads every tensor of the checkpoint"
    return model.eval()


def test_a_fixed_sample_of_held_out_questions() -> None:
    """Guessing gives one in five; on another machine a pixel may be drawn otherwise."""
    said = answers(program(), SAMPLE)
    right = [text == s.question.answer for text, s in zip(said, SAMPLE, strict=True)]
    assert sum(right) >= 21, list(zip(said, [s.question for s in SAMPLE], strict=True))
    blank = answers(program(), SAMPLE, blank=True)
    assert sum(t == s.question.answer for t, s in zip(blank, SAMPLE, strict=True)) <= 8


def test_pictures_and_texts_with_and_without_adapters_in_one_batch() -> None:
    """Every row says what it says in a batch of its own kind, and adapters give their form."""
    short = SamplingParams(temperature=0, max_tokens=8)
    shown, whose = SAMPLE[:4], (None, *FORMS)
    texts = [
        prepare(program(), messages(q), id=f"text {a} {n}", adapter=a, sampling=short)
        for n, q in enumerate(HELD_OUT[:1])
        for a in whose
    ]
    pictures = [
        picture_request(program(), s, f"picture {a} {n}", adapter=a)
        for n, s in enumerate(shown)
        for a in whose
    ]
    woven = [r for pair in zip(pictures, texts, strict=False) for r in pair] + pictures[
        len(texts) :
    ]
    mixed = {c.id: c for c in generate(program(), woven, adapters=ADAPTERS)}
    alone = {c.id: c for c in generate(program(), texts, adapters=ADAPTERS)}
    assert {id: mixed[id].text for id in alone} == {id: c.text for id, c in alone.items()}
    for adapter, write in FORMS.items():
        said = [mixed[f"picture {adapter} {n}"].text for n in range(len(shown))]
        right = [text == write(s.question.answer) for text, s in zip(said, shown, strict=True)]
        assert sum(right) >= 3, said


@pytest.mark.slow
def test_prompts_and_logits_are_those_of_transformers() -> None:
    folder = shapes_vlm_dir()
    config, params, _ = load_checkpoint(folder, dtype=torch.float32)
    found = load_vision(folder, dtype=torch.float32)
    assert found is not None
    model = Loaded(
        folder=folder,
        oracle=oracle(),
        processor=AutoImageProcessor.from_pretrained(folder, backend="pil"),
        config=config,
        params=params,
        vision=found[0],
    )
    processor = AutoProcessor.from_pretrained(folder)
    for sample in SAMPLE[:4]:
        parts = [{"type": "image"}, {"type": "text", "text": sample.question.text}]
        chat = [{"role": "user", "content": parts}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        given = processor(images=sample.picture, text=text, return_tensors="pt")
        ids = given["input_ids"][0].tolist()
        assert ids == list(picture_request(program(), sample, "it").tokens)
        at = ids.index(MARKER)
        after = at + ids.count(MARKER)
        prompt = [ids[:at], sample.picture, ids[after:]]
        got_ids, got_LV, (got_ED,) = computed(model, prompt)
        want_ids, want_LV, (want_ED,) = expected(model, prompt)
        assert got_ids == want_ids == ids
        torch.testing.assert_close(got_ED, want_ED, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got_LV[after:], want_LV[after:], atol=1e-4, rtol=1e-4)
        # Inside the picture logits are of no use; there float32 rounds 30 layers to a bit more.
        torch.testing.assert_close(got_LV, want_LV, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_adapters_are_pefts() -> None:
    """An adapter of the text model, merged by PEFT and put into transformers' LLaVA."""
    processor = AutoProcessor.from_pretrained(shapes_vlm_dir())
    shown = SAMPLE[4:8]
    for adapter in FORMS:
        text_model = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
        adapted = PeftModel.from_pretrained(text_model, str(ADAPTERS[adapter])).merge_and_unload()
        own = oracle().model.language_model
        before = {name: weight.clone() for name, weight in own.state_dict().items()}
        try:
            own.load_state_dict(adapted.model.state_dict())
            want = []
            for sample in shown:
                request = picture_request(program(), sample, "it")
                given = processor.image_processor(images=sample.picture, return_tensors="pt")
                ids = torch.tensor([list(request.tokens)])
                out = oracle().generate(input_ids=ids, **given, max_new_tokens=24, do_sample=False)
                want.append(processor.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        finally:
            own.load_state_dict(before)
        assert answers(program(), shown, adapter=adapter) == want


@pytest.mark.slow
def test_training_asks_for_what_is_served() -> None:
    """The loss is on logits that transformers' LLaVA gives for the same chat and picture."""

    language = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    encode = chat_encoder(AutoTokenizer.from_pretrained(smollm2_dir()))
    sample = SAMPLE[0]
    words = collate([encode([sample.question, SAMPLE[1].question], str)], torch.device("cpu"))
    request = picture_request(program(), sample, "it")
    first = words.ids_BT[0, : len(request.tokens)].tolist()
    assert first == list(request.tokens)
    processor = AutoProcessor.from_pretrained(shapes_vlm_dir())
    given = processor.image_processor(images=sample.picture, return_tensors="pt")
    with torch.no_grad():
        rows = oracle().model.get_image_features(**given).pooler_output[0]
        got_AV = answer_logits(language, words, rows[None])
        want_TV = oracle()(input_ids=words.ids_BT, **given).logits[0]
    torch.testing.assert_close(got_AV, want_TV[words.at_A], atol=1e-4, rtol=1e-4)
    assert words.token_A.tolist() == words.ids_BT[0, words.at_A + 1].tolist()


@pytest.mark.slow
def test_training_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Both stages, a few steps of a few pictures, in two processes."""
    few = "--pictures 512 --workers 1 --batch 4 --chats 1 --held-out 2 --device cpu"
    command = [sys.executable, "-m", "tests.examples.train_vlm", *few.split()]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.safetensors")]

    def train(minutes: float) -> str:
        whole = [*command, "--minutes", str(minutes)]
        told = subprocess.run(whole, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr
        return told.stdout

    assert "goes on" not in train(0.1)
    seconds, stopped_at, *_ = torch.load(tmp_path / "work" / "last.pt")["at"]
    assert f"goes on at step {stopped_at}," in train(seconds / 60 + 0.05)
    steps = [json.loads(x)["step"] for x in (tmp_path / "work/log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert stopped_at in steps
    assert steps[-1] > stopped_at
    with (
        safe_open(tmp_path / "out.safetensors", framework="pt") as made,
        safe_open(HERE / VISION, framework="pt") as committed,
    ):
        assert set(made.keys()) == set(committed.keys())
