"""Does loading adapters stall the steps that run meanwhile?

A small random model decodes on one core (one torch thread; a step takes 3 to 10 ms) while the
`Loader` reads adapters of about 100 MB from files, over and over, on another. Steps without and
with a load under way take turns, so that both see the same machine; `loading/p50_ratio` and
`loading/p99_ratio` are the times of the ones by the times of the others, of at least `--steps`
steps each. Delivery counts as part of the step in which it happens. `loading/load` is how long a
load took beside steps, from its being asked for to its delivery: the loader pauses to spare the
steps, which is paid for here.

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

ROWS, PROMPT, CONTEXT = 2, 16, 4096
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}
RANK = 3488  # 100 MB in float32
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
    args.add_argument("--steps", type=int, default=400, help="timed steps of each kind, or more")
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
    steps = 4 if args.smoke else args.steps
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
    idle, loading, took, nbytes = run_rounds(program, sources, steps)
    alone, copied = run_beside_copies(program, sources, steps)
    notes = {"steps": len(loading), "loads": len(took), "adapter_bytes": nbytes}
    notes |= {"smoke": args.smoke}
    floor = float(np.median(copied) / np.median(alone))
    figures = [
        figure("loading/copies_p50_ratio", floor, "ratio", notes | {"loads": 0}),
        figure("loading/load", float(np.median(took)), "s", notes),
    ]
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
    program: Program, sources: list[str], steps: int
) -> tuple[list[float], list[float], list[float], int]:
    """Seconds of the steps without and with a load under way, and of each load; an adapter's
    bytes."""
    idle: list[float] = []
    loading: list[float] = []
    took: list[float] = []
    nbytes = 0
    state = decoding(program, sources)
    with Loader(program.config) as loader:
        while len(loading) < steps:
            at, before, events = len(took) % len(sources), len(loading), []
            begin = time.perf_counter()
            loader.ask([(f"a{at}", sources[at])])
            while not events:
                state, seconds, events = timed_step(program, state, loader)
                loading.append(seconds)
            took.append(time.perf_counter() - begin)
            nbytes = events[0].adapter.nbytes
            for _ in range(len(loading) - before):
                state, seconds, _ = timed_step(program, state, None)
                idle.append(seconds)
    return idle, loading, took, nbytes


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
    """A few rows that decode, and adapters that are known by name."""
    state = init(program)
    for i, source in enumerate(sources):
        state = register_adapter(state, source, name=f"a{i}")
    return with_rows(program, state)


def with_rows(program: Program, state: EngineState) -> EngineState:
    """With rows that decode to the end of the context."""
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
    """The state behind a step of all rows, its seconds, and what was loaded by then."""
    if state.host.idle:  # a load may outlast the rows' context
        state = with_rows(program, state)
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
