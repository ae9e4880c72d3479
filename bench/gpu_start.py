"""How long does a program on a GPU take to start: load, compile and capture?

A checkpoint of Llama 3.1 8B's shape, random, is written to a temporary folder (16 GB, which then
lie in the page cache) and loaded by a fresh process without compiled kernels (cold), then by
another with those of the first (warm). Each captures decode steps for all buckets up to 64 rows
with 0, 1 and 8 adapters (`capture`), then steps that compute prompts, of all buckets, with as many
(`prompts`), and runs a prompt. `import` is Python's start and the imports; `total` leaves it out,
as a server's start is judged without.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu_engine import llama_8b, tiny_shape
from bench.report import Figure, parser, report
from purestep.engine import Request, SamplingParams, init, load_program, step, submit, warm_up
from purestep.models.config import ModelConfig

PHASES = ("import", "load", "pool", "capture", "prompts", "prompt")


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__)
    args.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    found = args.parse_args(argv)
    if found.child is not None:
        print(json.dumps(start(found.child)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), tiny_shape() if found.smoke else llama_8b())
        report(measure(Path(folder), found.smoke), found.json)


def measure(folder: Path, smoke: bool) -> list[Figure]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    figures = []
    for kind in ("cold", "warm"):
        begun = time.time()
        command = [sys.executable, "-m", "bench.gpu_start", "--child", str(folder)]
        env = os.environ | {"TRITON_CACHE_DIR": str(folder / "kernels"), "BEGUN": str(begun)}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        seconds = json.loads(done.stdout.splitlines()[-1])
        seconds["total"] = sum(seconds.values()) - seconds["import"]
        print(kind, {phase: round(value, 2) for phase, value in seconds.items()}, flush=True)
        figures += [
            Figure(
                figure=f"gpu_start/{kind}/{phase}",
                value=value,
                unit="s",
                lower_is_better=True,
                notes={"device": device, "smoke": smoke},
            )
            for phase, value in seconds.items()
        ]
    return figures


def start(folder: Path) -> dict[str, float]:
    """Seconds of each phase, in a process that has just begun."""
    marks = [float(os.environ["BEGUN"]), time.time()]
    program = load_program(folder, num_blocks=1024, max_context=4096, prefix_caching=False)
    marks.append(time.time())
    state = init(program)
    marks.append(time.time())
    warm_up(program, state, adapters=(0, 1, 8), tokens=())
    marks.append(time.time())
    warm_up(program, state, adapters=(0, 1, 8), rows=())
    marks.append(time.time())
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    state = submit(state, Request(id="0", tokens=list(range(3, 103)), sampling=sampling))
    while not state.host.idle:
        state, _ = step(program, state)
    marks.append(time.time())
    pairs = zip(PHASES, marks, marks[1:], strict=False)
    return {phase: end - begin for phase, begin, end in pairs}


def write_checkpoint(folder: Path, shape: ModelConfig) -> None:
    """Shards of random weights under transformers' names, and config.json."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random(*size: int) -> torch.Tensor:
        made = torch.empty(size, dtype=torch.bfloat16, device=device)
        return made.normal_(0, size[-1] ** -0.5).cpu()

    D, F = shape.hidden_size, shape.intermediate_size
    linears = {
        "self_attn.q_proj": (shape.q_size, D),
        "self_attn.k_proj": (shape.kv_size, D),
        "self_attn.v_proj": (shape.kv_size, D),
        "self_attn.o_proj": (D, shape.q_size),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    norm = torch.ones(D, dtype=torch.bfloat16)
    shards = [
        {
            "model.embed_tokens.weight": random(shape.vocab_size, D),
            "lm_head.weight": random(shape.vocab_size, D),
            "model.norm.weight": norm,
        }
    ]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        weights = {f"{prefix}.{name}.weight": random(*size) for name, size in linears.items()}
        weights[f"{prefix}.input_layernorm.weight"] = norm.clone()
        weights[f"{prefix}.post_attention_layernorm.weight"] = norm.clone()
        shards.append(weights)
    where = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config_of(shape)))


def config_of(shape: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
