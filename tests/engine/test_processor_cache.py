"""The processor cache is a value: an LRU by bytes that changes nothing but the work."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map
from PIL import Image

from purestep.engine import Request, prepare, prepare_cached
from purestep.state.errors import ConfigError, MediaError
from purestep.state.processor_cache import (
    Processed,
    ProcessorCache,
    check_processor_cache,
    empty_processor_cache,
    find,
    remember,
    tensor_bytes,
)
from tests.engine.test_pictures import encoded
from tests.engine.tiny_images import assert_same_request, counted, image_program
from tests.models.tiny_vision import picture

SIZES = {"a": 3, "b": 5, "c": 8, "d": 40, "e": 1, "f": 2}  # of items, in bytes; d never fits


def processed(digest: str, aliases: tuple[str, ...] = ()) -> Processed:
    tensors = Map({"pixel_values": torch.zeros(SIZES[digest], dtype=torch.uint8)})
    return Processed(digest=digest, tensors=tensors, aliases=aliases)


def test_bytes_of_a_value() -> None:
    """The specification's example: bf16 (10, 3) and int64 (3,) are 60 + 24 bytes."""
    tensors = {
        "a": torch.zeros(10, 3, dtype=torch.bfloat16),
        "b": torch.zeros(3, dtype=torch.int64),
    }
    assert tensor_bytes(tensors) == 84


requests = st.lists(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=5), max_size=12
)


@given(requests=requests, limit=st.integers(0, 30))
@settings(max_examples=200)
def test_it_is_an_lru_by_bytes(requests: list[list[tuple[str, bool]]], limit: int) -> None:
    """Against an ordered dictionary, under any sequence of requests; old values stay as they are.

    W14: an item larger than the whole cache, and one whose own request drives it out, are not kept
    and hurt nobody."""
    cache = empty_processor_cache(limit)
    model: OrderedDict[str, int] = OrderedDict()
    named: set[str] = set()
    history: list[tuple[ProcessorCache, dict[str, int]]] = []
    for items in requests:
        history.append((cache, {d: cache.items[d].num_bytes for d in cache.items}))
        cache = remember(cache, [processed(d, (d * 2,) if n else ()) for d, n in items], 0, 0)
        for digest, is_named in items:
            known = digest in model and digest in named
            size = SIZES[digest] + 2 * (is_named or known)
            model.pop(digest, None)
            named = named | {digest} if is_named else named if known else named - {digest}
            if size <= limit:
                model[digest] = size
        while sum(model.values()) > limit:
            model.popitem(last=False)
        check_processor_cache(cache)
        assert {d: cache.items[d].num_bytes for d in cache.items} == dict(model)
        for digest in SIZES:
            found = find(cache, digest)
            assert (found is not None) == (digest in model)
            assert find(cache, digest * 2) is (found if digest in named & {*model} else None)
    for value, items in history:
        check_processor_cache(value)
        assert {d: value.items[d].num_bytes for d in value.items} == items


def test_an_alias_of_another_item_is_no_alias() -> None:
    cache = remember(empty_processor_cache(30), [processed("a", ("x",))], 0, 1)
    with pytest.raises(ValueError, match="leads to another item"):
        remember(cache, [processed("b", ("x",))], 0, 1)
    check_processor_cache(cache)


@pytest.mark.parametrize("limit", [-1, 1.0, True, None])
def test_wrong_limits_are_named(limit: Any) -> None:
    with pytest.raises(ConfigError, match="max_bytes="):
        empty_processor_cache(limit)


def message(*parts: Any) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else part
        if isinstance(part, dict)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


PICTURES = [picture(40 + n, 30, seed=n) for n in range(4)]
PIXEL_BYTES = 3 * 56 * 56 * 4


@given(
    rows=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6),
    limit=st.sampled_from([0, PIXEL_BYTES, 2 * PIXEL_BYTES + 500, 10**6]),
    as_file=st.booleans(),
)
@settings(max_examples=25)
def test_a_hit_gives_what_a_miss_gives(rows: list[list[int]], limit: int, as_file: bool) -> None:
    """Whatever the cache holds; no picture is processed twice for one request (W28), and none that
    the cache has."""
    program, counting = counted(image_program())
    doors = [encoded(p) if as_file else p for p in PICTURES]
    cache = empty_processor_cache(limit)
    for row in rows:
        prompt = message("x", *(doors[n] for n in row), "y")
        fresh = prepare(image_program(), prompt, id="r")
        before = cache
        known = {f.digest for f in fresh.features if find(cache, f.digest) is not None}
        counting.sizes.clear()
        cache, request = prepare_cached(program, cache, prompt, id="r")
        assert_same_request(request, fresh)
        new = {f.digest for f in fresh.features} - known
        assert len(counting.sizes) == len(new)
        assert cache.num_misses - before.num_misses == len(new)
        assert cache.num_hits - before.num_hits == len(row) - len(new)
        check_processor_cache(cache)


def test_a_hit_of_a_file_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encoded(PICTURES[0])
    cache, first = prepare_cached(
        image_program(), empty_processor_cache(10**6), message(file), id="r"
    )
    monkeypatch.setattr("purestep.engine.images.decode_picture", None)
    cache, again = prepare_cached(image_program(), cache, message(file), id="r")
    assert_same_request(first, again)
    assert (cache.num_hits, cache.num_misses) == (1, 1)


def test_one_picture_is_one_item_through_every_door() -> None:
    """What was given is the picture: a PNG, its pixels and a PIL image share tensors and names."""
    program, counting = counted(image_program())
    image = PICTURES[0]
    cache, request = prepare_cached(
        program,
        empty_processor_cache(10**6),
        message(encoded(image), image, np.asarray(image), encoded(image, "BMP")),
        id="r",
    )
    assert len({f.digest for f in request.features}) == 1
    assert len(counting.sizes) == len(cache.items) == 1


def test_tensors_own_their_memory() -> None:
    cache, request = prepare_cached(
        image_program(), empty_processor_cache(10**6), message(*PICTURES[:2]), id="r"
    )
    for feature in request.features:
        for tensor in feature.data.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.is_contiguous()
    held = sum(tensor_bytes(item.tensors) for item in cache.items.values())
    assert held == cache.num_bytes == 2 * PIXEL_BYTES


def test_a_refused_request_leaves_the_cache_as_it_is() -> None:
    """W15: the good picture before the broken one is not remembered, nor is anything else."""
    cache, _ = prepare_cached(
        image_program(), empty_processor_cache(10**6), message(PICTURES[0]), id="r"
    )
    before = cache, dict(cache.items)
    with pytest.raises(MediaError, match=r"^request 'r': image 2 of 2: "):
        prepare_cached(image_program(), cache, message(PICTURES[1], b"broken"), id="r")
    assert (cache, dict(cache.items)) == before


def given_once(salt: str | None = None, **part: Any) -> tuple[ProcessorCache, Request]:
    return prepare_cached(
        image_program(),
        empty_processor_cache(10**6),
        message({"type": "image", "image": PICTURES[0], "id": "cat", **part}),
        id="r",
        salt=salt,
    )


def test_an_id_stands_for_a_picture_that_was_given() -> None:
    cache, first = given_once(salt="s")
    only_id = message({"type": "image", "id": "cat"})
    cache, again = prepare_cached(image_program(), cache, only_id, id="r", salt="s")
    assert_same_request(first, again)
    check_processor_cache(cache)
    twice = message(
        {"type": "image", "image": PICTURES[1], "id": "x"}, {"type": "image", "id": "x"}
    )
    request = prepare(image_program(), twice, id="r")
    assert request.features[0].digest == request.features[1].digest
    plain = prepare(image_program(), message(PICTURES[0]), id="r")
    assert plain.features[0].digest == first.features[0].digest, "the pixels name it, not the id"


def test_an_id_poisons_nobody() -> None:
    """W13, ME-03: it is nothing under another salt or other options, and no second picture can
    have it while the cache knows the first."""
    cache, _ = given_once(salt="s")
    only_id = message({"type": "image", "id": "cat"})
    for options in ({}, {"salt": "t"}, {"salt": "s", "image_options": {"do_rescale": False}}):
        with pytest.raises(MediaError, match="knows none by id='cat'"):
            prepare_cached(image_program(), cache, only_id, id="r", **options)
    other = message({"type": "image", "image": PICTURES[1], "id": "cat"})
    with pytest.raises(MediaError, match="id='cat' stands for another picture"):
        prepare_cached(image_program(), cache, other, id="r", salt="s")
    cache, theirs = prepare_cached(image_program(), cache, other, id="r", salt="t")
    cache, ours = prepare_cached(image_program(), cache, only_id, id="r", salt="s")
    assert theirs.features[0].digest != ours.features[0].digest
    both = message(
        {"type": "image", "image": PICTURES[2], "id": "y"},
        {"type": "image", "image": PICTURES[3], "id": "y"},
    )
    with pytest.raises(MediaError, match="image 2 of 2: id='y' stands for another picture"):
        prepare(image_program(), both, id="r")


def test_host_memory_stays_under_the_limit() -> None:
    """MO-01: distinct pictures one after another, with room for a few and with none."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    for limit in (5 * PIXEL_BYTES, 0):
        cache = empty_processor_cache(limit)
        for array in noise:
            cache, _ = prepare_cached(
                image_program(), cache, message(Image.fromarray(array)), id="r"
            )
            assert cache.num_bytes <= limit
        assert len(cache.items) == limit // PIXEL_BYTES
        assert cache.num_misses == len(noise)
