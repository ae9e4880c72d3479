"""What `make_program` makes of options that are left out, or given in another unit, and which of
them go together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from purestep.engine.config import Config
from purestep.engine.memory import itemsize_of, rows_that_fit
from purestep.models.config import FusedLinear, ModelConfig
from purestep.models.room import Room, make_room
from purestep.state.errors import ConfigError

MAX_BATCHED_TOKENS = 1024  # by default
IMAGE_LIMIT = 999  # images in one prompt where the user sets no limit
LORA_ROWS = 128  # by default


def check_processors(processors: Mapping[Any, Any]) -> None:
    """Raises ConfigError unless names stand for functions."""
    for name, function in processors.items():
        if not isinstance(name, str) or not name or not callable(function):
            raise ConfigError(f"processors: {name!r} must name a function, and {function!r} be one")


def check_no_media(default_adapters: tuple[tuple[str, str], ...], lora_tower: bool | None) -> None:
    """Raises ConfigError for options that a program without a tower has no use for."""
    if default_adapters:
        raise ConfigError(
            f"default_adapters={dict(default_adapters)}, but this program takes no media"
        )
    if lora_tower:
        raise ConfigError("lora_tower=True, but this program has no vision tower")


def adapter_pairs(default_adapters: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """(modality, adapter) in order. Raises ConfigError for what does not map names."""
    given = {} if default_adapters is None else default_adapters
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"default_adapters={given!r} must map modalities to adapters' names")
    return tuple(sorted(given.items()))


def adapter_rows(
    model: ModelConfig,
    dtype: str,
    lora_vocab: bool,
    tower: Sequence[FusedLinear],
    lora_rows: int | None,
    adapter_bytes: int | None,
) -> int:
    """Rows of memory for adapters, by their number or by bytes. Raises ConfigError for both."""
    if lora_rows is not None and adapter_bytes is not None:
        raise ConfigError(
            f"lora_rows={lora_rows} and adapter_bytes={adapter_bytes}: give at most one"
        )
    if adapter_bytes is not None:
        return rows_that_fit(model, adapter_bytes, itemsize_of(dtype), lora_vocab, tower)
    return LORA_ROWS if lora_rows is None else lora_rows


def room_for(
    model: ModelConfig, options: Mapping[str, Any], *, dtype: torch.dtype, device: str
) -> Room | None:
    """What `load_program` puts weights into, for these options of `make_program`; None where rows
    are counted in bytes, which takes more than the model to say how many that is."""
    if options.get("adapter_bytes") is not None:
        return None
    num_rows = options.get("lora_rows")
    return make_room(model, LORA_ROWS if num_rows is None else num_rows, dtype=dtype, device=device)


def check_room(room: Room | None, lora_rows: int) -> None:
    """Raises ConfigError for one with another number of adapter rows."""
    if room is not None and room.num_rows != lora_rows:
        raise ConfigError(f"room: it has {room.num_rows} adapter rows, lora_rows={lora_rows}")


def check_steps_hold(length: int, max_batched_tokens: int, long_prefill_threshold: int) -> None:
    """Raises ConfigError where no step computes an image of `length` positions whole."""
    for name, limit in (
        ("max_batched_tokens", max_batched_tokens),
        ("long_prefill_threshold", long_prefill_threshold or max_batched_tokens),
    ):
        if limit < length:
            raise ConfigError(
                f"{name}={limit}: an image takes up to {length} positions, and rows of an image "
                "see each other in this model, so a step computes all of them"
            )


def with_encoder(
    config: Config, max_tokens: int, cache_tokens: int | None, cache_bytes: int | None
) -> Config:
    """The config with its encoder budgets; as many embeddings are kept as are made in a step, where
    nothing else is said."""
    if cache_tokens is not None and cache_bytes is not None:
        raise ConfigError(
            f"encoder_cache_tokens={cache_tokens} and encoder_cache_bytes={cache_bytes}: "
            "give at most one"
        )
    if cache_bytes is not None:
        cache_tokens = cache_bytes // config.encoder_row_bytes
    if cache_tokens is None:
        cache_tokens = max_tokens
    return replace(config, max_encoder_tokens=max_tokens, encoder_cache_tokens=cache_tokens)


def default_row_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then in steps of 8 up to 64, of 32 up to 512; nothing beyond is padded."""
    return _up_to((1, 2, 4, *range(8, 65, 8), *range(96, 513, 32)), max_rows)


def default_token_buckets(max_batched_tokens: int) -> tuple[int, ...]:
    """16, then in steps of 32 up to 256, of 64 up to 512, of 128 up to 1,024. Larger steps keep a
    GPU busy for longer than the host needs to queue them (18 ms for 32 layers, 26 with adapters),
    so nothing beyond is padded."""
    sizes = (16, *range(32, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
    return _up_to(sizes, max_batched_tokens)


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Those below the limit, and that, or the last one where it lies beyond."""
    largest = min(limit, sizes[-1])
    return (*(size for size in sizes if size < largest), largest)
