"""Encoder rows for the first decoder layers (Qwen3-VL) in the engine: counted, given, mixed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from purestep.engine import (
    Program,
    Request,
    SamplingParams,
    init,
    load_adapter,
    load_program,
    prepare,
    submit,
)
from purestep.engine.config import check_config
from purestep.engine.memory import encoder_cache_bytes
from purestep.state.errors import ConfigError, MediaError, RequestError
from tests.engine.tiny import run
from tests.models.peft_fixtures import save, wrap
from tests.models.tiny_vision import load, picture, saved

KIND = "qwen3_vl"
ONE, TWO = picture(128, 128), picture(96, 192, seed=1)  # 16 and 18 rows
SIZES = {"block_size": 8, "num_blocks": 64, "max_rows": 4, "max_batched_tokens": 64}
SAMPLING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
MARKER = 127


def program(**options: Any) -> Program:
    return load_program(saved(KIND)[0], device="cpu", lora_rows=16, **{**SIZES, **options})


def asked(engine: Program, id: str, tokens: list[int], images: Any, **options: Any) -> Request:
    return prepare(engine, tokens, id=id, images=images, sampling=SAMPLING, **options)


def test_rows_are_counted_in_bytes_of_their_width() -> None:
    """W22: two rows more for each, in the ledger, the cache's bytes and the plan of memory."""
    row = 3 * 32 * 4
    config = program(encoder_cache_bytes=20 * row + row // 2).config
    assert (config.deepstack, config.encoder_width) == (2, 96)
    assert (config.encoder_row_bytes, config.encoder_cache_tokens) == (row, 20)
    assert encoder_cache_bytes(config) == 20 * row
    assert init(program()).host.encoder.row_bytes == row
    text = program(image_limit=0).config
    assert (text.deepstack, text.encoder_width) == (0, 32)
    with pytest.raises(ConfigError, match="deepstack=4 must be less than the decoder's 4 layers"):
        check_config(replace(config, deepstack=4))


@pytest.mark.parametrize("chunk", [7, 0])
def test_the_plain_decoder_says_what_the_fused_one_says(chunk: int) -> None:
    engine = program(long_prefill_threshold=chunk)
    assert engine.fused
    requests = [
        asked(engine, "one", [5, MARKER, 6, 7], [ONE]),
        asked(engine, "both", [MARKER, 9, MARKER], [ONE, TWO]),
        asked(engine, "text", [3, 4, 5, 6, 7], []),
    ]
    found = [run(e, init(e), requests)[1] for e in (engine, replace(engine, fused=False))]
    for name, done in found[0].items():
        assert done.tokens.tolist() == found[1][name].tokens.tolist()
        np.testing.assert_allclose(done.logprobs, found[1][name].logprobs, atol=1e-5)


def test_embeddings_that_are_given_are_as_wide() -> None:
    """They answer as their picture does, also beside a prompt of embeddings, which have nothing
    for later layers; narrow ones are refused."""
    engine, model = program(), load(KIND)
    [rows] = model.encode([model.item(ONE)])
    grid = tuple(model.item(ONE)["image_grid_thw"].tolist())
    part = {"type": "image_embeds", "image_embeds": rows, "grid": grid}
    ids = [5, 9, 33, 70]
    embeds = model.params.embed_VD[torch.tensor(ids)]
    requests = [
        asked(engine, "picture", [5, MARKER, 6, 7], [ONE]),
        asked(engine, "rows", [5, MARKER, 6, 7], [part]),
        Request(id="ids", tokens=ids, sampling=SAMPLING),
        Request(id="embeds", prompt_embeds=embeds, sampling=SAMPLING),
    ]
    _, found = run(engine, init(engine), requests)
    for one, other in (("picture", "rows"), ("ids", "embeds")):
        assert found[one].tokens.tolist() == found[other].tokens.tolist()
        np.testing.assert_allclose(found[one].logprobs, found[other].logprobs, atol=1e-5)
    with pytest.raises(MediaError, match=r"shape \[n, 96\], got \(16, 32\)"):
        asked(engine, "narrow", [MARKER], [part | {"image_embeds": rows[:, :32]}])
    [feature] = requests[1].features
    narrow = replace(feature, data={"embeds": rows[:, :32]})
    with pytest.raises(RequestError, match=r"shape \[16, 96\]"):
        submit(init(engine), replace(requests[1], features=(narrow,)))


def test_an_adapter_on_a_prompt_with_a_picture(tmp_path: Path) -> None:
    """PEFT's logprobs: what is added behind layers is no adapter's business."""
    targets = r".*language_model\..*\.(q|v|o|up|down)_proj"
    oracle = wrap(saved(KIND)[1], seed=5, target_modules=targets)
    engine = program(long_prefill_threshold=7)
    state = load_adapter(init(engine), save(oracle, tmp_path), name="a")
    request = asked(engine, "adapted", [5, MARKER, 6, 7], [ONE], adapter="a")
    base = asked(engine, "base", [5, MARKER, 6, 7], [ONE])
    _, found = run(engine, state, [request, base])
    item = load(KIND).item(ONE)
    for name, model in (("adapted", oracle), ("base", saved(KIND)[1])):
        tokens = found[name].tokens.tolist()
        ids = torch.tensor([[*request.tokens, *tokens]])
        with torch.inference_mode():
            logits = model(
                input_ids=ids,
                pixel_values=item["pixel_values"],
                image_grid_thw=item["image_grid_thw"][None],
                mm_token_type_ids=(ids == MARKER).int(),
            ).logits[0, len(request.tokens) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        np.testing.assert_allclose(found[name].logprobs, want, atol=1e-4)
    assert np.abs(found["adapted"].logprobs - found["base"].logprobs).max() > 0.01
