"""Hand-made configs, adapters and requests for the simulated device."""

from typing import Any

from immutables import Map

from purestep.engine.adapters import AdapterLoaded
from purestep.engine.config import Config, check_config, initial_host
from purestep.models.adapter_files import Adapter
from purestep.models.config import ModelConfig, RopeConfig
from purestep.simulation.device import empty_device
from purestep.state.engine import EngineState
from purestep.state.text import TokenTable

VOCAB = 12
EOS = 2
PIECES = ("a", "b", "</s>", "ab", "ba", "c", " ", "\n", "é".encode()[:1], "é".encode()[1:], "d", "")
NAMES = ("sql", "chat", "fr")
RANKS = {"v1": 8, "v2": 4, "v3": 16, "v4": 1, "v5": 16}  # of the versions a load may find
TOWERS = ("v2", "v5")  # versions that change what encoders make of media
TABLE = TokenTable(p if isinstance(p, bytes) else p.encode() for p in PIECES)

MODEL = ModelConfig(
    architecture="toy",
    num_layers=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=VOCAB,
    max_position=64,
    norm_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    windows=(0,),
)

DEFAULTS: dict[str, Any] = {
    "model": MODEL,
    "weights": "toy",
    "dtype": "float32",
    "device": "cpu",
    "block_size": 4,
    "num_blocks": 8,
    "max_context": 28,
    "max_rows": 3,
    "max_batched_tokens": 6,
    "long_prefill_threshold": 0,
    "max_active_adapters": 2,
    "max_registered_adapters": 3,
    "adapter_age_limit": 12,
    "adapter_preemption": False,
    "lora_rows": 24,
    "max_lora_rank": 16,
    "prefix_caching": True,
    "compile": False,
    "lora_tower": True,
    "seed": 5,
    "stop_ids": (EOS,),
    "tokens": TABLE,
}


def toy_config(**changes: Any) -> Config:
    """A small config, checked as every config is."""
    return check_config(Config(**{**DEFAULTS, **changes}))


def toy_state(config: Config) -> EngineState:
    """The state before the first request, on an empty toy device."""
    return EngineState(config=config, host=initial_host(config), device=empty_device(), blobs=Map())


def loaded(name: str, version: str, rank: int, source: str | None) -> AdapterLoaded:
    """A load that came out, without tensors."""
    adapter = Adapter(
        version=version,
        rank=rank,
        num_tensors=2,
        nbytes=rank * 100,
        modules=("q_proj",),
        unused_targets=(),
        arenas={"tower.toy": None} if version in TOWERS else {},
    )
    return AdapterLoaded(name=name, source=source, adapter=adapter)
