"""Idefics3 and SmolVLM: tiles and an overview, and the texts between them; against transformers."""

from functools import cache
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Idefics3Config, Idefics3Processor, PreTrainedTokenizerFast

from purestep.engine.prepare import byte_alphabet
from purestep.models.families import vision_config_from_hf
from purestep.models.idefics3 import IDEFICS3, whole_positions
from purestep.state.errors import CheckpointError, RequestError
from tests.models.tiny_vision import (
    SIDE,
    assert_depends_on_pixels,
    assert_same_answers,
    load,
    picture,
    tiled,
    words,
)

KINDS = ["idefics3", "smolvlm"]
WIDE, TALL, TINY, USUAL, SQUARE = (1000, 1), (3, 140), (1, 1), (60, 45), (112, 112)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        [[3, 4, 5], USUAL, [6, 7]],
        [SQUARE, [3, 4, 5]],
        [[3, 4, 5], TINY],
        [WIDE],
        [TALL, WIDE, [9], USUAL, USUAL],
        [[8, 9, 10, 11]],
    ],
    ids=["middle", "first", "last", "only", "several", "none"],
)
def test_answers_of_transformers(kind: str, parts: list[Any]) -> None:
    drawn = [picture(*part) if isinstance(part, tuple) else part for part in parts]
    assert_same_answers(load(kind), drawn)


def test_rows_are_about_the_picture() -> None:
    assert_depends_on_pixels(load("idefics3"), picture(*USUAL))


def test_an_item_alone_and_among_others() -> None:
    model = load("idefics3")
    items = [model.item(picture(*size)) for size in (USUAL, TINY, WIDE, TALL)]
    for got, item in zip(model.encode(items), items, strict=True):
        torch.testing.assert_close(got, model.encode([item])[0], atol=1e-5, rtol=1e-5)


@cache
def theirs(special: bool) -> Idefics3Processor:
    """Their own processor, with a tokenizer of bytes that knows a double line break; the tiles'
    names are ids of their own or, `special` false, spelt."""
    letters = byte_alphabet()
    vocabulary = {c: n for n, c in enumerate(letters, 3)}
    line = next(c for c, b in letters.items() if b == 0x0A)
    vocabulary[line * 2] = len(vocabulary) + 3
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(line, line)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    if special:
        names = [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)]
        tokenizer.add_tokens([*names, "<global-img>"], special_tokens=True)
    return Idefics3Processor(load("idefics3").processor, tokenizer, image_seq_len=4)


@given(st.integers(1, 300), st.integers(1, 300), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
@example(1, 1, True, True)
@example(2000, 1, False, True)
@example(1, 2000, True, True)
@example(112, 57, True, True)
@example(60, 45, True, False)
def test_ids_are_those_of_their_processor(
    width: int, height: int, special: bool, splitting: bool
) -> None:
    processor, model = theirs(special), load("idefics3")
    image, options = picture(width, height), {"do_image_splitting": splitting}
    want = processor(text="a<image>b", images=[image], **options)["input_ids"][0]
    (before,), (after,) = (processor.tokenizer.encode(letter) for letter in "ab")
    item = model.vision.family.item(
        model.vision.config, model.processor(images=image, return_tensors="pt", **options)
    )
    ids, is_embed = IDEFICS3.placeholder(
        model.vision.config,
        item,
        lambda text: processor.tokenizer.encode(text, add_special_tokens=False),
    )
    marker = processor.image_token_id
    assert [before, *np.where(is_embed, marker, ids).tolist(), after] == want
    assert is_embed.sum() == len(item["pixel_values"]) * 4


@pytest.mark.parametrize(
    ("size", "rows", "cols", "rows_of_all"),
    [((364, 364), 4, 4, 2873), ((728, 1092), 3, 4, 2197), ((1080, 1920), 3, 4, 2197)],
)
def test_number_of_rows(size: tuple[int, int], rows: int, cols: int, rows_of_all: int) -> None:
    """multimodal.md 6.8, by their rule for the tiles of an image."""
    processor = type(load("idefics3").processor)()
    assert processor.get_number_of_image_patches(*size) == (rows * cols + 1, rows, cols)
    tower = {"image_size": 364, "patch_size": 14}
    _, config = vision_config_from_hf(Idefics3Config(vision_config=tower))
    item = {"pixel_values": torch.zeros(rows * cols + 1, 1), "grid": torch.tensor([rows, cols])}
    _, is_embed = IDEFICS3.placeholder(config, item, words)
    assert is_embed.sum() == rows_of_all


@given(st.integers(1, 400), st.integers(1, 400), st.integers(20, 200))
@settings(max_examples=60, deadline=None)
@example(111, 112, 111)
@example(1, 1, 55)
@example(1, 1, 56)
def test_no_picture_is_larger_than_the_largest(width: int, height: int, edge: int) -> None:
    model = load("idefics3")
    options = {"size": {"longest_edge": edge}}
    largest = IDEFICS3.largest(model.vision.config, {**model.processor.to_dict(), **options})
    made = model.processor(images=picture(width, height), return_tensors="pt", **options)
    item = model.vision.family.item(model.vision.config, made)
    assert model.count(item) <= model.count(largest)
    assert len(largest["pixel_values"]) == 1 + int(largest["grid"].prod())


@pytest.mark.parametrize("side", [1, 4, 24, 26, 27, 32])
def test_places_of_patches_are_those_of_transformers(side: int) -> None:
    """Also where rounding moves one into its neighbour's bucket."""
    config = Idefics3Config(
        vision_config={"image_size": side, "patch_size": 1, "hidden_size": 16}
    ).vision_config
    embeddings = type(load("idefics3").oracle.model.vision_model.embeddings)(config)
    found: list[torch.Tensor] = []
    embeddings.position_embedding.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    embeddings(torch.zeros(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool))
    assert whole_positions(side).tolist() == found[0][0].tolist()


def test_what_the_tower_cannot_take_is_refused() -> None:
    model = load("idefics3")
    made = model.processor(
        images=picture(*USUAL), return_tensors="pt", max_image_size={"longest_edge": 28}
    )
    with pytest.raises(RequestError, match=rf"\(3, 28, 28\).*takes \(3, {SIDE}, {SIDE}\)"):
        model.vision.family.item(model.vision.config, made)
    made = dict(model.processor(images=picture(*USUAL), return_tensors="pt"))
    with pytest.raises(RequestError, match="5 tiles on a grid of"):
        model.vision.family.item(model.vision.config, {**made, "rows": [[1]]})
    config = tiled(Idefics3Config)
    config.scale_factor = 3
    with pytest.raises(CheckpointError, match="scale_factor 3 must divide the 4"):
        vision_config_from_hf(config)
