"""Every choice an engine makes, resolved once and then frozen."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from purestep.models.config import FusedLinear, ModelConfig
from purestep.state.adapters import ROW_BLOCK
from purestep.state.engine import HostState, empty_host
from purestep.state.errors import ConfigError
from purestep.state.media import MODALITIES
from purestep.state.plan import BatchDescriptor
from purestep.state.request import Request, RequestState
from purestep.state.text import TokenTable

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Complete and hashable. `load_program` makes one; `check_config` says what is allowed."""

    model: ModelConfig
    weights: str  # digest of the checkpoint
    dtype: str  # "float32", "bfloat16" or "float16": weights, KV and adapters
    device: str
    block_size: int  # tokens in one KV block
    num_blocks: int
    max_context: int  # tokens of one request, prompt and generated
    max_rows: int  # running requests
    max_batched_tokens: int  # tokens computed in one step
    long_prefill_threshold: int  # tokens of one prompt computed in one step; 0 = no such limit
    max_active_adapters: int  # distinct adapters resident on the device
    max_registered_adapters: int  # adapters kept on the host
    adapter_age_limit: int  # steps a request may wait for its adapter's place; then one is kept
    adapter_preemption: bool  # and its present users are preempted, not only let run out
    lora_rows: int  # rows of device memory for adapters, shared by all
    max_lora_rank: int
    prefix_caching: bool
    compile: bool
    seed: int  # for requests that bring none
    stop_ids: tuple[int, ...]  # the model's own end tokens
    tokens: TokenTable | None
    processors: tuple[str, ...] = ()  # names of the program's logits processors
    # Padded sizes of a step that does not only decode; () = its own size. Each a graph on a GPU, if
    # there are row_buckets, too.
    token_buckets: tuple[int, ...] = ()
    row_buckets: tuple[int, ...] = ()  # padded rows of a decode step, each a graph on a GPU
    adapter_block_quota: int = 0  # KV blocks one adapter may hold and leave cached; 0 = no limit
    lora_vocab: bool = False  # memory for adapters on embed_tokens and lm_head too
    # (modality, adapter): whose requests with such media get that adapter if they name none
    default_adapters: tuple[tuple[str, str], ...] = ()
    lora_tower: bool = False  # memory for adapters on the tower and its projector too
    tower: tuple[FusedLinear, ...] = ()  # their linears, with those never run; follows from vision
    vision: Any = None  # geometry of the loaded tower, frozen (models/vision.py); None without one
    image_limit: int = 0  # images in one prompt; 0 where there is no tower, or none is loaded
    max_encoder_tokens: int = 0  # embeddings that encoders make in one step; 0 = no media
    encoder_cache_tokens: int = 0  # embeddings kept between steps; 0 = each step encodes anew
    disable_chunked_mm_input: bool = False  # a step computes a media item whole or not at all
    bidirectional: bool = False  # rows of a media item that stand side by side see each other
    deepstack: int = 0  # decoder layers behind which rows of media are added, too
    mrope_merge: int = 0  # patches a side of a token, where media are placed by grids; 0 = they
    # are not, and positions are places in the sequence

    @property
    def kv_identity(self) -> str:
        """What a cached KV block depends on beside its tokens, adapter and salt."""
        rope = self.model.rope
        factors = f"/{'long' if rope.long else 'short'}" if rope.kind == "longrope" else ""
        return f"{self.weights}/{self.dtype}{factors}"

    @property
    def encoder_width(self) -> int:
        """Numbers of one embedding of an encoder: the hidden size, and once more for each layer of
        `deepstack`."""
        return self.model.hidden_size * (1 + self.deepstack)

    @property
    def encoder_row_bytes(self) -> int:
        """Bytes of one embedding of an encoder."""
        return self.encoder_width * _ITEMSIZE[self.dtype]


def check_config(config: Config) -> Config:
    """The config itself. Raises ConfigError naming the option, its value and the limit."""
    for name in ("block_size", "num_blocks", "max_rows", "max_active_adapters", "lora_rows"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least 1")
    if config.max_batched_tokens < config.max_rows:
        raise ConfigError(
            f"max_batched_tokens={config.max_batched_tokens} must be at least "
            f"max_rows={config.max_rows}, or a step could not decode every row"
        )
    if config.long_prefill_threshold < 0 or config.adapter_age_limit < 0:
        raise ConfigError(
            f"long_prefill_threshold={config.long_prefill_threshold} and "
            f"adapter_age_limit={config.adapter_age_limit} must be at least 0"
        )
    if not 0 <= config.adapter_block_quota <= config.num_blocks:
        raise ConfigError(
            f"adapter_block_quota={config.adapter_block_quota} must be 0 (no limit) or at most "
            f"num_blocks={config.num_blocks}"
        )
    if not 2 <= config.max_context <= config.model.max_position:
        raise ConfigError(
            f"max_context={config.max_context} must be in 2..{config.model.max_position}, "
            "the context of the model"
        )
    if config.max_registered_adapters < config.max_active_adapters:
        raise ConfigError(
            f"max_registered_adapters={config.max_registered_adapters} must be at least "
            f"max_active_adapters={config.max_active_adapters}"
        )
    if config.lora_rows % ROW_BLOCK:
        raise ConfigError(f"lora_rows={config.lora_rows} must be a multiple of {ROW_BLOCK}")
    if not 1 <= config.max_lora_rank <= config.lora_rows:
        raise ConfigError(
            f"max_lora_rank={config.max_lora_rank} must be in 1..lora_rows={config.lora_rows}"
        )
    if config.image_limit < 0 or bool(config.image_limit) != (config.vision is not None):
        raise ConfigError(
            f"image_limit={config.image_limit} must be at least 1 with a vision tower, which this "
            f"program {'has' if config.vision is not None else 'lacks'}, and 0 without"
        )
    for modality, name in config.default_adapters:
        if modality not in MODALITIES:
            raise ConfigError(
                f"default_adapters: {modality!r} is no modality, which are {', '.join(MODALITIES)}"
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"default_adapters: {modality!r} needs an adapter's name: {name!r}")
    if not 0 <= config.seed < 2**64:
        raise ConfigError(f"seed={config.seed} must be in 0..2**64-1")
    if config.max_encoder_tokens < 0 or config.encoder_cache_tokens < 0 or config.mrope_merge < 0:
        raise ConfigError(
            f"max_encoder_tokens={config.max_encoder_tokens}, "
            f"encoder_cache_tokens={config.encoder_cache_tokens} and "
            f"mrope_merge={config.mrope_merge} must be at least 0"
        )
    if not 0 <= config.deepstack < config.model.num_layers:
        raise ConfigError(
            f"deepstack={config.deepstack} must be less than the decoder's "
            f"{config.model.num_layers} layers"
        )
    if config.bidirectional and not config.disable_chunked_mm_input:
        raise ConfigError(
            "disable_chunked_mm_input=False: rows of an image see each other in this model, so a "
            "step computes all of them"
        )
    for name in ("token_buckets", "row_buckets"):
        buckets = getattr(config, name)
        if tuple(sorted({*buckets})) != buckets or buckets[:1] == (0,):
            raise ConfigError(f"{name}={buckets} must ascend from at least 1")
    return config


def initial_host(config: Config) -> HostState:
    """The host state of an engine that has seen no request."""
    return empty_host(
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        num_slots=config.max_active_adapters,
        num_row_blocks=config.lora_rows // ROW_BLOCK,
        max_registered=config.max_registered_adapters,
        block_quota=config.adapter_block_quota,
        encoder_cache_tokens=config.encoder_cache_tokens,
        encoder_row_bytes=config.encoder_row_bytes,
    )


def request_limit(config: Config, request: Request) -> int:
    """The number of tokens at which a request ends with reason length; all of the prompt's where
    it is only scored."""
    return min(len(request.tokens) + request.sampling.max_tokens, config.max_context)


def row_limit(config: Config, record: RequestState) -> int:
    """`request_limit` of a record."""
    return request_limit(config, record.request)


def describe(config: Config, num_tokens: int, num_rows: int, num_active: int) -> BatchDescriptor:
    """The shape a step is padded to: the smallest bucket that holds its tokens, or its rows where
    each has one token. More than the largest bucket are not padded.

    Rows of a step that does not only decode are padded to as many as its bucket can meet, so that
    it has one graph; where there are no graphs (no `row_buckets`) they are left as they are.
    """
    uniform = num_tokens == num_rows
    if uniform and config.row_buckets:
        num_tokens = num_rows = _bucket(config.row_buckets, num_rows) or num_rows
    elif tokens := _bucket(config.token_buckets, num_tokens):
        num_tokens = tokens
        if config.row_buckets and not uniform:
            num_rows = min(tokens, config.max_rows)
    return BatchDescriptor(
        num_tokens=num_tokens,
        num_rows=num_rows,
        uniform_decode=uniform,
        num_active_loras=_rounded(num_active, config.max_active_adapters),
    )


def _bucket(buckets: tuple[int, ...], size: int) -> int:
    """The smallest that holds so many; 0 where none does."""
    place = bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else 0


def has_graph(config: Config, shape: BatchDescriptor) -> bool:
    """Whether steps of this shape are replayed: they fit a bucket, of rows if they only decode,
    else of tokens."""
    if shape.uniform_decode:
        return shape.num_rows in config.row_buckets
    return bool(config.row_buckets) and shape.num_tokens in config.token_buckets


def largest_graph(config: Config) -> tuple[int, int]:
    """The most (tokens, rows) of any graph; zeros where there are none."""
    rows = max(config.row_buckets, default=0)
    return graph_size(max(config.token_buckets, default=0), rows, config.max_rows)


def graph_size(tokens: int, rows: int, max_rows: int) -> tuple[int, int]:
    """The same where steps of up to so many tokens, and decode steps of up to so many rows, are
    graphs; without the latter there are none."""
    tokens = tokens if rows else 0
    return max(tokens, rows), max(rows, min(tokens, max_rows))


def _rounded(count: int, limit: int) -> int:
    """0, or the next power of two, at most `limit`."""
    return min(1 << (count - 1).bit_length(), limit) if count else 0
