"""How fast is the engine on a GPU, and what do adapters on every row cost?

A random-weight model of Llama 3.1 8B's shape, bf16, made on the device; adapters of rank 16 on all
seven projections, given to rows in turn; greedy, end tokens ignored, prefix cache off.

W1 256 requests x (512 in, 256 out), W2 8 x (128 in, 256 out), W3 64 x (2048 in, 1 out), W4 1 x
(128 in, 256 out). Cases: base, adapters1, adapters8 and, for 64 rows, adapters32 and rank64. Times
are from the first submit to the last completion; a step's time is that of steps that only decode.
Rounds of all cases take turns; medians are reported. Floors: reading the weights once, by what a
copy on the same device reaches. `--drivers` takes `step_ahead` (ahead) or `step` (plain), whose
figures end in /plain. `--trace DIR` writes a profile of some steps, a picture of it, and how long
the GPU idles between and within them. `--peers` gives a share of W1 to transformers and PEFT, too.
`start` is what a program takes from weights on the device to its last captured graph and prompt.
`mixed` is a request of (64 in, 32 out) every second step, so that 16 rows decode: the mean time of
a step while they come, with graphs of steps that compute prompts and without (/eager).
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from bench.gpu_peers import PEERS, peer_rates
from bench.gpu_trace import Idle, trace
from bench.report import Figure, parser, report, save
from purestep.engine import (
    AdapterLoaded,
    EngineState,
    Program,
    Request,
    SamplingParams,
    abort,
    deliver,
    init,
    make_program,
    step,
    step_ahead,
    submit,
    warm_up,
)
from purestep.models.adapter_arenas import Arena
from purestep.models.adapter_files import Adapter
from purestep.models.config import ModelConfig, RopeConfig, fused_linears
from purestep.models.decoder import Layer, Params
from purestep.models.room import Room, make_room, moved_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    requests: int
    prompt: int
    new: int
    cases: tuple[str, ...]
    rank: int = 16
    every: int = 0  # steps from one arrival to the next; 0 = all come at once


WORKLOADS = {
    "W1": Workload(requests=256, prompt=512, new=256, cases=("base", "adapters1", "adapters8")),
    "W2": Workload(requests=8, prompt=128, new=256, cases=("base", "adapters1", "adapters8")),
    "W3": Workload(requests=64, prompt=2048, new=1, cases=("base", "adapters1", "adapters8")),
    "W4": Workload(requests=1, prompt=128, new=256, cases=("base", "adapters1")),
    "rows64": Workload(requests=64, prompt=128, new=64, cases=("base", "adapters8", "adapters32")),
    "rank64": Workload(requests=64, prompt=128, new=64, cases=("base", "adapters8"), rank=64),
    "mixed": Workload(requests=64, prompt=64, new=32, cases=("base", "adapters8"), every=2),
}
SHARE = Workload(requests=64, prompt=512, new=16, cases=("base", "adapters8"))  # of W1, for peers
# Of a step: 128 a multiprocessor of an H200, so that products of prompts come out in whole rounds.
TOKENS = 16_896
DRIVERS = {"ahead": step_ahead, "plain": step}


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    report(measure(args), args.json)


def arguments() -> argparse.ArgumentParser:
    args = parser(__doc__)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--only", nargs="*", choices=[*WORKLOADS], default=[*WORKLOADS])
    args.add_argument("--cases", nargs="+", help="those of them alone")
    args.add_argument("--drivers", nargs="+", choices=[*DRIVERS], default=["ahead"])
    args.add_argument("--trace", type=Path, metavar="DIR", help="profile some steps")
    args.add_argument("--peers", action="store_true", help="transformers and PEFT beside")
    return args


def measure(args: argparse.Namespace) -> list[Figure]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_shape() if args.smoke else llama_8b()
    notes = {"device": torch.cuda.get_device_name() if device == "cuda" else device}
    notes |= {"smoke": args.smoke, "rounds": args.rounds}
    start = time.perf_counter()
    params = random_params(model, device)
    leaves = [t for t in pytree.tree_leaves(params) if t is not None]
    weight_bytes = sum(t.nbytes for t in leaves)
    weight_bytes -= params.embed_VD.nbytes if params.embed_VD is not params.head_VD else 0
    rate = copy_rate(device, 2**20 if args.smoke else 2**32)
    figures = [Figure(figure="gpu_engine/copy", value=rate / 1e9, unit="GB/s", notes=notes)]
    notes["weights_floor_ms"] = weight_bytes / rate * 1e3
    print(f"weights made in {time.perf_counter() - start:.1f} s, floor {notes['weights_floor_ms']}")
    for name in args.only:
        work = WORKLOADS[name]
        if args.cases:
            work = replace(work, cases=tuple(case for case in work.cases if case in args.cases))
        if args.smoke:
            work = replace(work, requests=min(4, work.requests), prompt=6, new=min(3, work.new))
        run = run_mixed if work.every else run_workload
        figures += run(args, name, work, model, params, device, notes)
        save(figures, args.json)  # of a run that may be cut off
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.peers and device == "cuda":
        figures += beside_peers(args, model, params, notes)
    return figures


def beside_peers(
    args: argparse.Namespace, model: ModelConfig, params: Params, notes: dict[str, Any]
) -> list[Figure]:
    work = replace(SHARE, requests=4, prompt=6, new=3) if args.smoke else SHARE
    figures = run_workload(args, "share", work, model, params, "cuda", notes)
    torch.cuda.empty_cache()
    rates = peer_rates(model, work.requests, work.prompt, work.new, work.rank)
    names = {f"gpu_engine/share/{case}": case for case in rates}
    return [
        replace(it, peer=PEERS[names[it.figure]], peer_value=rates[names[it.figure]])
        if it.figure in names
        else it
        for it in figures
    ]


def run_workload(
    args: argparse.Namespace,
    name: str,
    work: Workload,
    model: ModelConfig,
    params: Params,
    device: str,
    notes: dict[str, Any],
) -> list[Figure]:
    counts = counts_of(work)
    program = program_of(args, work, model, params, device)
    start = time.perf_counter()
    state = begun(program, work)
    made = time.perf_counter()
    if work.new > 1:
        warm_up(program, state, adapters=sorted({*counts.values()}), tokens=())
    steps_full = -(-2 * program.config.max_batched_tokens // work.prompt)
    few = replace(work, requests=min(work.requests, steps_full))
    for count in {*counts.values()}:  # kernels of prompts
        state, _, _ = serve(program, state, few, count, min(2, work.new))
    ready = time.perf_counter() - start
    print(f"{name}: pool and adapters {made - start:.1f} s, all that is captured {ready:.1f} s")
    runs = {
        case + ("" if driver == "ahead" else f"/{driver}"): (count, driver)
        for case, count in counts.items()
        for driver in args.drivers
    }
    seconds: dict[str, list[float]] = {case: [] for case in runs}
    steps: dict[str, list[float]] = {case: [] for case in runs}
    prefill: dict[str, list[float]] = {case: [] for case in runs}
    for _ in range(args.rounds):
        for case, (count, driver) in runs.items():
            state, total, decode_ms = serve(program, state, work, count, work.new, driver)
            seconds[case].append(total)
            steps[case] += [median(decode_ms)] if decode_ms else []
            prefill[case].append(total - sum(decode_ms) / 1e3)
            print(
                f"{name} {case}: {total:.3f} s, {median(decode_ms or [0]):.3f} ms a step",
                flush=True,
            )
    figures = [figure(name, "start", ready, "s", notes)]
    for case in runs:
        noted = notes | {"rank": work.rank, "requests": work.requests}
        if work.new > 1:
            rates = [work.requests * work.new / s for s in seconds[case]]
            figures.append(figure(name, case, median(rates), "tokens/s", noted))
            figures.append(figure(name, f"{case}/step", median(steps[case]), "ms", noted))
        rates = [work.requests * work.prompt / s for s in prefill[case]]
        figures.append(figure(name, f"{case}/prompts", median(rates), "tokens/s", noted))
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
        for case, (count, driver) in runs.items():
            to = args.trace / f"{name}-{case.replace('/', '-')}"
            state, idle = traced(program, state, work, count, driver, to)
            figures.append(figure(name, f"{case}/idle", idle.between, "share", notes))
            figures.append(figure(name, f"{case}/gaps", idle.within, "share", notes))
    return figures


def counts_of(work: Workload) -> dict[str, int]:
    """Adapters of each case."""
    return {case: int(case[8:] or 0) if case != "base" else 0 for case in work.cases}


def program_of(
    args: argparse.Namespace,
    work: Workload,
    model: ModelConfig,
    params: Params,
    device: str,
    **options: Any,
) -> Program:
    """A program for such requests."""
    most, context = max(counts_of(work).values()), work.prompt + work.new
    lora_rows = max(1, most) * work.rank
    params, room = with_room(model, params, lora_rows, device)
    return make_program(
        model,
        params,
        room=room,
        weights="random",
        dtype="bfloat16" if device == "cuda" else "float32",
        device=device,
        block_size=16,
        num_blocks=work.requests * (-(-context // 16) + 1),
        max_context=context,
        max_rows=work.requests,
        max_batched_tokens=max(work.requests, 8 if args.smoke else TOKENS),
        max_active_adapters=max(1, most),
        max_registered_adapters=max(1, most),
        lora_rows=lora_rows,
        prefix_caching=False,
        **options,
    )


def begun(program: Program, work: Workload) -> EngineState:
    """A state that knows the adapters."""
    state = init(program)
    for n in range(max(counts_of(work).values())):
        adapter = random_adapter(program.config.model, work.rank, n, program)
        state = deliver(state, AdapterLoaded(name=f"a{n}", source=None, adapter=adapter))
    return state


def run_mixed(
    args: argparse.Namespace,
    name: str,
    work: Workload,
    model: ModelConfig,
    params: Params,
    device: str,
    notes: dict[str, Any],
) -> list[Figure]:
    counts, found = counts_of(work), {}
    for ending, options in (("", {}), ("/eager", {"token_buckets": ()})):
        program = program_of(args, work, model, params, device, **options)
        state = begun(program, work)
        for count in counts.values():  # kernels and graphs
            state, _ = serve_steadily(program, state, work, count, args.drivers[0])
        for _ in range(args.rounds):
            for case, count in counts.items():
                for driver in args.drivers:
                    key = case + ("" if driver == "ahead" else f"/{driver}") + ending
                    state, step_ms = serve_steadily(program, state, work, count, driver)
                    found.setdefault(key, []).append(step_ms)
                    print(f"{name} {key}: {step_ms:.3f} ms a step", flush=True)
        del program, state  # its adapter rows, which the next one takes
    noted = notes | {"rank": work.rank, "requests": work.requests}
    return [figure(name, key, median(times), "ms", noted) for key, times in found.items()]


def figure(name: str, case: str, value: float, unit: str, notes: dict[str, Any]) -> Figure:
    return Figure(
        figure=f"gpu_engine/{name}/{case}",
        value=value,
        unit=unit,
        lower_is_better=unit != "tokens/s",
        notes=notes,
    )


def requests_of(program: Program, work: Workload, num_adapters: int, new: int) -> list[Request]:
    vocab, random = program.config.model.vocab_size, np.random.default_rng(0)
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return [
        Request(
            id=str(row),
            tokens=random.integers(3, vocab, work.prompt).tolist(),
            adapter=f"a{row % num_adapters}" if num_adapters else None,
            sampling=sampling,
        )
        for row in range(work.requests)
    ]


def serve(
    program: Program,
    state: EngineState,
    work: Workload,
    num_adapters: int,
    new: int,
    driver: str = "ahead",
) -> tuple[EngineState, float, list[float]]:
    """(state, seconds in all, milliseconds of every step that only decoded)"""
    requests = requests_of(program, work, num_adapters, new)
    decode_ms = []
    start = last = time.perf_counter()
    for request in requests:
        state = submit(state, request)
    while not state.host.idle:
        state, outputs = DRIVERS[driver](program, state)
        now = time.perf_counter()
        if outputs.num_tokens == outputs.num_rows > 0:
            decode_ms.append((now - last) * 1e3)
        last = now
    return state, last - start, decode_ms


def serve_steadily(
    program: Program, state: EngineState, work: Workload, num_adapters: int, driver: str
) -> tuple[EngineState, float]:
    """(state, milliseconds of a step from when requests begin to leave until they come no more)"""
    waiting = requests_of(program, work, num_adapters, work.new)[::-1]
    turns = []
    while waiting or not state.host.idle:
        if waiting:
            turns.append(time.perf_counter())
            if len(turns) % work.every == 1:
                state = submit(state, waiting.pop())
        state, _ = DRIVERS[driver](program, state)
    steady = turns[work.new :] if len(turns) > work.new + 1 else turns
    return state, (steady[-1] - steady[0]) / (len(steady) - 1) * 1e3


def traced(
    program: Program,
    state: EngineState,
    work: Workload,
    num_adapters: int,
    driver: str,
    to: Path,
) -> tuple[EngineState, Idle]:
    """Profile 20 decode steps, or 4 steps of prompts where nothing is decoded."""
    for request in requests_of(program, work, num_adapters, work.new):
        state = submit(state, request)
    before = 4 if work.new > 1 else 2
    while before:
        state, outputs = DRIVERS[driver](program, state)
        decoded = outputs.num_tokens == outputs.num_rows > 0
        before -= decoded if work.new > 1 else 1

    def advance() -> None:
        nonlocal state
        state, _ = DRIVERS[driver](program, state)

    idle = trace(advance, min(20, work.new - 8) if work.new > 1 else 4, to)
    for row in range(work.requests):
        if str(row) in state.host.requests:
            state = abort(state, str(row))
    while not state.host.idle:
        advance()
    return state, idle


def copy_rate(device: str, nbytes: int) -> float:
    """Bytes read and written in a second by the device's own copy."""
    source = torch.randint(0, 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * nbytes / median(times)


def llama_8b() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position=131072,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0, kind="llama3", factor=8.0, original_max_position=8192),
        tie_embeddings=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(0,) * 32,
    )


def tiny_shape() -> ModelConfig:
    return replace(
        llama_8b(),
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=128,
        windows=(0, 0),
    )


def random_params(model: ModelConfig, device: str) -> Params:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    random = torch.Generator(device=device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0, columns**-0.5, generator=random)

    ones = torch.ones(model.hidden_size, dtype=dtype, device=device)
    layers = []
    for _ in range(model.num_layers):
        weights = {
            linear.name: matrix(linear.out_features, linear.in_features)
            for linear in fused_linears(model)
        }
        layers.append(
            Layer(
                attn_norm_D=ones,
                qkv_OD=weights["qkv"],
                qkv_bias_O=None,
                qk_norm_NH=None,
                out_DO=weights["out"],
                out_bias_D=None,
                mlp_norm_D=ones,
                gate_up_OD=weights["gate_up"],
                gate_up_bias_O=None,
                down_DF=weights["down"],
                down_bias_D=None,
            )
        )
    return Params(
        embed_VD=matrix(model.vocab_size, model.hidden_size),
        layers=tuple(layers),
        norm_D=ones,
        head_VD=matrix(model.vocab_size, model.hidden_size),
    )


def with_room(
    model: ModelConfig, params: Params, lora_rows: int, device: str
) -> tuple[Params, Room | None]:
    """The parameters where `load_program` would have put them."""
    room = None
    if device == "cuda":
        room = make_room(model, lora_rows, dtype=params.norm_D.dtype, device=device)
    return moved_in(params, room), room


def random_adapter(model: ModelConfig, rank: int, seed: int, program: Program) -> Adapter:
    dtype, arenas = getattr(torch, program.config.dtype), {}
    random, L = torch.Generator(program.config.device).manual_seed(seed), model.num_layers

    def values(*shape: int, scale: float) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=program.config.device)
        return made.normal_(0, scale, generator=random).cpu()

    for linear in fused_linears(model):
        S, D = len(linear.out_sizes), linear.in_features
        arenas[linear.name] = Arena(
            a_LSRD=values(L, S, rank, D, scale=D**-0.5),
            b_LRO=values(L, rank, linear.out_features, scale=0.1 * rank**-0.5),
        )
    return Adapter(
        version=f"{seed:064x}",
        rank=rank,
        num_tensors=14 * L,
        nbytes=sum(a.a_LSRD.nbytes + a.b_LRO.nbytes for a in arenas.values()),
        modules=(),
        unused_targets=(),
        arenas=arenas,
    )


if __name__ == "__main__":
    main()
