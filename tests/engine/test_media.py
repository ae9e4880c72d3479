"""Media on a real program, whose encoder is a fixed random projection: every request with items
gets what it gets alone, and what its rows give as `prompt_embeds`, whatever the chunks, caches,
neighbours and interruptions (CI-01, CI-02, CI-05, ME-04, ME-05, PC-06, PC-07)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from purestep.engine import (
    EngineState,
    Program,
    Request,
    SamplingParams,
    abort,
    adopt,
    branch,
    execute,
    fork,
    init,
    recover,
    restore,
    schedule,
    snapshot,
    step,
    step_ahead,
    submit,
    with_weights,
)
from purestep.models.vision import Vision, VisionFamily
from purestep.state.checks import check_host
from purestep.state.encoder import i7_device_has_what_is_computed
from purestep.state.errors import RequestError, SnapshotError
from purestep.state.media import Feature
from purestep.state.request import FinishReason
from tests.engine.tiny import GREEDY, prompt, run, tiny_program

PATCH = 5  # numbers that one embedding is made from
CALLS: list[list[tuple[int, ...]]] = []  # shapes of the items of each encoder call


def encode(
    params: torch.Tensor, config: Any, items: Sequence[Any], adapters: Any
) -> list[torch.Tensor]:
    """Rows as views of one batch where the items are alike, as a careless tower gives them."""
    CALLS.append([tuple(item["pixels"].shape) for item in items])
    rows = torch.tanh(torch.cat([item["pixels"] for item in items]) @ params)
    return list(rows.split([len(item["pixels"]) for item in items]))


@cache
def projection(hidden: int) -> torch.Tensor:
    return torch.randn(PATCH, hidden, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Geometry:
    merge: int


def unused(*_: Any) -> Any:
    raise NotImplementedError


STUB = VisionFamily(
    read_config=unused,
    shapes=lambda config: {},
    unread="",
    load_params=lambda config, tensors: (),
    marker=unused,
    item=unused,
    placeholder=lambda config, item, words: (np.zeros(len(item["pixels"]), np.int32), None),
    encode=encode,
    merge=lambda config: config.merge,
    largest=lambda config, options: {"pixels": torch.zeros(77, PATCH)},
    heaviest=lambda config, options, limit: [{"pixels": torch.zeros(77, PATCH)}],
    working=lambda config, item: 10**6,
)


def program_with(merge: int = 0, **options: Any) -> Program:
    hidden = tiny_program().config.model.hidden_size
    vision = Vision(family=STUB, config=Geometry(merge), params=projection(hidden))
    budgets = {"max_encoder_tokens": 24, "encoder_cache_tokens": 24}
    return tiny_program(**{"vision": vision, **budgets, **options})


def pixels(picture: int, size: int) -> torch.Tensor:
    return torch.randn(size, PATCH, generator=torch.Generator().manual_seed(picture))


def image(picture: int, offset: int, size: int, mask: str | None = None) -> Feature:
    is_embed = None if mask is None else np.array([c == "1" for c in mask])
    return Feature(
        modality="image",
        digest=f"pixels {picture}",
        identifier=f"output {picture}",
        offset=offset,
        length=size if mask is None else len(mask),
        is_embed=is_embed,
        data={"pixels": pixels(picture, size)},
    )


def asked(id: str, length: int, *features: Feature, **sampling: Any) -> Request:
    words = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling}
    return Request(
        id=id, tokens=prompt(7, length), features=features, sampling=SamplingParams(**words)
    )


def as_embeds(request: Request, hidden: int) -> Request:
    """The same request with its encoder's rows given by the caller."""
    tokens = np.array(request.tokens)
    places: dict[int, torch.Tensor] = {}
    for feature in request.features:
        mask = np.ones(feature.length, bool) if feature.is_embed is None else feature.is_embed
        rows = torch.tanh(feature.data["pixels"] @ projection(hidden))
        places |= dict(zip((feature.offset + np.flatnonzero(mask)).tolist(), rows, strict=True))
    tokens[list(places)] = -1
    rows = torch.stack([places[place] for place in sorted(places)])
    return Request(id=request.id, tokens=tokens, prompt_embeds=rows, sampling=request.sampling)


REQUESTS = (
    asked("first", 22, image(1, 0, 16)),
    asked("middle", 26, image(1, 5, 16)),
    asked("other", 26, image(2, 5, 16)),
    asked("last", 20, image(3, 12, 8)),
    asked("several", 30, image(3, 1, 8), image(4, 9, 6), image(3, 20, 8)),
    asked("masked", 24, image(4, 3, 6, "0110110110"), image(5, 14, 3)),
    asked("woven", 18, image(6, 4, 4, "1010101"), image(5, 5, 3, "10101")),
    asked("text", 20),
)


@cache
def right() -> dict[str, list[int]]:
    """What each request gets alone, its rows given by the caller where it has items."""
    program = tiny_program(num_blocks=200, max_batched_tokens=256, prefix_caching=False)
    hidden = program.config.model.hidden_size
    found = {}
    for request in REQUESTS:
        alone = as_embeds(request, hidden) if request.features else request
        found |= run(program, init(program), [alone])[1]
    return {key: completion.tokens.tolist() for key, completion in found.items()}


def tokens_of(program: Program, requests: Sequence[Request]) -> dict[str, list[int]]:
    _, done = run(program, init(program), requests)
    return {key: completion.tokens.tolist() for key, completion in done.items()}


def test_different_images_say_different_things() -> None:
    assert right()["middle"] != right()["other"]


@pytest.mark.parametrize("chunk", [1, 7, 64, 0])
@pytest.mark.parametrize("cache_tokens", [0, 16, 100])
def test_chunks_and_caches_change_no_token(chunk: int, cache_tokens: int) -> None:
    options = {"long_prefill_threshold": chunk, "encoder_cache_tokens": cache_tokens}
    program = program_with(max_batched_tokens=64, prefix_caching=bool(chunk % 2), **options)
    assert tokens_of(program, REQUESTS) == right()


@pytest.mark.parametrize("turned", [False, True])
def test_a_cached_prefix_changes_no_token(turned: bool) -> None:
    """PC-06, PC-07: one after another on one cache, with prompts of equal ids throughout."""
    program = program_with()
    state, found = init(program), {}
    for request in (*reversed(REQUESTS), *REQUESTS) if turned else (*REQUESTS, *REQUESTS):
        state, done = run(program, state, [request])
        found[request.id] = done[request.id].tokens.tolist()
    assert found == right()
    assert done[request.id].num_cached_tokens > 0


def saying(id: str, size: int, said: int, length: int = 26) -> Request:
    """A request with an image of `size` rows, that says it has another number of them."""
    feature = replace(image(9, 5, size), length=said)
    return asked(id, length, feature)


@pytest.mark.parametrize("chunk", [7, 0])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cache_tokens", [0, 100])
def test_what_is_said_of_an_item_is_checked(chunk: int, ahead: bool, cache_tokens: int) -> None:
    """Another number of rows than the tower gives ends the requests that say it, also one that
    finds keys and values of such a row, and nobody else: neither the rest of the batch, nor who
    says what is right of the same item. Nothing of it is kept."""
    program = program_with(long_prefill_threshold=chunk, encoder_cache_tokens=cache_tokens)
    state, found = init(program), {}
    honest = saying("honest", 12, 12)
    wrong = [saying("more", 12, 14), saying("again", 12, 14, length=25), saying("less", 12, 10)]
    for request in (wrong[0], *REQUESTS[:4], wrong[1], honest, *REQUESTS[4:], wrong[2]):
        state = submit(state, request)
    while not state.host.idle:
        state, outputs = (step_ahead if ahead else step)(program, state)
        check_host(state.host, program.config.block_size)
        found |= {done.id: done for done in outputs.finished}
        assert not {request.id for request in wrong} & set(outputs.ids)
        if not state.host.in_flight:
            there = state.device.pool.encoded
            i7_device_has_what_is_computed(state.host.encoder, there)
    for request, said in zip(wrong, (14, 14, 10), strict=True):
        done = found.pop(request.id)
        assert done.finish_reason == FinishReason.ERROR
        assert done.error == (
            f"item 0 (image): {said} embeddings are said, but its encoder gave 12"
        )
        assert not len(done.tokens)
    alone = program_with(prefix_caching=False)
    want = right() | tokens_of(alone, [honest])
    assert {key: done.tokens.tolist() for key, done in found.items()} == want
    state, again = run(program, state, [*REQUESTS, honest, wrong[0]])
    assert again.pop("more").finish_reason == FinishReason.ERROR, "its blocks serve nobody"
    assert {key: done.tokens.tolist() for key, done in again.items()} == want


def test_preempted_and_aborted_within_an_item() -> None:
    """ME-04: too few blocks for all, so that rows leave and come back; one is aborted half-way."""
    program = program_with(num_blocks=14, max_batched_tokens=9, encoder_cache_tokens=16)
    state = init(program)
    for request in REQUESTS:
        state = submit(state, request)
    found, preempted = {}, 0
    for number in range(400):
        if number == 1:
            inside = state.host.rows.ids[0]
            assert 0 < state.host.rows.num_computed_R[0] < 16
            state = abort(state, inside)
        if state.host.idle:
            break
        state, outputs = step(program, state)
        check_host(state.host, program.config.block_size)
        preempted += outputs.num_preempted
        found |= {done.id: done.tokens.tolist() for done in outputs.finished}
    assert preempted
    assert found == {key: tokens for key, tokens in right().items() if key != inside}
    assert not state.host.encoder.holders
    assert state.host.encoder.used <= 16


def test_an_image_of_two_live_requests_is_encoded_once() -> None:
    CALLS.clear()
    program = program_with(max_batched_tokens=9)
    two = [REQUESTS[0], REQUESTS[1]]
    assert tokens_of(program, two) == {request.id: right()[request.id] for request in two}
    assert sum(map(len, CALLS)) == 1


def test_a_step_encodes_in_one_call() -> None:
    """W24: whatever stands between items of equal shape; each output has memory of its own (W21),
    also from a tower that gives views."""
    CALLS.clear()
    program = program_with()
    state = submit(init(program), asked("a", 20, image(1, 1, 4), image(2, 6, 7), image(3, 14, 4)))
    state, _ = step(program, state)
    assert CALLS == [[(4, PATCH), (7, PATCH), (4, PATCH)]]
    for rows in state.device.pool.encoded.values():
        assert rows.untyped_storage().nbytes() == rows.nbytes


def test_a_missing_output_is_encoded_again() -> None:
    """W29."""
    program = program_with(max_batched_tokens=9)
    state = submit(init(program), REQUESTS[0])
    state, _ = step(program, state)
    state.device.pool.encoded.clear()
    CALLS.clear()
    _, done = run(program, state)
    assert done["first"].tokens.tolist() == right()["first"]
    assert CALLS == [[(16, PATCH)]]


def half_way(program: Program, request: Request = REQUESTS[1]) -> EngineState:
    """A state whose one row stands within its item."""
    state, _ = step(program, submit(init(program), request))
    assert 5 < state.host.rows.num_computed_R[0] < 21
    return state


def test_fork_and_branch_within_an_item() -> None:
    program = program_with(max_batched_tokens=9)
    state = half_way(program)
    twin = fork(program, state)
    _, done = run(program, branch(state, "middle", ["child"]))
    assert done["child"].tokens.tolist() == done["middle"].tokens.tolist() == right()["middle"]
    assert run(program, twin)[1]["middle"].tokens.tolist() == right()["middle"]


def test_snapshot_within_an_item(tmp_path: Path) -> None:
    """Outputs are made anew, also under other budgets, if these allow the item."""
    program = program_with(max_batched_tokens=9)
    snapshot(half_way(program), tmp_path / "s")
    for cache_tokens in (24, 0):
        again = program_with(max_batched_tokens=9, encoder_cache_tokens=cache_tokens)
        _, done = run(again, restore(again, tmp_path / "s"))
        assert done["middle"].tokens.tolist() == right()["middle"]
    with pytest.raises(SnapshotError, match="max_encoder_tokens=10"):
        restore(program_with(max_encoder_tokens=10), tmp_path / "s")


def test_other_weights_encode_anew() -> None:
    program = program_with(max_batched_tokens=9)
    state = half_way(program)
    other = with_weights(program, program.params, version="same numbers, other name")
    state = adopt(other, state)
    CALLS.clear()
    _, done = run(other, state)
    assert done["middle"].tokens.tolist() == right()["middle"]
    assert len(CALLS) == 1


def test_a_failed_step_leaves_no_output_behind() -> None:
    """The step before it had cached another output, which the failed one dropped."""
    program = program_with(encoder_cache_tokens=16)
    state, _ = run(program, init(program), [REQUESTS[0]])
    state = submit(state, REQUESTS[2])
    _, plan = schedule(program.config, state.host)
    assert plan.drops == plan.overwrites.outputs == ("output 1",)
    with pytest.raises(AttributeError):
        execute(replace(program, params=None), state.device, plan, state.blobs)
    state = recover(state)
    assert not state.device.pool.encoded
    assert not state.host.encoder.outputs
    state, done = run(program, state, [REQUESTS[0]])
    assert done["other"].tokens.tolist() == right()["other"]
    assert done["first"].tokens.tolist() == right()["first"]


def test_a_step_behind_one_that_fails_leaves_no_output_behind() -> None:
    """It was queued, and has encoded an item, before the one in flight was found to have failed."""
    program = program_with()
    text = Request(id="text", tokens=prompt(1, 5), sampling=GREEDY)
    state, _ = step_ahead(program, submit(init(program), text))
    state = submit(state, REQUESTS[0])
    state.device.launched[0].read = Mock(side_effect=RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="injected"):
        step_ahead(program, state)
    state = abort(recover(state), "first")
    state, _ = run(program, state)
    assert not state.host.encoder.outputs
    assert not state.device.pool.encoded


def test_data_is_kept_as_long_as_somebody_needs_it() -> None:
    """MO-01: nothing that came with an image stays once its requests have ended."""
    program = program_with()
    state = submit(init(program), REQUESTS[0])
    assert set(state.blobs) == {"pixels 1"}
    assert state.host.requests["first"].request.features[0].data is None
    again = asked("again", 22, image(1, 0, 16))
    bare = Feature(**{**_fields(again.features[0]), "data": None})
    state = submit(state, Request(id="bare", tokens=again.tokens, features=(bare,)))
    state = abort(state, "first")
    assert set(state.blobs) == {"pixels 1"}
    state = abort(state, "bare")
    assert not state.blobs
    with pytest.raises(RequestError, match="item 0 has no data"):
        submit(state, Request(id="bare", tokens=again.tokens, features=(bare,)))


def _fields(feature: Feature) -> dict[str, Any]:
    return {name: getattr(feature, name) for name in ("modality", "digest", "identifier")} | {
        "offset": feature.offset,
        "length": feature.length,
    }


@pytest.mark.parametrize(
    ("options", "features", "message"),
    [
        ({"max_encoder_tokens": 15}, (image(1, 0, 16),), "item 0.*16 embeddings.*tokens=15"),
        ({"max_encoder_tokens": 0}, (image(1, 0, 1),), "max_encoder_tokens=0"),
        (
            {"max_encoder_tokens": 6},
            (image(6, 4, 4, "1010101"), image(5, 5, 3, "10101")),
            r"item 0 \(image\), item 1 \(image\), which overlap: 7 embeddings",
        ),
        (
            {"disable_chunked_mm_input": True, "max_batched_tokens": 15, "max_rows": 2},
            (image(1, 0, 16),),
            "16 positions.*max_batched_tokens=15",
        ),
        (
            {"disable_chunked_mm_input": True, "long_prefill_threshold": 8},
            (image(1, 0, 16),),
            "16 positions.*long_prefill_threshold=8",
        ),
        ({"merge": 2}, (image(1, 0, 16),), "item 0.*grid"),
    ],
)
def test_what_could_never_run_is_refused(
    options: dict[str, Any], features: tuple[Feature, ...], message: str
) -> None:
    """ME-05, CI-02, W3: with the item, its size and the limit, before any change."""
    state = init(program_with(**options))
    with pytest.raises(RequestError, match=message):
        submit(state, asked("a", 20, *features))
    assert not state.blobs


def test_budgets_are_resolved_in_the_config() -> None:
    """From what is given, from the largest item, in embeddings or bytes."""
    config = program_with(max_encoder_tokens=None, encoder_cache_tokens=None).config
    assert (config.max_encoder_tokens, config.encoder_cache_tokens) == (77, 77)
    row = config.model.hidden_size * 4
    config = program_with(encoder_cache_tokens=None, encoder_cache_bytes=10 * row + 1).config
    assert (config.encoder_row_bytes, config.encoder_cache_tokens) == (row, 10)


def test_embeddings_need_no_encoder() -> None:
    """An item may bring its rows itself."""
    program = tiny_program()
    hidden = program.config.model.hidden_size
    rows = torch.tanh(pixels(1, 16) @ projection(hidden))
    given = Feature(**{**_fields(image(1, 5, 16)), "data": {"embeds": rows}})
    request = asked("middle", 26, given)
    assert tokens_of(program, [request])["middle"] == right()["middle"]


@pytest.mark.parametrize("shape", [(15, 0), (17, 0), (16, 1), (16, -1)])
def test_embeddings_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    program = tiny_program()
    rows = torch.zeros(shape[0], program.config.model.hidden_size + shape[1])
    given = Feature(**{**_fields(image(1, 5, 16)), "data": {"embeds": rows}})
    state = init(program)
    with pytest.raises(RequestError, match=r"item 0: its embeddings must be floats of shape \[16"):
        submit(state, asked("a", 26, given))


def test_embeddings_that_are_not_finite_are_refused() -> None:
    program = tiny_program()
    rows = torch.zeros(16, program.config.model.hidden_size).index_fill_(
        0, torch.tensor(9), torch.inf
    )
    given = Feature(**{**_fields(image(1, 5, 16)), "data": {"embeds": rows}})
    with pytest.raises(RequestError, match="item 0: its embeddings hold NaN or infinity"):
        submit(init(program), asked("a", 26, given))


def test_ids_of_placeholders_need_not_be_in_the_vocabulary() -> None:
    program = program_with()
    tokens = list(REQUESTS[1].tokens)
    tokens[5:21] = [100_000] * 16
    request = Request(id="middle", tokens=tokens, features=(image(1, 5, 16),), sampling=GREEDY)
    assert tokens_of(program, [request])["middle"][:6] == right()["middle"]
    with pytest.raises(RequestError, match="token id 100000 at position 5"):
        submit(init(program), Request(id="a", tokens=tokens, sampling=GREEDY))
