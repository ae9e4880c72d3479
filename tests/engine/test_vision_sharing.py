"""Real towers when requests share pictures, or one is aborted or preempted within one: each gets
what it gets alone (PC-06)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from purestep.engine import (
    Completion,
    Program,
    Request,
    SamplingParams,
    abort,
    init,
    load_program,
    prepare,
    step,
    submit,
)
from purestep.state.checks import check_host
from tests.engine.tiny import run
from tests.engine.tiny_images import folder
from tests.models.tiny_vision import load, picture

KINDS = ("llava", "qwen2_vl", "qwen3_vl", "idefics3", "pixtral")
BEFORE, AFTER = list(range(3, 20)), [33, 70, 4, 6]  # two blocks of 8 and one token
ONE, TWO = picture(112, 112), picture(112, 112, seed=1)  # 16 rows, two blocks, or some more


@cache
def program(kind: str, **options: Any) -> Program:
    sizes = {"block_size": 8, "num_blocks": 200, "max_rows": 8, "max_batched_tokens": 256}
    return load_program(folder(kind), **{"device": "cpu", **sizes, **options})


def asked(kind: str, id: str, *parts: Image.Image | Sequence[int]) -> Request:
    marker, tokens = load(kind).marker, []
    for part in parts:
        tokens += [marker] if isinstance(part, Image.Image) else part
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    return prepare(program(kind), tokens, id=id, images=pictures, sampling=sampling)


def check(kind: str, requests: Sequence[Request], found: dict[str, Completion]) -> None:
    alone = program(kind, prefix_caching=False)
    for request in requests:
        _, done = run(alone, init(alone), [request])
        want, got = done[request.id], found[request.id]
        assert got.tokens.tolist() == want.tokens.tolist(), request.id
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


def counted(program: Program) -> tuple[Program, list[int]]:
    """The program, and how many items each of its encoder calls gets."""
    vision, calls = program.vision, []

    def encode(params: Any, config: Any, items: Sequence[Any], adapters: Any) -> Any:
        calls.append(len(items))
        return vision.family.encode(params, config, items, adapters)

    family = replace(vision.family, encode=encode)
    return replace(program, vision=replace(vision, family=family)), calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [7, 0])
def test_a_picture_of_live_requests_is_encoded_once(kind: str, chunk: int) -> None:
    """At different offsets, and twice in one prompt, too."""
    engine, calls = counted(program(kind, long_prefill_threshold=chunk))
    requests = [
        asked(kind, "early", ONE, AFTER),
        asked(kind, "late", BEFORE, ONE, AFTER),
        asked(kind, "twice", AFTER, ONE, [9], ONE, AFTER),
    ]
    _, found = run(engine, init(engine), requests)
    assert sum(calls) == 1
    check(kind, requests, found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [True, False])
def test_equal_texts_with_other_pictures_share_the_text_before_them(
    kind: str, together: bool
) -> None:
    """PC-06: eight pictures that differ in one block of pixels."""
    pictures = []
    for n in range(8):
        pixels = np.asarray(ONE).copy()
        pixels[28 * (n // 4) :, 28 * (n % 4) :][:14, :14] = 255 - 20 * n
        pictures.append(Image.fromarray(pixels))
    requests = [asked(kind, str(n), BEFORE, p, AFTER) for n, p in enumerate(pictures)]
    engine = program(kind)
    state, found = init(engine), {}
    for group in [requests] if together else [[request] for request in requests]:
        state, done = run(engine, state, group)
        found |= done
    check(kind, requests, found)
    assert len({tuple(done.logprobs.tolist()) for done in found.values()}) == 8
    if not together:
        assert [found[str(n)].num_cached_tokens for n in range(8)] == [0] + [16] * 7
    state, again = run(engine, state, requests[:1])
    whole = (len(requests[0].tokens) - 1) // 8 * 8
    assert again["0"].num_cached_tokens == whole > len(BEFORE) + 8
    turned = asked(kind, "turned", pictures[0], BEFORE)
    state, first = run(engine, state, [turned])
    state, second = run(engine, state, [asked(kind, "other", pictures[1], BEFORE)])
    assert first["turned"].num_cached_tokens == second["other"].num_cached_tokens == 0


@pytest.mark.parametrize("kind", KINDS)
def test_aborted_within_a_picture(kind: str) -> None:
    """With too few blocks for all and no room for a second output."""
    requests = [
        asked(kind, "aborted", AFTER, ONE, AFTER),
        asked(kind, "one", AFTER, ONE, AFTER),
        asked(kind, "two", BEFORE, TWO, AFTER),
        asked(kind, "both", TWO, [9], ONE, AFTER),
    ]
    [feature], longest = requests[0].features, len(requests[-1].tokens) + 4
    room = feature.num_embeds * 3 // 2
    engine = program(
        kind,
        num_blocks=-(-longest // 8) * 3 // 2,
        max_batched_tokens=9,
        max_encoder_tokens=room,
        encoder_cache_tokens=room,
    )
    state, found = init(engine), {}
    for request in requests:
        state = submit(state, request)
    for number in range(400):
        if number == 1:
            inside = int(state.host.rows.num_computed_R[0])
            assert feature.offset < inside < feature.end
            state = abort(state, "aborted")
        if state.host.idle:
            break
        state, outputs = step(engine, state)
        check_host(state.host, engine.config.block_size)
        found |= {done.id: done for done in outputs.finished}
    check(kind, requests[1:], found)
    assert not state.host.encoder.holders
    assert state.host.encoder.used <= room


@pytest.mark.parametrize("kind", [*KINDS, "llava_next", "qwen2_5_vl", "smolvlm"])
@pytest.mark.parametrize("kept", [True, False])
def test_preempted_within_a_picture(kind: str, kept: bool) -> None:
    """A row that decodes takes the blocks of one that stands in its picture, whose output is found
    again, or encoded once more."""
    inside = asked(kind, "inside", AFTER, ONE, AFTER)
    [feature], length = inside.features, len(inside.tokens)
    sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=0)
    text = Request(id="text", tokens=AFTER, sampling=sampling)
    engine, calls = counted(
        program(
            kind,
            block_size=4,
            num_blocks=-(-length // 4) + 2,
            long_prefill_threshold=1,
            prefix_caching=False,
            encoder_cache_tokens=feature.num_embeds if kept else 0,
        )
    )
    state, found, stood = submit(submit(init(engine), text), inside), {}, []
    while not state.host.idle:
        before = dict(zip(state.host.rows.ids, state.host.rows.num_computed_R, strict=True))
        state, outputs = step(engine, state)
        check_host(state.host, 4)
        if outputs.num_preempted:
            stood.append(int(before["inside"]))
            assert not state.host.encoder.holders
        found |= {done.id: done for done in outputs.finished}
    assert len(stood) == 1
    assert feature.offset < stood[0] < feature.end
    assert sum(calls) == 1 if kept else sum(calls) > 1
    check(kind, [text, inside], found)
