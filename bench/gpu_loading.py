"""Do adapters that load without pause stall the decode steps of a GPU?

A random-weight model of Llama 3.1 8B's shape in bf16, eight rows that decode with four adapters.
Meanwhile the `Loader` reads adapters of rank 16 on all linears, 84 MB each, from files, one after
the other; each one that comes in is delivered, and a short request for it makes the step upload it
over rows of the one before. The rounds without loads send a short request for a resident adapter in
the same places, so that the steps differ by the loading alone. Rounds of both kinds take turns.

`gpu_loading/p50_ratio`, `p99_ratio`: times of all steps of the ones by those of the others.
`gpu_loading/arrival_ratio`: medians of the steps in which such a request comes in, which on the one
side wait for an upload; `gpu_loading/upload` is the time of one alone, and its rate.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from bench.gpu_engine import llama_8b, random_adapter, random_params, tiny_shape, with_room
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
    register_adapter,
    step,
    submit,
    warm_up,
)
from purestep.engine.adapters import read
from purestep.engine.loader import Loader
from purestep.engine.pool import upload_adapter_
from purestep.models.config import ModelConfig, fused_linears

ROWS, PROMPT, HELD, SOURCES, RANK = 8, 128, 4, 3, 16


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__)
    args.add_argument("--steps", type=int, default=400, help="of each kind in a round")
    args.add_argument("--rounds", type=int, default=3)
    args = args.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="purestep-bench-") as folder:
        report(measure(args, Path(folder)), args.json)


def measure(args: argparse.Namespace, folder: Path) -> list[Figure]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_shape() if args.smoke else llama_8b()
    steps, rounds = (6, 1) if args.smoke else (args.steps, args.rounds)
    context = PROMPT + 2 * rounds * (steps + 150)
    lora_rows = (HELD + 1) * RANK
    params, room = with_room(model, random_params(model, device), lora_rows, device)
    program = make_program(
        replace(model, max_position=max(context, model.max_position)),
        params,
        room=room,
        weights="random",
        dtype="bfloat16" if device == "cuda" else "float32",
        device=device,
        max_rows=ROWS + 2,
        max_context=context,
        num_blocks=(ROWS + 2) * -(-context // 16),
        max_active_adapters=HELD + 1,
        max_registered_adapters=HELD + SOURCES + 1,
        lora_rows=lora_rows,
        prefix_caching=False,
    )
    sources = [write_adapter(folder / f"s{n}", model, n) for n in range(SOURCES)]
    state = decoding(program)
    for n, source in enumerate(sources):
        state = register_adapter(state, source, name=f"n{n}")
    warm_up(program, state, rows=(ROWS, ROWS + 1), adapters=(HELD, HELD + 1))
    upload_ms, nbytes = upload_alone(program, state, sources[0])
    idle, loading = Timed(), Timed()
    with Loader(program.config) as loader:
        state, _ = run_steps(program, state, Timed(), 2, {1})
        state, _ = run_steps(program, state, Timed(), 10**9, None, loader, sources, loads=1)
        for _ in range(rounds):
            state, places = run_steps(program, state, loading, steps, None, loader, sources)
            while loader.events(block=True):  # so that the next steps are alone
                pass
            state, _ = run_steps(program, state, idle, steps, places)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    notes = {"device": name, "steps": len(loading.all), "loads": len(loading.arrivals)}
    notes |= {"rounds": rounds, "adapter_bytes": nbytes, "smoke": args.smoke}
    figures = [
        figure("upload", upload_ms, "ms", notes),
        Figure(figure="gpu_loading/rate", value=nbytes / upload_ms / 1e6, unit="GB/s", notes=notes),
    ]
    for case, q in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0)):
        alone, beside = (1e3 * float(np.quantile(t.all, q)) for t in (idle, loading))
        figures += [
            figure(f"{case}_idle", alone, "ms", notes),
            figure(case, beside, "ms", notes),
            figure(f"{case}_ratio", beside / alone, "ratio", notes),
        ]
    if idle.arrivals and loading.arrivals:
        alone, beside = (1e3 * float(np.median(t.arrivals)) for t in (idle, loading))
        figures += [
            figure("arrival_idle", alone, "ms", notes),
            figure("arrival", beside, "ms", notes),
            figure("arrival_ratio", beside / alone, "ratio", notes),
        ]
    return figures


def figure(name: str, value: float, unit: str, notes: dict) -> Figure:
    return Figure(
        figure=f"gpu_loading/{name}", value=value, unit=unit, lower_is_better=True, notes=notes
    )


class Timed:
    """Seconds of steps, and of those among them in which a request came in."""

    def __init__(self) -> None:
        self.all: list[float] = []
        self.arrivals: list[float] = []


def run_steps(
    program: Program,
    state: EngineState,
    timed: Timed,
    steps: int,
    places: set[int] | None,
    loader: Loader | None = None,
    sources: list[str] | None = None,
    loads: int = 10**9,
) -> tuple[EngineState, set[int]]:
    """Steps until there are so many, or so many loads came in. A request comes in with every load,
    else at `places`; these are returned. Deliveries count as part of their step."""
    if places is not None and loader is None:
        due, asked = set(places), []
    else:
        due, asked = set(), [0]
        loader.ask([("n0", sources[0])])
    came: set[int] = set()
    for turn in range(steps):
        begin, arrives = time.perf_counter(), turn in due
        if loader is not None:
            for event in loader.events(block=False):
                if not isinstance(event, AdapterLoaded):
                    raise RuntimeError(event.error)
                state, arrives = deliver(state, event), True
                state = submit(state, short(f"l{state.host.step}", event.name))
                asked.append((asked[-1] + 1) % len(sources))
                loader.ask([(f"n{asked[-1]}", sources[asked[-1]])])
        elif arrives:
            state = submit(state, short(f"i{state.host.step}", "h0"))
        state, outputs = step(program, state)
        taken = time.perf_counter() - begin
        if len(outputs.ids) < ROWS:
            raise RuntimeError(f"only {len(outputs.ids)} of {ROWS} rows decode")
        timed.all.append(taken)
        if arrives:
            came.add(turn)
            timed.arrivals.append(taken)
        if len(came) >= loads:
            break
    while len(state.host.rows.ids) > ROWS:  # what came in last
        state, _ = step(program, state)
    return state, came


def short(name: str, adapter: str) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    return Request(id=name, tokens=list(range(5, 21)), adapter=adapter, sampling=sampling)


def decoding(program: Program) -> EngineState:
    """Rows that decode to the end of the context, with adapters that stay."""
    state, config = init(program), program.config
    for n in range(HELD):
        adapter = random_adapter(config.model, RANK, n, program)
        state = deliver(state, AdapterLoaded(name=f"h{n}", source=None, adapter=adapter))
    random = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0, max_tokens=config.max_context, ignore_eos=True)
    for n in range(ROWS):
        tokens = random.integers(3, config.model.vocab_size, PROMPT)
        item = Request(id=f"r{n}", tokens=tokens, adapter=f"h{n % HELD}", sampling=sampling)
        state = submit(state, item)
    while len(state.host.rows.ids) < ROWS or state.host.waiting:
        state, _ = step(program, state)
    state, _ = step(program, state)
    return state


def upload_alone(program: Program, state: EngineState, source: str) -> tuple[float, int]:
    """Milliseconds, median of seven, and the bytes of an adapter, over rows that nobody uses."""
    pool, adapter = state.device.pool, read(program.config, source, "alone")
    place = next(iter(state.host.adapters.resident.values()))
    used = {b for p in state.host.adapters.resident.values() for b in p.row_blocks}
    free = [b for b in range(program.config.lora_rows // 8) if b not in used]
    place = replace(place, row_blocks=tuple(free[: len(place.row_blocks)]))
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        with torch.inference_mode():
            upload_adapter_(pool, place, adapter)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return float(np.median(times)), adapter.nbytes


def write_adapter(folder: Path, model: ModelConfig, seed: int) -> str:
    """A PEFT folder with random values on all linears."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    targets = []
    for linear in fused_linears(model):
        for child, width in zip(linear.children, linear.out_sizes, strict=True):
            targets.append(child)
            for layer in range(model.num_layers):
                key = f"base_model.model.model.layers.{layer}.{linear.parent}.{child}.lora_"
                shapes = {"A": (RANK, linear.in_features), "B": (width, RANK)}
                for role, shape in shapes.items():
                    values = torch.empty(shape).uniform_(-0.02, 0.02, generator=random)
                    tensors[f"{key}{role}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


if __name__ == "__main__":
    main()
