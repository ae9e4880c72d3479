"""Gemma 3's prompts with pictures, against its own processor: the line breaks around a picture are
of the text, and its tokenizer joins them with others."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3Processor, PreTrainedTokenizerFast

from purestep.engine import Program, Request, SamplingParams, init, load_program, prepare
from purestep.engine.prepare import byte_alphabet
from purestep.state.errors import MediaError
from tests.engine.tiny import run
from tests.engine.tiny_images import PARTS
from tests.models.tiny_vision import load, picture, saved

BEGIN, END, ROW = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
IDS = {BEGIN: 127, END: 125, ROW: 122}
USUAL, WIDE, TALL = (60, 60), (100, 50), (40, 160)  # pan and scan: no crops, 2 and 3
BREAKS = {"\n" * n: 108 + n for n in (2, 3, 4)}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One id for each printable byte, for up to four line breaks together, and Gemma's names."""
    letters = byte_alphabet()
    line = next(letter for letter, byte in letters.items() if byte == 0x0A)
    plain = [c for c, b in letters.items() if 0x20 <= b < 0x7F or b == 0x0A]
    vocabulary = {c: n for n, c in enumerate(plain, 3)}
    vocabulary |= {text.replace("\n", line): n for text, n in BREAKS.items()} | IDS
    merges = [(line, line), (line * 2, line * 2), (line * 2, line)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"boi_token": BEGIN, "eoi_token": END, "image_token": ROW}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=names)
    made.chat_template = PARTS.replace("<image>", BEGIN)
    return made


@cache
def program(crops: bool = False) -> Program:
    folder = Path(mkdtemp(prefix="purestep-test-"))
    shutil.copytree(saved("gemma3")[0], folder, dirs_exist_ok=True)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_pan_and_scan": crops}))
    tokenizer().save_pretrained(folder)
    return load_program(folder, device="cpu", num_blocks=64, block_size=8)


def theirs(crops: bool, text: str, images: list[Image.Image]) -> tuple[list[int], np.ndarray]:
    """The ids and pixels that their own processor makes of a prompt."""
    processor = Gemma3Processor(load("gemma3").processor, tokenizer(), image_seq_length=16)
    scan = {"pan_and_scan_min_crop_size": 30, "pan_and_scan_max_num_crops": 3}
    made = processor(text=text, images=[images], do_pan_and_scan=crops, **scan)
    return made["input_ids"][0], np.asarray(made["pixel_values"])


def check(request: Request, want: tuple[list[int], np.ndarray]) -> None:
    ids, pixels = want
    assert list(request.tokens) == list(ids)
    mine = np.concatenate([np.asarray(f.data["pixel_values"]) for f in request.features])
    np.testing.assert_array_equal(mine, pixels)
    filled = np.zeros(len(ids), bool)
    for feature in request.features:
        assert ids[feature.offset] == IDS[BEGIN]
        assert ids[feature.end - 1] == IDS[END]
        filled[feature.offset : feature.end] = feature.is_embed
    assert np.array_equal(filled, np.array(ids) == IDS[ROW])


words = st.text("a \n", max_size=4)


@given(st.lists(st.tuples(st.sampled_from([USUAL, WIDE, TALL]), words), min_size=1, max_size=3),
       words, st.booleans())  # fmt: skip
@settings(max_examples=60, deadline=None)
@example([(USUAL, "")], "", False)
@example([(USUAL, "\n"), (USUAL, "\n\n")], "\n", False)
@example([(WIDE, "\n"), (TALL, "")], "a\n\n", True)
@example([(TALL, " "), (USUAL, " ")], " ", True)
def test_prompts_are_those_of_their_processor(
    parts: list[tuple[tuple[int, int], str]], first: str, crops: bool
) -> None:
    images = [picture(*size, seed=n) for n, (size, _) in enumerate(parts)]
    text = first + "".join(BEGIN + after for _, after in parts)
    check(prepare(program(crops), text, id="r", images=images), theirs(crops, text, images))


@pytest.mark.parametrize("crops", [False, True])
def test_chats_are_those_of_their_processor(crops: bool) -> None:
    """Behind the line break of a template, and beside a text that spells the marker."""
    one, two = picture(*WIDE), picture(*USUAL, seed=1)
    part = [{"type": "image", "image": image} for image in (one, two)]
    content = [{"type": "text", "text": "a\n"}, *part, {"type": "text", "text": "\nb"}]
    request = prepare(program(crops), [{"role": "user", "content": content}], id="r")
    text = f"[user]a\n{BEGIN}{BEGIN}\nb[assistant]"
    check(request, theirs(crops, text, [one, two]))
    spelled = [*part[:1], {"type": "text", "text": f"\n{BEGIN}"}]
    request = prepare(program(crops), [{"role": "user", "content": spelled}], id="r")
    ids, _ = theirs(crops, f"[user]{BEGIN}\n{BEGIN[0]}", [one])
    assert list(request.tokens[: len(ids)]) == list(ids)
    assert request.tokens.count(IDS[BEGIN]) == ids.count(IDS[BEGIN])


def test_ids_keep_the_line_breaks_around_apart() -> None:
    """Of a prompt in ids nothing is encoded anew: the same text, in other tokens."""
    line, image = tokenizer().encode("\n")[0], picture(*USUAL)
    request = prepare(program(), [5, line, IDS[BEGIN], 6], id="r", images=[image])
    rows = [IDS[BEGIN], *[IDS[ROW]] * 16, IDS[END]]
    assert list(request.tokens) == [5, line, BREAKS["\n\n"], *rows, BREAKS["\n\n"], 6]
    [feature] = request.features
    assert feature.is_embed.tolist() == [False] * 2 + [True] * 16 + [False] * 2
    assert (feature.offset, feature.length) == (2, 20)
    start = prepare(program(), "\na", id="r", images=[image], images_at="start")
    assert list(start.tokens) == [110, *rows, 110, *tokenizer().encode("\na")]


def test_the_number_of_places_is_that_of_pictures() -> None:
    for text, count in ((f"a{BEGIN}", 2), ("a", 1), (BEGIN * 2, 1)):
        with pytest.raises(MediaError, match=f"{text.count(BEGIN)} places .* {count} images"):
            prepare(program(), text, id="r", images=[picture(*USUAL)] * count)
    given = {"images": [picture(*USUAL)], "image_options": {"do_pan_and_scan": True}}
    with pytest.raises(MediaError, match="'do_pan_and_scan' is no option"):
        prepare(program(), BEGIN, id="r", **given)


@pytest.mark.parametrize("crops", [False, True])
def test_from_a_picture_to_the_right_token(crops: bool) -> None:
    """Image first, in the midst, last, with crops and without, beside one of ids."""
    prompts: dict[str, Any] = {
        "first": (f"{BEGIN}hi", [WIDE]),
        "midst": (f"x\n{BEGIN}y{BEGIN}z", [USUAL, TALL]),
        "last": (f"hello\n{BEGIN}", [WIDE]),
    }
    engine, model = program(crops), load("gemma3")
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = []
    for name, (text, sizes) in prompts.items():
        images = [picture(*size, seed=n) for n, size in enumerate(sizes)]
        requests.append(prepare(engine, text, id=name, images=images, sampling=sampling))
    _, done = run(engine, init(engine), requests)
    for request in requests:
        ids = torch.tensor([list(request.tokens)])
        pixels = torch.cat([feature.data["pixel_values"] for feature in request.features])
        out = model.oracle.generate(
            input_ids=ids,
            pixel_values=pixels,
            token_type_ids=(ids == IDS[ROW]).int(),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
        )
        assert done[request.id].tokens.tolist() == out[0, ids.shape[1] :].tolist()
