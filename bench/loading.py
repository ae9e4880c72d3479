"""Does loading adapters stall the steps that run meanwhile?

A small random model decodes on one core (one torch thread; a step takes 3 to 10 ms) while the
`Loader` reads adapters of about 100 MB from files, over and over, on another. Steps without and
with a load under way take turns, so that both see the same machine; `loading/p50_ratio` and
`loading/p99_ratio` are the times of the ones by the times of the others, of at least `--steps`
steps each. Delivery counts as part of the step in which it happens.

The two share the machine's memory whatever the loader does, so `loading/copies_p50_ratio` tells
what a process costs that does nothing but copy 100 MB over and over: a load reads, hashes, checks
and copies its tensors, and cannot be asked to cost less than a part of that.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from bench.report import Figure, parser, report
from purestep.engine import (
    EngineState,
    Program,
    Request,
    SamplingParams,
    deliver,
    init,
    load_program,
    register_adapter,
    step,
    submit,
)
from purestep.engine.adapters import AdapterLoaded
from purestep.engine.loader import Loader

ROWS, PROMPT, CONTEXT = 4, 16, 4096
ROUND = 100  # steps of one kind in a row
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}
RANK = 1440  # 100 MB in float32
COPIES = """
import numpy as np
one = np.ones(25_000_000, np.float32)
other = one.copy()
print(flush=True)
while True:
    other[:] = one
"""


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__)
    args.add_argument("--steps", type=int, default=400, help="timed steps of each kind")
    args = args.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="purestep-bench-") as folder:
            report(measure(args, Path(folder)), args.json)
    finally:
        torch.set_num_threads(before)


def measure(args: argparse.Namespace, folder: Path) -> list[Figure]:
    sizes, rank = ({}, 8) if args.smoke else (SIZES, RANK)
    sources = make_files(folder, sizes, rank)
    steps, length = (4, 2) if args.smoke else (args.steps, ROUND)
    program = load_program(
        folder / "model",
        dtype="float32",
        device="cpu",
        max_lora_rank=rank,
        lora_rows=rank,
        max_active_adapters=1,
        max_registered_adapters=1,
        num_blocks=ROWS * CONTEXT // 16,
    )
    idle, loading, loads, nbytes = run_rounds(program, sources, steps, length)
    alone, copied = run_beside_copies(program, sources, steps)
    notes = {"steps": len(loading), "loads": loads, "adapter_bytes": nbytes, "smoke": args.smoke}
    floor = float(np.median(copied) / np.median(alone))
    figures = [figure("loading/copies_p50_ratio", floor, "ratio", notes | {"loads": 0})]
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        alone, beside = (1e3 * float(np.quantile(times, q)) for times in (idle, loading))
        figures += [
            figure(f"loading/{name}_idle", alone, "ms", notes),
            figure(f"loading/{name}", beside, "ms", notes),
            figure(f"loading/{name}_ratio", beside / alone, "ratio", notes),
        ]
    return figures


def figure(name: str, value: float, unit: str, notes: dict) -> Figure:
    return Figure(figure=name, value=value, unit=unit, lower_is_better=True, notes=notes)


def make_files(folder: Path, sizes: dict[str, int], rank: int) -> list[str]:
    """A checkpoint and two adapters for it."""
    from peft import LoraConfig, get_peft_model

    from tests.models.tiny import save_checkpoint

    model = save_checkpoint(folder / "model", **sizes)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
    peft = get_peft_model(model, config)
    for seed in range(2):
        torch.manual_seed(seed)
        for name, values in peft.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(values, std=0.01)
        peft.save_pretrained(folder / f"a{seed}")
    return [str(folder / f"a{seed}") for seed in range(2)]


def run_rounds(
    program: Program, sources: list[str], steps: int, length: int
) -> tuple[list[float], list[float], int, int]:
    """Seconds of the steps without and with a load under way; the loads, the bytes of each."""
    idle: list[float] = []
    loading: list[float] = []
    loads = done = nbytes = 0
    state = decoding(program, sources)
    with Loader(program.config) as loader:
        while len(loading) < steps:
            for _ in range(length):
                state, seconds, _ = timed_step(program, state, None)
                idle.append(seconds)
            for _ in range(length):
                if loads == done:
                    at = loads % len(sources)
                    loader.ask([(f"a{at}", sources[at])])
                    loads += 1
                state, seconds, events = timed_step(program, state, loader)
                loading.append(seconds)
                done += len(events)
                nbytes = max([nbytes, *(event.adapter.nbytes for event in events)])
            while done < loads:  # so that the next steps are alone
                done += len(loader.events(block=True))
    return idle, loading, loads, nbytes


def run_beside_copies(
    program: Program, sources: list[str], steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of steps alone, and beside a process that only copies memory."""
    state = decoding(program, sources)
    alone, beside = [], []
    for _ in range(steps):
        state, seconds, _ = timed_step(program, state, None)
        alone.append(seconds)
    with subprocess.Popen([sys.executable, "-c", COPIES], stdout=subprocess.PIPE) as copier:
        try:
            copier.stdout.readline()  # it has begun
            for _ in range(steps):
                state, seconds, _ = timed_step(program, state, None)
                beside.append(seconds)
        finally:
            copier.kill()
    return alone, beside


def decoding(program: Program, sources: list[str]) -> EngineState:
    """A few rows that decode to the end of the context, and adapters that are known by name."""
    state = init(program)
    for i, source in enumerate(sources):
        state = register_adapter(state, source, name=f"a{i}")
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True)
    for i in range(ROWS):
        tokens = rng.integers(3, program.config.model.vocab_size, PROMPT)
        state = submit(state, Request(id=f"r{i}", tokens=tokens, sampling=sampling))
    for _ in range(ROWS):  # the prompts, and what a first step warms up
        state, _ = step(program, state)
    return state


def timed_step(
    program: Program, state: EngineState, loader: Loader | None
) -> tuple[EngineState, float, list[AdapterLoaded]]:
    begin = time.perf_counter()
    state, outputs = step(program, state)
    events = loader.events(block=False) if loader else []
    for event in events:
        assert isinstance(event, AdapterLoaded), event.error
        state = deliver(state, event)
    assert len(outputs.ids) == ROWS
    return state, time.perf_counter() - begin, events


if __name__ == "__main__":
    main()
