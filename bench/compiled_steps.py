"""What does compile=True cost at the start, and what does it gain in a step of few tokens?

Eight layers of Llama 3.1 8B's shape, random, on a GPU in bfloat16 (a tiny model on a CPU). A fresh
process each without compile, with it and nothing compiled before, and with what the former left in
its caches; all with Triton's kernels of the first. `warm_up` captures decode steps of 8 rows with
0, 1 and 8 adapters and compiles the rest. A step computes 8 prompts of 16 tokens, which no graph
replays, so that the host's work shows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.gpu_engine import llama_8b, random_adapter, random_params, tiny_shape
from bench.report import Figure, parser, report
from purestep.engine import (
    AdapterLoaded,
    EngineState,
    Program,
    Request,
    SamplingParams,
    deliver,
    init,
    make_program,
    step,
    submit,
    warm_up,
)

ROWS, PROMPT, RANK = 8, 16, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__)
    args.add_argument("--steps", type=int, default=50, help="of each kind in each process")
    args.add_argument("--child", choices=("eager", "compiled"), help=argparse.SUPPRESS)
    found = args.parse_args(argv)
    if found.child is not None:
        print(json.dumps(run(found.child == "compiled", found.steps, found.smoke)))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(measure(Path(folder), found.steps, found.smoke), found.json)


def measure(folder: Path, steps: int, smoke: bool) -> list[Figure]:
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    env = os.environ | {name: str(folder / path) for name, path in caches.items()}
    figures = []
    for case in ("eager", "compiled_cold", "compiled"):
        command = [sys.executable, "-m", "bench.compiled_steps", "--child", case.partition("_")[0]]
        command += ["--steps", str(steps)] + ["--smoke"] * smoke
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(case, {name: round(value, 3) for name, value in found.items()}, flush=True)
        figures += [
            Figure(
                figure=f"compiled_steps/{case}/{name}",
                value=value,
                unit="s" if name == "warm_up" else "ms",
                lower_is_better=True,
                notes={"device": device, "smoke": smoke, "steps": steps},
            )
            for name, value in found.items()
        ]
    return figures


def run(compiled: bool, steps: int, smoke: bool) -> dict[str, float]:
    """Seconds of the warm-up, and milliseconds of a step without adapters and with 8."""
    program = program_of(compiled, DEVICE == "cpu" or smoke)
    state = init(program)
    for n in range(ROWS):
        adapter = random_adapter(program.config.model, RANK, n, program)
        state = deliver(state, AdapterLoaded(name=str(n), source=None, adapter=adapter))
    begun = time.perf_counter()
    warm_up(program, state, rows=(ROWS,), adapters=(0, 1, ROWS))
    found = {"warm_up": time.perf_counter() - begun}
    for name, with_adapters in (("base", False), ("adapters8", True)):
        times = []
        for _ in range(steps + 3):
            state, taken = timed_step(program, state, with_adapters)
            times.append(taken * 1e3)
        found[name] = median(times[3:])
    return found


def program_of(compiled: bool, tiny: bool) -> Program:
    model = tiny_shape() if tiny else replace(llama_8b(), num_layers=8, windows=(0,) * 8)
    return make_program(
        model,
        random_params(model, DEVICE),
        weights="random",
        dtype="bfloat16" if DEVICE == "cuda" else "float32",
        device=DEVICE,
        num_blocks=64,
        max_context=128,
        max_rows=ROWS,
        max_batched_tokens=ROWS * PROMPT,
        max_active_adapters=ROWS,
        lora_rows=ROWS * RANK,
        prefix_caching=False,
        token_buckets=(),
        compile=compiled,
    )


def timed_step(
    program: Program, state: EngineState, with_adapters: bool
) -> tuple[EngineState, float]:
    """A step that is all there is to these requests, and its seconds."""
    random = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for row in range(ROWS):
        tokens = random.integers(3, program.config.model.vocab_size, PROMPT).tolist()
        adapter = str(row) if with_adapters else None
        request = Request(id=str(row), tokens=tokens, adapter=adapter, sampling=sampling)
        state = submit(state, request)
    begun = time.perf_counter()
    state, outputs = step(program, state)
    assert len(outputs.finished) == ROWS
    return state, time.perf_counter() - begun


if __name__ == "__main__":
    main()
