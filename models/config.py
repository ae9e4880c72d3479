"""The geometry of a dense decoder, read once from a checkpoint's config.json.

L layers, D hidden, F MLP width, N query heads, K key/value heads, H head size, V vocabulary.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` is transformers' rope_type; fields that a kind does not use keep
    their defaults, so that equal embeddings have equal configs."""

    theta: float = 10_000.0
    kind: str = "default"
    share: float = 1.0  # of the head's channels that turn (Phi-3's partial_rotary_factor)
    attention_factor: float = 1.0  # on cos and sin: yarn, longrope
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope, one for each pair of channels
    long_factors: tuple[float, ...] = ()
    long: bool = False  # which of the two: see rope.rope_for_context
    sections: tuple[int, ...] = ()  # M-RoPE: pairs of channels that turn by time, height, width
    interleaved: bool = False  # these pairs take turns, and do not stand side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One dense decoder. Frozen and hashable: it is part of every compiled function's identity."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm of each query and key head before the rotation
    windows: tuple[int, ...]  # of each layer: the positions a token sees, itself included; 0 = all
    activation: str = "silu"  # of the MLP's gate
    sandwich: bool = False  # Gemma: norms behind attention and MLP too
    embed_scale: float = 1.0  # on the embedding table's rows, in the model's dtype
    query_scale: float = 0.0  # the square of what scores are divided by; 0 = head_dim
    local_rope: RopeConfig | None = None  # of layers with a window; None = `rope`

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return (self.query_scale or self.head_dim) ** -0.5

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


TOWER, SPARE = "tower", "spare"  # parents of linears of a tower: of those that run, of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """One matrix product: the checkpoint's projections, stacked along the output."""

    name: str  # field of the parameter tree and of the adapter rows
    parent: str  # "self_attn" or "mlp"; "" for the two outside the layers; TOWER or SPARE
    children: tuple[str, ...]  # checkpoint names, in stacking order
    in_features: int
    out_sizes: tuple[int, ...]  # one for each child

    @property
    def out_features(self) -> int:
        return sum(self.out_sizes)


def fused_linears(config: ModelConfig) -> tuple[FusedLinear, ...]:
    """The four linears of every layer, in execution order; adapters address their children."""
    D, F, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    rows = (
        ("qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), D, (q, kv, kv)),
        ("out", "self_attn", ("o_proj",), q, (D,)),
        ("gate_up", "mlp", ("gate_proj", "up_proj"), D, (F, F)),
        ("down", "mlp", ("down_proj",), F, (D,)),
    )
    return tuple(
        FusedLinear(name=n, parent=p, children=c, in_features=i, out_sizes=o)
        for n, p, c, i, o in rows
    )


def has_bias(config: ModelConfig, linear: str) -> bool:
    """Whether a fused linear of this name adds one."""
    return {"qkv": config.qkv_bias, "out": config.out_bias}.get(linear, config.mlp_bias)


def vocab_linears(config: ModelConfig) -> tuple[FusedLinear, ...]:
    """The two that the model has once: a token's embedding (a product with its one-hot vector)
    and the head. Adapters treat them as two even where the weights are tied."""
    D, V = config.hidden_size, config.vocab_size
    rows = (("embed", "embed_tokens", V, D), ("head", "lm_head", D, V))
    return tuple(
        FusedLinear(name=n, parent="", children=(c,), in_features=i, out_sizes=(o,))
        for n, c, i, o in rows
    )
