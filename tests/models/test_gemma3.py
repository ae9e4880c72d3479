"""Gemma 3: rows of an image that see each other, windows, ropes by layer; against transformers."""

import copy
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3TextConfig

from purestep.models.checkpoint import load_checkpoint
from purestep.models.decoder import forward, logits
from purestep.models.families import model_config_from_hf, vision_config_from_hf
from purestep.models.fused import fused_forward
from purestep.models.gemma3 import GEMMA3
from purestep.state.errors import CheckpointError
from tests.models.tiny import randomised
from tests.models.tiny_vision import (
    assert_depends_on_pixels,
    assert_same_answers,
    computed,
    expected,
    gemma,
    load,
    one_row,
    picture,
    words,
)

KINDS = ["gemma3", "gemma3-wide"]  # a window shorter than an image, and a longer one
WIDE, TALL, TINY, USUAL = (200, 5), (1, 250), (1, 1), (60, 45)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        [[3, 4, 5], USUAL, [6, 7]],
        [USUAL, [3, 4, 5]],
        [[3, 4, 5], TINY],
        [WIDE],
        [TALL, WIDE, [9], TINY, TINY],
        [[8, 9, 10, 11, 12, 13, 14, 15, 16]],
    ],
    ids=["middle", "first", "last", "only", "several", "none"],
)
@pytest.mark.parametrize("decode", [forward, fused_forward])
def test_answers_of_transformers(kind: str, parts: list[Any], decode: Any) -> None:
    drawn = [picture(*part) if isinstance(part, tuple) else part for part in parts]
    assert_same_answers(load(kind), drawn, decode)


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_mask_answers_otherwise(kind: str) -> None:
    """The rows that see each other are what the agreement above is about (CI-07)."""
    model, parts = load(kind), [[3, 4], picture(*USUAL), [5]]

    def causal(*args: Any, **kwargs: Any) -> torch.Tensor:
        params, adapters, kv, batch, config = args
        batch = one_row(batch.token_T.tolist())
        return forward(params, adapters, kv, batch, config, **kwargs)

    _, want_LV, _ = expected(model, parts)
    _, got_LV, _ = computed(model, parts, causal)
    assert (got_LV - want_LV).abs().max() > 0.01


@pytest.mark.parametrize("decode", [forward, fused_forward])
def test_the_last_row_reaches_the_first_of_its_own_picture(decode: Any) -> None:
    """CI-07: no token before the picture, and none of the picture before."""
    model, parts = load("gemma3"), [[3, 4], picture(*TALL), picture(*USUAL), [5, 6]]
    ids, plain, _ = computed(model, parts, decode)

    def changed(*given: Any, embeds: Any) -> torch.Tensor:
        index_E, rows_ED = embeds
        rows_ED = rows_ED.clone()
        rows_ED[-1] += 1.0
        return decode(*given, embeds=(index_E, rows_ED))

    _, other, _ = computed(model, parts, changed)
    moved = (plain - other).abs().amax(1)
    first = [at for at, token in enumerate(ids) if token == model.row_id][16]
    assert moved[:first].max() < 1e-5
    assert moved[first:].min() > 1e-4


def test_rows_are_about_the_picture() -> None:
    assert_depends_on_pixels(load("gemma3"), picture(*USUAL))


def test_an_item_alone_and_among_others() -> None:
    model = load("gemma3")
    items = [model.item(picture(*size)) for size in (USUAL, TINY, WIDE, TALL)]
    for got, item in zip(model.encode(items), items, strict=True):
        torch.testing.assert_close(got, model.encode([item])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "crops"), [((60, 60), 0), ((70, 60), 0), ((100, 50), 2), ((40, 160), 3), ((40, 20), 0)]
)
def test_crops_have_places_of_their_own(size: tuple[int, int], crops: int) -> None:
    model = load("gemma3")
    made = model.processor(images=picture(*size), return_tensors="pt", do_pan_and_scan=True)
    assert made["num_crops"].tolist() == [crops]
    item = GEMMA3.item(model.vision.config, made)
    ids, is_embed = GEMMA3.placeholder(model.vision.config, item, words)
    assert is_embed.sum() == 16 * (crops + 1) == len(model.encode([item])[0])
    assert ids.tolist().count(127) == ids.tolist().count(125) == crops + 1
    settings = {**model.processor.to_dict(), "do_pan_and_scan": True}
    assert model.count(item) <= model.count(GEMMA3.largest(model.vision.config, settings))


@pytest.mark.parametrize("decode", [forward, fused_forward])
def test_a_model_of_text(decode: Any, tmp_path: Any) -> None:
    config = copy.deepcopy(gemma(sliding_window=6).text_config)
    oracle = randomised(lambda: Gemma3ForCausalLM(config), seed=1)
    oracle.save_pretrained(tmp_path)
    found, params, _ = load_checkpoint(tmp_path, dtype=torch.float32)
    ids = list(range(3, 30))
    batch = one_row(ids)
    pages = [
        torch.zeros(2, len(ids), 1, found.num_kv_heads, found.head_dim)
        for _ in range(found.num_layers)
    ]
    with torch.inference_mode():
        hidden = decode(params, None, pages, batch, found)
        got_LV = logits(params, hidden, batch.logits_index_S)
        want_LV = oracle(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got_LV, want_LV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"use_bidirectional_attention": True, "sliding_window": 8}, "use_bidirectional"),
        ({"hidden_activation": "silu"}, "activation 'silu' is not supported"),
    ],
)
def test_unsupported_texts_are_named(text: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        model_config_from_hf(Gemma3TextConfig(**text))


def test_unsupported_numbers_of_rows_are_named() -> None:
    config: Gemma3Config = gemma()
    config.mm_tokens_per_image = 9
    with pytest.raises(CheckpointError, match=r"mm_tokens_per_image 9 .* the 8 patches"):
        vision_config_from_hf(config)
