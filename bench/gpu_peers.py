"""transformers and PEFT on a share of the engine's bench: random weights of the same shape."""

import time
from typing import Any

import torch

from purestep.models.config import ModelConfig

PEERS = {"base": "transformers", "adapters8": "peft"}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peer_rates(shape: ModelConfig, rows: int, prompt: int, new: int, rank: int) -> dict[str, float]:
    """Generated tokens a second of `rows` requests, by case: without adapters transformers',
    with 8 in turn PEFT's. Greedy; end tokens are ignored."""
    model = llama(shape)
    rates = {"base": rate(model, shape, rows, prompt, new)}
    adapted = with_adapters(model, 8, rank)
    names = [f"a{row % 8}" for row in range(rows)]
    return rates | {"adapters8": rate(adapted, shape, rows, prompt, new, adapter_names=names)}


def llama(shape: ModelConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=4096,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def with_adapters(model: Any, count: int, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules=LINEARS, init_lora_weights=False)
    with torch.device("cuda"):
        adapted = get_peft_model(model, config, adapter_name="a0", autocast_adapter_dtype=False)
        for n in range(1, count):
            adapted.add_adapter(f"a{n}", config)
    return adapted.to(torch.bfloat16).cuda().eval()


def rate(model: Any, shape: ModelConfig, rows: int, prompt: int, new: int, **options: Any) -> float:
    ids = torch.randint(3, shape.vocab_size, (rows, prompt), device="cuda")
    seconds = 0.0
    for count in (2, new):  # the first warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return rows * new / seconds
