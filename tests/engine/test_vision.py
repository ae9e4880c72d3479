"""Real towers through the whole engine: tokens and logprobs of prompts with pictures are those of
transformers, for every chunk size, with caches tiny and large, alone and in one batch, also behind
a prefix that ends within a picture (CI-01, CI-04, CI-05, PC-06)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from purestep.engine import Completion, Program, Request, SamplingParams, init, load_program, submit
from purestep.engine.commit import commit
from purestep.engine.config import check_config
from purestep.engine.execute import execute
from purestep.engine.schedule import schedule
from purestep.state.errors import ConfigError, RequestError
from purestep.state.media import Feature
from tests.engine.tiny import run
from tests.models.tiny_vision import Part, expected, load, picture

KINDS = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "pixtral")
NEW = 4
ONE, TWO = picture(60, 45), picture(45, 60, seed=1)
PROMPTS: dict[str, list[Part]] = {
    "first": [ONE, [5, 9, 33]],
    "last": [[7, 8], TWO],
    "several": [[5, 9], ONE, [4, 6, 8], TWO, [11]],
    "again": [[5, 9], ONE, [4, 6, 8], ONE, [12, 13]],
    "text": [[5, 9, 33, 70, 4, 6, 8, 11, 12, 13, 14]],
}


@cache
def oracle(kind: str, name: str) -> tuple[list[int], list[float]]:
    """The greedy tokens of transformers and their logprobs."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(NEW):
        _, logits_LV, _ = expected(load(kind), [*PROMPTS[name], tokens])
        scores = logits_LV[-1].log_softmax(-1)
        two = scores.topk(2).values
        assert two[0] - two[1] > 1e-4, "the oracle's choice is no choice"
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return tokens, logprobs


def asked(kind: str, name: str) -> Request:
    """A prompt as `prepare` would make it."""
    model, tokens, features = load(kind), [], []
    for part in PROMPTS[name]:
        if not isinstance(part, Image.Image):
            tokens += part
            continue
        item = model.item(part)
        identity = f"{part.size}"
        ids, is_embed = model.placeholder(item)
        features.append(
            Feature(
                modality="image",
                digest=identity,
                identifier=identity,
                offset=len(tokens),
                length=len(ids),
                is_embed=is_embed,
                grid=model.vision.family.grid(model.vision.config, item),
                data=item,
            )
        )
        tokens += ids.tolist()
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    return Request(id=name, tokens=tokens, features=tuple(features), sampling=sampling)


@cache
def program(kind: str, **options: Any) -> Program:
    sizes = {"block_size": 8, "num_blocks": 200, "max_rows": 8, "max_batched_tokens": 64}
    sizes["max_encoder_tokens"] = 256
    return load_program(load(kind).folder, **{"device": "cpu", **sizes, **options})


def check(
    kind: str,
    found: dict[str, Completion],
    names: Sequence[str] = tuple(PROMPTS),
    atol: float = 1e-4,
) -> None:
    for name in names:
        tokens, logprobs = oracle(kind, name)
        assert found[name].tokens.tolist() == tokens, name
        np.testing.assert_allclose(found[name].logprobs, logprobs, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_batch_of_everything_says_what_transformers_says(kind: str, chunk: int) -> None:
    engine = program(kind, long_prefill_threshold=chunk)
    _, found = run(engine, init(engine), [asked(kind, name) for name in PROMPTS])
    check(kind, found)


@pytest.mark.parametrize("kind", KINDS)
def test_unlimited_chunks_and_no_cache_of_outputs(kind: str) -> None:
    engine = program(kind, max_batched_tokens=1024, encoder_cache_tokens=0)
    _, found = run(engine, init(engine), [asked(kind, name) for name in PROMPTS])
    check(kind, found)


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_that_end_within_a_picture(kind: str) -> None:
    """`again` shares its first picture with `several`, not the second; nothing is shared with a
    prompt of the same ids and another picture."""
    engine = program(kind)
    state = init(engine)
    order = ("several", "again", "several", "first", "last")
    for name in order:
        state, found = run(engine, state, [asked(kind, name)])
        check(kind, found, [name])
    assert found["last"].num_cached_tokens == 0


def test_the_positions_of_a_batch_are_its_rows_own() -> None:
    """CI-04: rows of different deltas decode together; without the deltas tokens differ."""
    kind = "qwen2_vl"
    engine = program(kind)
    state, records = init(engine), {}
    for name in PROMPTS:
        state = submit(state, asked(kind, name))
        records[name] = state.host.requests[name]
    deltas = {name: record.position_delta for name, record in records.items()}
    assert deltas["text"] == 0
    assert len(set(deltas.values())) >= 3
    torch.testing.assert_close(
        torch.tensor(records["first"].position_3P[:, -1]),
        torch.full((3,), len(records["first"].request.tokens) - 1 + deltas["first"]).int(),
    )
    _, found = run(engine, state)
    check(kind, found)


# Rows of an image see each other: an item of 18 positions is computed in one step, whatever the
# chunk. `gemma3` has a window shorter than an image, `gemma3-wide` a longer one.
TOGETHER = ("gemma3", "gemma3-wide")


@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("options", [
    {"long_prefill_threshold": 18},
    {"long_prefill_threshold": 31, "encoder_cache_tokens": 0},
    {"max_batched_tokens": 18},
    {"max_batched_tokens": 1024, "prefix_caching": False},
    {"block_size": 5},
], ids=str)  # fmt: skip
def test_rows_that_see_each_other(kind: str, options: dict[str, Any]) -> None:
    """CI-07, CI-05: a batch of several images, one at the end of a prompt, and text alone."""
    fused = program(kind, **options)
    assert fused.config.disable_chunked_mm_input
    assert fused.fused
    for engine in (fused, replace(fused, fused=False)):
        _, found = run(engine, init(engine), [asked(kind, name) for name in PROMPTS])
        check(kind, found)


@pytest.mark.parametrize("kind", TOGETHER)
def test_no_step_splits_an_image(kind: str) -> None:
    """Not with its output cached, nor where a chunk starts at it, nor behind a cached prefix that
    would end within it (W4, PC-11)."""
    engine = program(kind, max_batched_tokens=18, block_size=4)
    state, seen = init(engine), 0
    for name in ("several", "again", "several", "first", "last"):
        state = submit(state, asked(kind, name))
        features = state.host.requests[name].request.features
        done = {}
        while not state.host.idle:
            host, plan = schedule(engine.config, state.host)
            for start, count in zip(plan.start_R.tolist(), plan.count_R.tolist(), strict=True):
                for feature in features:
                    inside = max(0, min(start + count, feature.end) - max(start, feature.offset))
                    assert inside in (0, feature.length)
                    seen += inside > 0
            device, result = execute(engine, state.device, plan, state.blobs)
            host, outputs = commit(engine.config, host, plan, result)
            state = replace(state, host=host, device=device)
            done |= {completion.id: completion for completion in outputs.finished}
        check(kind, done, [name])
    assert seen >= 5


@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("block", [1, 4, 16])
def test_a_prefix_that_ends_before_a_picture_or_in_it(kind: str, block: int) -> None:
    """PC-11: warm with the text before it, then with both, then whole; as with a cold cache."""
    text, item = list(range(5, 15)), asked(kind, "first")
    [feature] = item.features
    behind = text + list(item.tokens[: feature.length])
    whole = [*behind, *range(20, 30)]
    feature = replace(feature, offset=len(text))
    engine, cold = program(kind, block_size=block), program(kind, prefix_caching=False)
    state = init(engine)
    for tokens, features in ((text, ()), (behind, (feature,)), (whole, (feature,))):
        request = replace(item, tokens=tokens, features=features)
        state, found = run(engine, state, [request])
        _, want = run(cold, init(cold), [request])
        done, want = found["first"], want["first"]
        assert done.tokens.tolist() == want.tokens.tolist()
        np.testing.assert_allclose(done.logprobs, want.logprobs, atol=1e-5)
        inside = done.num_cached_tokens - len(text)
        assert not 0 < inside < feature.length
    assert done.num_cached_tokens == {1: 28, 4: 28, 16: 0}[block]


@pytest.mark.parametrize("kind", TOGETHER)
def test_preempted_within_a_batch_of_images(kind: str) -> None:
    """Too few blocks for all: requests leave, come back and say the same."""
    sizes = {"block_size": 3, "num_blocks": 47, "max_batched_tokens": 256}
    engine = program(kind, **sizes, prefix_caching=False)
    _, found = run(engine, init(engine), [asked(kind, name) for name in PROMPTS])
    check(kind, found)
    assert sum(completion.num_preemptions for completion in found.values()) > 0


def test_an_image_that_no_step_holds_is_refused() -> None:
    """CI-02: by the program, which knows how large they are, and as a request, if one is larger."""
    for name, least in (("max_batched_tokens", 8), ("long_prefill_threshold", 1)):
        with pytest.raises(ConfigError, match=f"{name}=17: an image takes up to 18 positions"):
            load_program(load("gemma3").folder, device="cpu", max_rows=least, **{name: 17})
    engine = program("gemma3", long_prefill_threshold=18)
    request = asked("gemma3", "first")
    [feature] = request.features
    longer = replace(feature, length=19, is_embed=np.append(feature.is_embed, False))
    request = replace(request, features=(longer,))
    with pytest.raises(RequestError, match=r"19 positions.*not split.*long_prefill_threshold=18"):
        submit(init(engine), request)
    with pytest.raises(ConfigError, match="disable_chunked_mm_input=False"):
        check_config(replace(engine.config, disable_chunked_mm_input=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [*KINDS, *TOGETHER])
def test_a_gpu_says_what_transformers_says(kind: str) -> None:
    """By the fused decoder, decode steps as graphs, chunks of a few tokens where they may be."""
    chunk = 0 if kind in TOGETHER else 7
    engine = program(kind, device="cuda", dtype="float32", long_prefill_threshold=chunk)
    assert engine.graphs
    _, found = run(engine, init(engine), [asked(kind, name) for name in PROMPTS])
    check(kind, found, atol=1e-3)
