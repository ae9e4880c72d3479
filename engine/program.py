"""A program: config, weights and compiled functions. It never holds a request, an adapter or KV."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from immutables import Map

from purestep.engine.config import Config, check_config, initial_host
from purestep.engine.image_processor import ImageProcessor, load_image_processor
from purestep.engine.images import words_of
from purestep.engine.memory import choose_num_blocks
from purestep.engine.memory_encoder import encoder_peak_bytes, most_embeds, most_positions
from purestep.engine.native import use_native
from purestep.engine.options import (
    IMAGE_LIMIT,
    MAX_BATCHED_TOKENS,
    adapter_pairs,
    adapter_rows,
    check_no_media,
    check_processors,
    check_room,
    check_steps_hold,
    default_row_buckets,
    default_token_buckets,
    room_for,
    with_encoder,
)
from purestep.engine.pictures import PictureOptions, check_picture_options
from purestep.engine.platform import can_compile, resolve_device, resolve_dtype
from purestep.engine.pool import Pool, allocate_pool
from purestep.engine.prepare import load_tokenizer, token_table
from purestep.engine.sampling import Processor
from purestep.models.checkpoint import (
    generation_defaults,
    load_checkpoint,
    load_vision,
    stop_ids,
)
from purestep.models.compiled import compile_ends, compile_fused_layer, compile_layer
from purestep.models.config import ModelConfig
from purestep.models.decoder import LayerFn, Params, decoder_layer
from purestep.models.ends import EAGER, Ends
from purestep.models.families import model_config_from_hf
from purestep.models.fused import FusedLayerFn, fused_layer
from purestep.models.room import Room
from purestep.models.rope import rope_for_context
from purestep.models.tensor_files import read_json
from purestep.models.tower_linears import tower_linears
from purestep.models.vision import Vision
from purestep.ops import kernels
from purestep.state.engine import DeviceState, EngineState
from purestep.state.sampling import SamplingParams
from purestep.state.text import TokenTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What `step` interprets. Immutable; threads may share it, each with a state of its own."""

    config: Config
    params: Params
    layer: LayerFn  # the decoder layer, compiled or not
    fused_layer: FusedLayerFn  # the same in our own kernels (models/fused.py)
    ends: Ends  # embedding, head and sampler, compiled or not
    fused: bool  # which is the one that runs
    graphs: bool  # and steps of theirs are captured and replayed, which takes a GPU
    room: Room | None  # what the weights lie in, with rows beneath for the adapters of one pool
    tokenizer: Any  # a transformers tokenizer, or None
    processors: Map[str, Processor]  # logits processors that requests may name
    defaults: SamplingParams  # what the checkpoint's generation_config.json asks for
    vision: Vision | None = None  # the tower; None without one, or where image_limit is 0
    image_processor: ImageProcessor | None = None  # the checkpoint's, beside a tower
    pictures: PictureOptions = PictureOptions()


def load_program(path: str | os.PathLike, **options: Any) -> Program:
    """Load a Hugging Face checkpoint folder; `options` are those of `make_program`.

    With `image_limit=0` a multimodal model's tower is not read. Config.weights names it, too, where
    it is.

    Raises CheckpointError or ConfigError. Nothing is ever downloaded.
    """
    folder = Path(path)
    device = resolve_device(options.pop("device", "auto"))
    dtype = resolve_dtype(options.pop("dtype", "auto"), device, _stored_dtype(folder))
    form = {"dtype": getattr(torch, dtype), "device": device}
    room = None
    if torch.device(device).type == "cuda" and kernels.usable():
        room = room_for(model_config_from_hf(read_json(folder / "config.json")), options, **form)
    model, params, digest = load_checkpoint(folder, room=room, **form)
    found = load_vision(folder, **form) if options.get("image_limit") != 0 else None
    vision, tower = found or (None, None)
    if tower is not None:
        digest = blake3(f"purestep weights with tower v1\n{digest}\n{tower}".encode()).hexdigest()
    tokenizer = load_tokenizer(folder)
    if vision is not None and "image_processor" not in options:
        options["image_processor"] = load_image_processor(folder)
    options.setdefault("defaults", SamplingParams(**generation_defaults(folder)))
    return make_program(
        model,
        params,
        weights=digest,
        dtype=dtype,
        device=device,
        stop_ids=stop_ids(folder),
        tokenizer=tokenizer,
        vision=vision,
        room=room,
        **options,
    )


def _stored_dtype(folder: Path) -> str:
    """The number format config.json names; float32 where it names none."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return "float32"  # load_checkpoint says what is wrong with the file
    text = config.get("text_config") or {}
    names = [c.get(key) for c in (config, text) for key in ("dtype", "torch_dtype")]
    return next(filter(None, names), "float32")


def make_program(
    model: ModelConfig,
    params: Params,
    *,
    weights: str,
    dtype: str,
    device: str,
    stop_ids: tuple[int, ...] = (),
    tokenizer: Any = None,
    tokens: TokenTable | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    max_context: int | None = None,
    max_rows: int = 64,
    max_batched_tokens: int | None = None,
    long_prefill_threshold: int = 0,
    max_active_adapters: int = 8,
    max_registered_adapters: int = 64,
    adapter_age_limit: int = 256,
    adapter_preemption: bool = False,
    adapter_block_quota: int = 0,
    lora_rows: int | None = None,
    adapter_bytes: int | None = None,
    max_lora_rank: int | None = None,
    prefix_caching: bool = True,
    compile: bool = False,
    seed: int = 0,
    processors: Mapping[str, Processor] | None = None,
    defaults: SamplingParams = SamplingParams(),
    token_buckets: tuple[int, ...] | None = None,
    row_buckets: tuple[int, ...] | None = None,
    lora_vocab: bool | None = None,
    lora_tower: bool | None = None,
    default_adapters: Mapping[str, str] | None = None,
    vision: Vision | None = None,
    image_limit: int | None = None,
    image_processor: ImageProcessor | None = None,
    pictures: PictureOptions = PictureOptions(),
    max_encoder_tokens: int | None = None,
    encoder_cache_tokens: int | None = None,
    encoder_cache_bytes: int | None = None,
    disable_chunked_mm_input: bool = False,
    skip_encoder_profile: bool = False,
    room: Room | None = None,
) -> Program:
    """A program over parameters in memory, every option resolved and checked.

    `lora_rows` counts the rows of memory for adapters (128), or `adapter_bytes` does.
    A step computes at most `max_batched_tokens` (1024, or an item that must be computed whole, if
    that is longer): the more, the faster prompts are, and the longer other rows wait for them. On a
    GPU 128 for each multiprocessor are fastest (16,896 on an H200).
    `num_blocks` counts KV blocks of `block_size` tokens; else `kv_bytes` does; else memory decides
    (`engine/memory.py`). `max_context` defaults to the model's, `max_lora_rank` to `lora_rows`;
    with longrope `max_context` also chooses the factors (`models/rope.py: rope_for_context`).
    `processors` are functions (ids of prompt and generated tokens as a tuple, fp32 logits [V],
    *processor_args) -> fp32 logits [V]; requests name them, and one that raises ends its request
    alone. They run in inference mode and must be pure: `step` may call them again for the same
    tokens after a failure.
    On a GPU decode steps are padded to `row_buckets`, each a graph, by default up to `max_rows`;
    other steps, which compute parts of prompts, to `token_buckets`, by default up to 1,024 tokens.
    Larger ones run eagerly, and with `row_buckets=()` all do.
    `compile` gives the decoder's layer, embedding, head and sampler to torch.compile
    (models/compiled.py). Where the layer is one of our own kernels, its bits stay the same, and as
    these leave nothing to fuse, nothing is gained; elsewhere it takes the place of plain torch. The
    others keep their bits anywhere. Logits processors are called as they are.
    `lora_vocab` admits adapters on embed_tokens and lm_head, whose rows are as long as the
    vocabulary: by default on a CPU, where memory is taken once it is written, and nowhere else.
    `lora_tower` does the same for adapters on the linears of a vision tower and its projector.
    `default_adapters` maps a modality ("image") to the adapter of requests with such media that
    name none.
    `image_limit` is the number of images that one prompt may have, by default IMAGE_LIMIT for a
    model with a tower; with 0 there is no tower, and the engine is one for text. `pictures` says
    how they are read.

    Media: `vision` encodes at most `max_encoder_tokens` embeddings in one step, which is also the
    longest that other rows wait for it (by default `max_batched_tokens`, or its largest item if
    that is larger); `encoder_cache_tokens` or `encoder_cache_bytes` of them are kept for later
    steps and requests (by default as many). `disable_chunked_mm_input` computes each item's tokens
    in one step, as is always done where they see each other in both directions: requests with
    larger items than a step has tokens are refused, and so is a program, where it is the model
    that wants it.
    Where memory decides on the number of KV blocks, what the largest step's encoding takes is
    measured first on a GPU, and computed on a CPU (`engine/memory_encoder.py`);
    `skip_encoder_profile` leaves that out, and to you to choose `num_blocks` or `kv_bytes` so that
    the encoder finds memory, or a step with large images may fail for want of it.

    `room` is the memory that `params` lie in where adapters have their rows beneath them
    (`models/room.py: make_room, moved_in`), which makes adapters cheaper on a GPU; `load_program`
    makes one.

    Raises ConfigError naming option, value and limit.
    """
    check_processors(processors or {})
    max_context = model.max_position if max_context is None else max_context
    kind = torch.device(device).type
    graphs = kind == "cuda" and kernels.usable()
    if lora_vocab is None:
        lora_vocab = kind == "cpu"
    if image_limit is None:
        image_limit = 0 if vision is None else IMAGE_LIMIT
    vision = vision if image_limit else None
    tower = () if vision is None else tower_linears(vision.family, vision.config)
    by_modality = adapter_pairs(default_adapters)
    if vision is None:
        check_no_media(by_modality, lora_tower)
    if lora_tower is None:
        lora_tower = kind == "cpu" and vision is not None
    held = tower if lora_tower else ()
    lora_rows = adapter_rows(model, dtype, lora_vocab, held, lora_rows, adapter_bytes)
    check_room(room, lora_rows)
    if row_buckets is None:
        row_buckets = default_row_buckets(max_rows) if graphs else ()
    settings = {} if image_processor is None else image_processor.call.to_dict()
    bidirectional = vision is not None and vision.family.bidirectional
    atomic, longest = disable_chunked_mm_input or bidirectional, 0
    if vision is not None and atomic:
        words = (lambda text: ()) if tokenizer is None else words_of(tokenizer)
        longest = most_positions(vision.family, vision.config, settings, words)
    if max_batched_tokens is None:
        max_batched_tokens = max(MAX_BATCHED_TOKENS, longest)
    if token_buckets is None:
        token_buckets = default_token_buckets(max_batched_tokens) if graphs and row_buckets else ()
    if bidirectional:
        check_steps_hold(longest, max_batched_tokens, long_prefill_threshold)
    config = Config(
        model=replace(model, rope=rope_for_context(model.rope, max_context)),
        weights=weights,
        dtype=dtype,
        device=device,
        block_size=block_size,
        num_blocks=1,
        max_context=max_context,
        max_rows=max_rows,
        max_batched_tokens=max_batched_tokens,
        long_prefill_threshold=long_prefill_threshold,
        max_active_adapters=max_active_adapters,
        max_registered_adapters=max_registered_adapters,
        adapter_age_limit=adapter_age_limit,
        adapter_preemption=adapter_preemption,
        adapter_block_quota=adapter_block_quota,
        lora_rows=lora_rows,
        max_lora_rank=lora_rows if max_lora_rank is None else max_lora_rank,
        prefix_caching=prefix_caching,
        compile=compile,
        seed=seed,
        stop_ids=tuple(stop_ids),
        tokens=token_table(tokenizer) if tokens is None and tokenizer is not None else tokens,
        processors=tuple(sorted(processors or ())),
        token_buckets=tuple(token_buckets),
        row_buckets=tuple(row_buckets),
        lora_vocab=lora_vocab,
        default_adapters=by_modality,
        lora_tower=lora_tower,
        tower=tower,
        vision=None if vision is None else vision.config,
        image_limit=image_limit,
        disable_chunked_mm_input=atomic,
        bidirectional=bidirectional,
        deepstack=0 if vision is None else vision.family.deepstack(vision.config),
        mrope_merge=0 if vision is None else vision.family.merge(vision.config),
    )
    if max_encoder_tokens is None:
        largest = 0 if vision is None else most_embeds(vision.family, vision.config, settings)
        max_encoder_tokens = max(max_batched_tokens, largest)
    config = with_encoder(config, max_encoder_tokens, encoder_cache_tokens, encoder_cache_bytes)
    config, encoder_bytes = check_config(config), 0
    if vision is not None and num_blocks is None and kv_bytes is None and not skip_encoder_profile:
        encoder_bytes = encoder_peak_bytes(config, vision, settings)
    own = 0 if room is None else room.nbytes
    config = check_config(choose_num_blocks(config, num_blocks, kv_bytes, encoder_bytes, own))
    # For every program on a CPU: the ops' bits must not depend on which program came first.
    native = kind == "cpu" and use_native()
    fused = graphs or (native and dtype == "float32")
    compiled = compile and can_compile(device)
    return Program(
        config=config,
        params=params,
        layer=compile_layer() if compiled else decoder_layer,
        fused_layer=compile_fused_layer() if compiled else fused_layer,
        ends=compile_ends() if compiled else EAGER,
        fused=fused,
        graphs=graphs,
        room=room,
        tokenizer=tokenizer,
        processors=Map(processors or {}),
        defaults=defaults,
        vision=vision,
        image_processor=image_processor if vision is not None else None,
        pictures=check_picture_options(pictures),
    )


def init(program: Program) -> EngineState:
    """A fresh state with a pool of its own. Raises torch.OutOfMemoryError where a GPU has no memory
    for it."""
    return initial_state(program.config, allocate_pool(program.config, program.room))


def initial_state(config: Config, pool: Pool) -> EngineState:
    device = DeviceState(pool=pool, generation=pool.generation)
    return EngineState(config=config, host=initial_host(config), device=device, blobs=Map())
