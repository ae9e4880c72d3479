"""vLLM's turn at the traces of `bench/host_step.py`: its scheduler alone, without a model.

`schedule` and `update_from_output` of 0.27.1, prefix caching on, with the same prompts, adapters
and block size, and one made-up token for each row and step.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from bench.host_step import BLOCK_SIZE, NUM_ADAPTERS, VOCAB, Case, Stepper

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
}


def vllm_stepper(case: Case, steps: int) -> Stepper:
    """Goes on by some decoding steps, of `steps` in all, and gives the milliseconds of `schedule`
    and `update_from_output` in each."""
    scheduler = make_scheduler(case, steps)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for i, tokens in enumerate(case.prompts()):
        adapter = i % NUM_ADAPTERS
        scheduler.add_request(
            Request(
                f"r{i}",
                tokens.tolist(),
                SamplingParams(max_tokens=steps + 2, ignore_eos=True),
                None,
                lora_request=LoRARequest(f"a{adapter}", adapter + 1, f"folder/a{adapter}"),
                block_hasher=hasher,
            )
        )
    rng = np.random.default_rng(0)
    one_step(scheduler, rng, case.rows)  # the prompts
    return lambda count: [one_step(scheduler, rng, case.rows) for _ in range(count)]


def one_step(scheduler: Scheduler, rng: np.random.Generator, rows: int) -> float:
    """Milliseconds without those that make up the tokens."""
    begin = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    ids = list(plan.num_scheduled_tokens)
    assert len(ids) == rows, f"{len(ids)} of {rows} rows were scheduled"
    result = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={key: i for i, key in enumerate(ids)},
        sampled_token_ids=[[t] for t in rng.integers(3, VOCAB, rows).tolist()],
    )
    answered = time.perf_counter()
    scheduler.update_from_output(plan, result)
    return (time.perf_counter() - answered + planned - begin) * 1e3


def make_scheduler(case: Case, steps: int) -> Scheduler:
    longest = case.context + steps + BLOCK_SIZE
    with tempfile.TemporaryDirectory(prefix="purestep-bench-") as folder:
        config = MODEL | {"max_position_embeddings": longest}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {
            "model": folder,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": longest,
            "max_num_seqs": case.rows,
            "max_num_batched_tokens": case.rows * longest,
            "enable_prefix_caching": True,
            "block_size": BLOCK_SIZE,
            "enable_lora": True,
            "max_loras": NUM_ADAPTERS,
            "max_lora_rank": 8,
        }
        vllm = EngineArgs(**options).create_engine_config()
    vllm.cache_config.num_gpu_blocks = case.num_blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    kv_cache = KVCacheConfig(
        num_blocks=case.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return Scheduler(
        vllm, kv_cache, StructuredOutputManager(vllm), block_size=BLOCK_SIZE, log_stats=False
    )
