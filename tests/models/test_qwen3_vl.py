"""Qwen3-VL: learned positions, rows for the first decoder layers, M-RoPE by turns; against
transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from purestep.models.decoder import forward
from purestep.models.families import model_config_from_hf, vision_config_from_hf
from purestep.models.fused import fused_forward
from purestep.state.errors import CheckpointError
from tests.models.tiny_vision import (
    assert_depends_on_pixels,
    assert_same_answers,
    computed,
    expected,
    kinds,
    load,
    picture,
)

KINDS = ["qwen3_vl", "qwen3_vl-tied"]
WIDE, TALL, TINY, USUAL, ODD = (600, 3), (3, 600), (1, 1), (90, 70), (33, 31)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        [[3, 4, 5], USUAL, [6, 7]],
        [USUAL, [3, 4, 5]],
        [[3, 4, 5], TINY],
        [WIDE],
        [TALL, [8], WIDE, [9], TINY, [9], ODD, [9], (128, 128), [9], TINY],
        [(160, 160), [3], (96, 192)],
        [[8, 9, 10, 11]],
    ],
    ids=["middle", "first", "last", "only", "several", "large", "none"],
)
@pytest.mark.parametrize("decode", [forward, fused_forward])
def test_answers_of_transformers(kind: str, parts: list[Any], decode: Any) -> None:
    drawn = [picture(*part) if isinstance(part, tuple) else part for part in parts]
    assert_same_answers(load(kind), drawn, decode)


def test_rows_are_about_the_picture() -> None:
    assert_depends_on_pixels(load("qwen3_vl"), picture(*USUAL))


def test_an_item_alone_and_among_others() -> None:
    """Neighbours of the same grid, of the same number of patches, and of others."""
    model = load("qwen3_vl")
    sizes = (USUAL, TINY, (64, 128), (128, 64), ODD, TINY, (128, 64))
    items = [model.item(picture(*size, seed=n)) for n, size in enumerate(sizes)]
    for got, item in zip(model.encode(items), items, strict=True):
        assert got.shape == (model.count(item), 3 * 32)
        torch.testing.assert_close(got, model.encode([item])[0], atol=1e-5, rtol=1e-5)
        assert got.untyped_storage().nbytes() == got.nbytes


@pytest.mark.parametrize("layer", [0, 1])
def test_what_later_layers_get_matters(layer: int) -> None:
    """The oracle would not be one of it, if nothing did as well."""
    model, parts = load("qwen3_vl"), [[3], picture(*USUAL), [4, 5]]

    def without(*given: Any, embeds: Any) -> torch.Tensor:
        index_E, rows_EW = embeds
        rows_EW = rows_EW.clone()
        rows_EW[:, 32 * (1 + layer) : 32 * (2 + layer)] = 0
        return forward(*given, embeds=(index_E, rows_EW))

    _, whole, _ = computed(model, parts)
    _, less, _ = computed(model, parts, without)
    assert (whole - less)[-1].abs().max() > 0.01


def test_pairs_that_take_turns_matter() -> None:
    model, parts = load("qwen3_vl"), [picture(70, 140), [3, 4]]

    def by_sections(*given: Any, **named: Any) -> torch.Tensor:
        params, adapters, kv, batch, config = given
        config = replace(config, rope=replace(config.rope, interleaved=False))
        return forward(params, adapters, kv, batch, config, **named)

    _, whole, _ = computed(model, parts)
    _, other, _ = computed(model, parts, by_sections)
    assert (whole - other).abs().max() > 0.01


@pytest.mark.parametrize("decode", [forward, fused_forward])
def test_hidden_states_are_those_of_transformers(decode: Any) -> None:
    """What a layer returns, before anything is added to it."""
    model, seen = load("qwen3_vl"), []
    parts = [[3, 4], picture(*USUAL), [5]]

    def observed(*given: Any, **named: Any) -> torch.Tensor:
        return decode(*given, **named, observe=lambda i, h_TD: seen.append(h_TD.clone()))

    computed(model, parts, observed)
    caught: list[Any] = []
    hook = model.oracle.model.language_model.register_forward_hook(
        lambda _, args, kwargs, output: caught.append(output), with_kwargs=True
    )
    try:
        expected(model, parts, output_hidden_states=True)
    finally:
        hook.remove()
    want = caught[0].hidden_states
    assert len(seen) == len(want) == 5
    for got, state in zip(seen, want, strict=True):
        torch.testing.assert_close(got, state[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("height", "width", "least", "rows"),
    [(1024, 1024, 4096, 1024), (480, 640, 4096, 300), (224, 224, 65_536, 64)],
)
def test_number_of_rows(height: int, width: int, least: int, rows: int) -> None:
    """multimodal.md 6.4."""
    model = load("qwen3_vl")
    h, w = smart_resize(height, width, 32, least, 16_777_216)
    item = {"image_grid_thw": torch.tensor([1, h // 16, w // 16])}
    assert model.count(item) == rows


@pytest.mark.parametrize(
    ("tower", "match"),
    [
        ({"num_position_embeddings": 24}, "num_position_embeddings 24 .* a square"),
        ({"deepstack_visual_indexes": [0, 4]}, r"\[0, 4\] .* the tower's 4 layers"),
        ({"deepstack_visual_indexes": [1, 1]}, r"\[1, 1\] must be different"),
        ({"deepstack_visual_indexes": [0, 1, 2, 3]}, "fewer than the decoder's 4"),
        ({"out_hidden_size": 31}, "out_hidden_size 31 .* hidden_size 32"),
    ],
    ids=str,
)
def test_unsupported_towers_are_named(tower: dict[str, Any], match: str) -> None:
    config = kinds()["qwen3_vl"][1].to_dict()
    config["vision_config"] |= tower
    with pytest.raises(CheckpointError, match=match):
        vision_config_from_hf(config)


def test_layers_of_the_tower_in_any_order() -> None:
    """Each merger belongs to the layer at its own place in the list."""
    model = load("qwen3_vl")
    item = model.item(picture(*USUAL))
    params, config = model.vision.params, model.vision.config
    other = replace(config, deep_layers=config.deep_layers[::-1])
    turned = replace(params, deep_mergers=params.deep_mergers[::-1])
    with torch.inference_mode():
        [got] = model.vision.family.encode(turned, other, [item])
    assert torch.equal(got, model.encode([item])[0])


def test_the_published_config() -> None:
    """Its rope has the old spelling, its tower an old name."""
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {"model_type": "qwen3_vl_text", "rope_scaling": rope, "rope_theta": 5_000_000}
    text |= {
        "hidden_size": 2048,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    tower = {"model_type": "qwen3_vl", "out_hidden_size": 2048}
    given = {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower}
    given |= {"architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True}
    config = model_config_from_hf(given)
    assert config.architecture == "Qwen3ForCausalLM"
    assert config.tie_embeddings
    assert (config.rope.theta, config.rope.kind) == (5e6, "default")
    assert (config.rope.sections, config.rope.interleaved) == ((24, 20, 20), True)
    family, geometry = vision_config_from_hf(given)
    assert (family.deepstack(geometry), geometry.grid_side, geometry.row_size) == (3, 48, 8192)
