"""Adapters on tower and projector through the whole engine: tokens and logprobs are PEFT's, the
same picture under two adapters is two encoder outputs and two KV chains (ME-01, LF-23, W23)."""

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import get_peft_model_state_dict
from PIL import Image

from purestep.engine import (
    Completion,
    EngineState,
    Program,
    Request,
    SamplingParams,
    deliver,
    fork,
    generate,
    init,
    load_adapter,
    load_adapter_tensors,
    load_program,
    register_adapter,
    restore,
    snapshot,
    step,
    submit,
)
from purestep.engine.adapters import AdapterLoaded, read
from purestep.engine.config import check_config
from purestep.engine.memory import pool_bytes, rows_bytes, rows_that_fit, tower_rows_bytes
from purestep.engine.recording import begin_recording, record, replay
from purestep.engine.schedule import schedule
from purestep.state.canonical import digest
from purestep.state.errors import AdapterError, ConfigError, RequestError, UnknownAdapterError
from purestep.state.identity import identifier
from purestep.state.media import Feature
from tests.engine.tiny import run
from tests.models.tiny_vision import expected, load, picture, saved
from tests.models.tower_adapters import folder, oracle, peft_model

PICTURES = ONE, TWO = picture(60, 45), picture(45, 60, seed=1)
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
BEFORE, BEHIND = [5, 9], [4, 6, 8, 33]


@cache
def program(kind: str, **options: Any) -> Program:
    sizes = {"block_size": 4, "num_blocks": 300, "max_rows": 8, "max_batched_tokens": 512}
    sizes |= {"max_encoder_tokens": 256, "lora_rows": 40, "max_active_adapters": 3}
    if default := options.pop("default", None):
        options["default_adapters"] = {"image": default}
    return load_program(load(kind).folder, **{"device": "cpu", **sizes, **options})


def with_adapters(kind: str, names: Sequence[str], **options: Any) -> tuple[Program, EngineState]:
    engine = program(kind, **options)
    state = init(engine)
    for name in names:
        state = load_adapter(state, folder(kind, name), name=name)
    return engine, state


def asked(
    kind: str, id: str, adapter: str | None, image: Image.Image = ONE, modality: str = "image"
) -> Request:
    model, item = load(kind), load(kind).item(image)
    ids, is_embed = model.placeholder(item)
    feature = Feature(
        modality=modality,
        digest=f"{image.size}",
        identifier=f"{image.size}",
        offset=len(BEFORE),
        length=len(ids),
        is_embed=is_embed,
        grid=model.vision.family.grid(model.vision.config, item),
        data=item,
    )
    tokens = [*BEFORE, *ids.tolist(), *BEHIND]
    return Request(id=id, tokens=tokens, adapter=adapter, features=(feature,), sampling=GREEDY)


@cache
def wanted(kind: str, adapter: str | None, number: int) -> tuple[list[int], list[float]]:
    """The greedy tokens of transformers and PEFT for a picture's prompt, and their logprobs."""
    model = replace(load(kind), oracle=oracle(kind, adapter))
    parts = [BEFORE, PICTURES[number], BEHIND]
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(GREEDY.max_tokens):
        _, logits_LV, _ = expected(model, [*parts, tokens])
        scores = logits_LV[-1].log_softmax(-1)
        two = scores.topk(2).values
        assert two[0] - two[1] > 1e-4, "the oracle's choice is no choice"
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return tokens, logprobs


def check(kind: str, done: Completion, adapter: str | None, number: int = 0) -> None:
    tokens, logprobs = wanted(kind, adapter, number)
    assert done.tokens.tolist() == tokens, (done.id, adapter)
    np.testing.assert_allclose(done.logprobs, logprobs, atol=1e-4)


BATCH = (
    ("r0", "all", 0),
    ("r1", "some", 0),
    ("r2", None, 0),
    ("r3", "all", 0),
    ("r4", "text", 0),
    ("r5", "all", 1),
    ("r6", None, 1),
)


@pytest.mark.parametrize(
    "kind", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "pixtral", "gemma3"]
)
def test_a_batch_of_adapters_on_pictures_says_what_peft_says(kind: str) -> None:
    engine, state = with_adapters(kind, ("all", "some", "text"))
    for id, adapter, number in BATCH:
        state = submit(state, asked(kind, id, adapter, PICTURES[number]))
    versions, encoded, done = state.host.adapters.names, [], {}
    while not state.host.idle:
        state, outputs = step(engine, state, sees=lambda plan, _: encoded.extend(plan.encodes))
        done |= {completion.id: completion for completion in outputs.finished}
    for id, adapter, number in BATCH:
        check(kind, done[id], adapter, number)
    wants = {(f"{PICTURES[n].size}", versions.get(name)) for _, name, n in BATCH if name != "text"}
    assert len(encoded) == len(wants) == 5, "`text` and the base model share an output"
    assert {(item.blob, item.version) for item in encoded} == wants
    assert all(item.identifier == identifier(item.blob, item.version) for item in encoded)


def test_one_after_the_other_each_has_a_chain_of_its_own() -> None:
    """ME-01: A, B, base, A again; what is found in the cache is one's own alone."""
    kind = "qwen2_vl"
    engine, state = with_adapters(kind, ("all", "some", "text"))
    length = len(asked(kind, "", None).tokens)
    full = (length - 1) // 4 * 4
    for adapter, cached in (
        ("all", 0),
        ("some", 0),
        (None, 0),
        ("all", full),
        ("text", 0),
        ("some", full),
        (None, full),
    ):
        state, done = run(engine, state, [asked(kind, "r", adapter)])
        check(kind, done["r"], adapter)
        assert done["r"].num_cached_tokens == cached, adapter
    assert len(state.host.encoder.outputs) == 3


def test_reloading_a_name_leaves_requests_in_flight_their_weights() -> None:
    """ME-01: other weights under one name are another output, also while the first is in use."""
    kind = "qwen2_vl"
    engine, state = with_adapters(kind, (), long_prefill_threshold=5)
    state = load_adapter(state, folder(kind, "all"), name="a")
    state = submit(state, asked(kind, "old", "a"))
    state, _ = step(engine, state)
    assert state.host.encoder.holders, "it stands within the picture"
    state = load_adapter(state, folder(kind, "some"), name="a")
    state, done = run(engine, state, [asked(kind, "new", "a")])
    check(kind, done["old"], "all")
    check(kind, done["new"], "some")
    assert len(state.host.encoder.outputs) == 2


def test_a_loading_adapter_defers_the_encoder() -> None:
    kind = "llava"
    engine, state = with_adapters(kind, ())
    path = str(folder(kind, "all"))
    state = register_adapter(state, path, name="a")
    state = submit(state, asked(kind, "r", "a"))
    _, plan = schedule(engine.config, state.host)
    assert plan.loads == (("a", path),)
    assert not plan.encodes
    state, _ = step(engine, state)
    loaded = AdapterLoaded(name="a", source=path, adapter=read(engine.config, path, "a"))
    state = deliver(state, loaded)
    _, plan = schedule(engine.config, state.host)
    assert [item.version for item in plan.encodes] == [loaded.adapter.version]
    _, done = run(engine, state)
    check(kind, done["r"], "all")


def test_adapters_that_take_turns_on_the_device() -> None:
    """Rows of the tower are another adapter's by then; outputs that were kept stay right."""
    kind = "llava"
    engine, state = with_adapters(
        kind, ("all", "some", "text"), max_active_adapters=1, lora_rows=16, prefix_caching=False
    )
    names = ["all", "some", None, "text", "all", "some"]
    requests = [asked(kind, f"r{n}", name) for n, name in enumerate(names)]
    _, done = run(engine, state, requests)
    for n, name in enumerate(names):
        check(kind, done[f"r{n}"], name)


@pytest.mark.parametrize("options", [
    {"encoder_cache_tokens": 0, "long_prefill_threshold": 3},
    {"num_blocks": 14, "prefix_caching": False, "encoder_cache_tokens": 16},
], ids=str)  # fmt: skip
def test_outputs_that_are_not_kept_and_rows_that_leave(options: dict[str, Any]) -> None:
    kind = "llava"
    engine, state = with_adapters(kind, ("all", "some"), **options)
    names = ["all", "some", None, "all"]
    requests = [asked(kind, f"r{n}", name) for n, name in enumerate(names)]
    _, done = run(engine, state, requests)
    for n, name in enumerate(names):
        check(kind, done[f"r{n}"], name)


def test_an_output_that_is_lost_is_made_again_with_its_adapter() -> None:
    kind = "llava"
    engine, state = with_adapters(kind, ("all",), long_prefill_threshold=6)
    state = submit(state, asked(kind, "r", "all"))
    state, _ = step(engine, state)
    assert state.device.pool.encoded
    state.device.pool.encoded.clear()
    _, done = run(engine, state)
    check(kind, done["r"], "all")


def test_a_fork_and_a_snapshot_take_the_tower_along(tmp_path: Path) -> None:
    """Of tensors in memory, which cannot be read again, with a request in the middle."""
    kind = "llava"
    engine, state = with_adapters(kind, ("some",), long_prefill_threshold=6)
    model = peft_model(kind, "all")
    tensors, config = get_peft_model_state_dict(model), model.peft_config["default"]
    state = load_adapter_tensors(state, tensors, config, name="all")
    requests = [asked(kind, "a", "all"), asked(kind, "b", "some"), asked(kind, "c", None)]
    for request in requests:
        state = submit(state, request)
    state, _ = step(engine, state)
    snapshot(state, tmp_path / "saved")
    restored = restore(engine, tmp_path / "saved")
    for twin in (fork(engine, state), restored, state):
        _, done = run(engine, twin, [asked(kind, "later", "all")])
        for id, name in (("a", "all"), ("b", "some"), ("c", None), ("later", "all")):
            check(kind, done[id], name)
    with pytest.raises(AdapterError, match="lora_tower=False"):
        restore(program(kind, long_prefill_threshold=6, lora_tower=False), tmp_path / "saved")


def test_a_recording_folds_to_the_same_state() -> None:
    kind, file = "llava", io.StringIO()
    engine, state = with_adapters(kind, (), default="a")
    begin_recording(file, state)
    state = record(file, load_adapter, state, folder(kind, "all"), name="a")
    state = record(file, submit, state, asked(kind, "r", None))
    state = record(file, load_adapter, state, folder(kind, "some"), name="a")
    state = record(file, submit, state, asked(kind, "s", "a"))
    while not state.host.idle:
        state, _ = record(file, step, engine, state)
    folded = replay(engine.config, file.getvalue().splitlines())
    assert digest(folded) == digest(state.host)


def test_a_request_with_a_picture_gets_the_default_adapter() -> None:
    kind = "llava"
    engine, state = with_adapters(kind, ("all", "some"), default="all")
    requests = [
        asked(kind, "default", None),
        asked(kind, "own", "some"),
        Request(id="text", tokens=[5, 9, 33, 70], sampling=GREEDY),
    ]
    state, done = run(engine, state, requests)
    check(kind, done["default"], "all")
    check(kind, done["own"], "some")
    assert [done[id].adapter for id in ("default", "own", "text")] == ["all", "some", None]


def test_two_modalities_that_ask_for_two_adapters_are_refused() -> None:
    """By name, before any change; one adapter for both is none too many, and one's own wins."""
    kind = "llava"
    engine, state = with_adapters(kind, ("all", "some"))
    image = asked(kind, "r", None)
    (video,) = asked(kind, "", None, TWO, modality="video").features
    length = len(image.tokens)
    both = replace(
        image,
        tokens=[*image.tokens, *image.tokens],
        features=(*image.features, replace(video, offset=length + len(BEFORE))),
    )

    def state_with(**names: str) -> EngineState:
        config = check_config(replace(engine.config, default_adapters=tuple(names.items())))
        return replace(state, config=config)

    message = r"'r': default_adapters asks for 'all' for its image and 'some' for its video"
    with pytest.raises(RequestError, match=message):
        submit(state_with(image="all", video="some"), both)
    for names, request, adapter in (
        ({"image": "all", "video": "all"}, both, "all"),
        ({"image": "all", "video": "some"}, replace(both, adapter="text"), "text"),
        ({"audio": "all", "video": "some"}, both, "some"),
        ({"audio": "all", "video": "some"}, image, None),
    ):
        given = load_adapter(state_with(**names), folder(kind, "text"), name="text")
        assert submit(given, request).host.requests["r"].request.adapter == adapter
    with pytest.raises(UnknownAdapterError, match="no adapter is called 'b'"):
        submit(state_with(image="b"), image)


def test_generate_finds_the_default_adapter_by_its_resolver() -> None:
    kind = "llava"
    engine = program(kind, default="all")
    asked_for: list[str] = []

    def resolver(name: str) -> str:
        asked_for.append(name)
        return str(folder(kind, name))

    (done,) = generate(engine, [asked(kind, "r", None)], resolver=resolver)
    check(kind, done, "all")
    assert asked_for == ["all"]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    kind = "llava"
    small = program(kind, lora_tower=False)
    state = init(small)
    message = r"'all' adapts the vision tower or its projector, but lora_tower=False.*MiB"
    with pytest.raises(AdapterError, match=message):
        load_adapter(state, folder(kind, "all"), name="all")
    assert load_adapter(state, folder(kind, "text"), name="text").host.adapters.names
    blind = init(program(kind, image_limit=0))
    with pytest.raises(AdapterError, match=r"tower, which this program does not have \(40\)"):
        load_adapter(blind, folder(kind, "all"), name="all")
    narrow = init(program(kind, max_lora_rank=8))
    with pytest.raises(AdapterError, match=r"rank 12 is above the limit max_lora_rank=8 \(11\)"):
        load_adapter(narrow, folder(kind, "some"), name="some")
    with pytest.raises(ConfigError, match="lora_tower=True, but this program has no vision tower"):
        load_program(saved(kind)[0], device="cpu", image_limit=0, lora_tower=True)
    with pytest.raises(ConfigError, match=r"\['image'\] must map modalities"):
        load_program(saved(kind)[0], device="cpu", default_adapters=["image"])
    with pytest.raises(ConfigError, match=r"'image_url' is no modality.*audio, image, video"):
        load_program(saved(kind)[0], device="cpu", default_adapters={"image_url": "a"})
    with pytest.raises(ConfigError, match="takes no media"):
        load_program(saved(kind)[0], device="cpu", image_limit=0, default_adapters={"image": "a"})


def test_rows_of_the_tower_are_counted() -> None:
    kind = "qwen2_5_vl"
    large, small = program(kind), program(kind, lora_tower=False)
    pool = init(large).device.pool
    taken = sum(rows.a_SPD.nbytes + rows.b_PO.nbytes for rows in pool.tower.values())
    assert (
        taken
        == tower_rows_bytes(large.config)
        == rows_bytes(large.config) - rows_bytes(small.config)
    )
    assert pool_bytes(large.config, 7) - pool_bytes(small.config, 7) == taken
    assert not init(small).device.pool.tower
    config = large.config
    budget = rows_bytes(replace(config, lora_rows=24))
    assert rows_that_fit(config.model, budget, 4, config.lora_vocab, config.tower) == 24
    chosen = load_program(saved(kind)[0], device="cpu", adapter_bytes=budget, max_active_adapters=2)
    assert chosen.config.lora_rows == 24
    assert chosen.config.lora_tower
