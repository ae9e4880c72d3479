"""How fast is the engine on a GPU, and what do adapters on every row cost?

A random-weight model of Llama 3.1 8B's shape, bf16, made on the device; adapters of rank 16 on all
seven projections, given to rows in turn; greedy, end tokens ignored, prefix cache off.

W1 256 requests x (512 in, 256 out), W2 8 x (128 in, 256 out), W3 64 x (2048 in, 1 out), W4 1 x
(128 in, 256 out). Cases: base, adapters1, adapters8 and, for 64 rows, adapters32 and rank64. Times
are from the first submit to the last completion; a step's time is that of steps that only decode.
Rounds of all cases take turns; medians are reported. Floors: reading the weights once, by what a
copy on the same device reaches. `--trace DIR` writes a profile of decode steps, a picture of it,
and how long the GPU idles between them. `--peers` runs transformers and PEFT on a share of W1.
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
from purestep.models.adapter_arenas import Arena
from purestep.models.adapter_files import Adapter
from purestep.models.config import ModelConfig, RopeConfig, fused_linears
from purestep.models.decoder import Layer, Params


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    requests: int
    prompt: int
    new: int
    cases: tuple[str, ...]
    rank: int = 16


WORKLOADS = {
    "W1": Workload(requests=256, prompt=512, new=256, cases=("base", "adapters1", "adapters8")),
    "W2": Workload(requests=8, prompt=128, new=256, cases=("base", "adapters1", "adapters8")),
    "W3": Workload(requests=64, prompt=2048, new=1, cases=("base", "adapters1", "adapters8")),
    "W4": Workload(requests=1, prompt=128, new=256, cases=("base", "adapters1")),
    "rows64": Workload(requests=64, prompt=128, new=64, cases=("base", "adapters8", "adapters32")),
    "rank64": Workload(requests=64, prompt=128, new=64, cases=("base", "adapters8"), rank=64),
}


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    report(measure(args), args.json)


def arguments() -> argparse.ArgumentParser:
    args = parser(__doc__)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--only", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    args.add_argument("--trace", type=Path, metavar="DIR", help="profile decode steps")
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
        if args.smoke:
            work = replace(work, requests=min(4, work.requests), prompt=6, new=min(3, work.new))
        figures += run_workload(args, name, work, model, params, device, notes)
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.peers and device == "cuda":
        figures += peers(args, notes)
    return figures


def run_workload(
    args: argparse.Namespace,
    name: str,
    work: Workload,
    model: ModelConfig,
    params: Params,
    device: str,
    notes: dict[str, Any],
) -> list[Figure]:
    counts = {case: int(case[8:] or 0) if case != "base" else 0 for case in work.cases}
    most = max(counts.values())
    context = work.prompt + work.new
    program = make_program(
        model,
        params,
        weights="random",
        dtype="bfloat16" if device == "cuda" else "float32",
        device=device,
        block_size=16,
        num_blocks=work.requests * (-(-context // 16) + 1),
        max_context=context,
        max_rows=work.requests,
        max_batched_tokens=max(work.requests, 8 if args.smoke else 8192),
        max_active_adapters=most,
        max_registered_adapters=most,
        lora_rows=most * work.rank,
        prefix_caching=False,
    )
    start = time.perf_counter()
    state = init(program)
    for n in range(most):
        event = AdapterLoaded(
            name=f"a{n}", source=None, adapter=random_adapter(model, work.rank, n, program)
        )
        state = deliver(state, event)
    made = time.perf_counter()
    if work.new > 1:
        warm_up(program, state, adapters=sorted({*counts.values()}))
    state, _, _ = serve(program, state, work, most, 2)  # kernels of prompts
    captured = time.perf_counter() - made
    print(f"{name}: pool and adapters {made - start:.1f} s, capture {captured:.1f} s")
    seconds: dict[str, list[float]] = {case: [] for case in counts}
    steps: dict[str, list[float]] = {case: [] for case in counts}
    prefill: dict[str, list[float]] = {case: [] for case in counts}
    for _ in range(args.rounds):
        for case, count in counts.items():
            state, total, decode_ms = serve(program, state, work, count, work.new)
            seconds[case].append(total)
            steps[case] += [median(decode_ms)] if decode_ms else []
            prefill[case].append(total - sum(decode_ms) / 1e3)
            print(
                f"{name} {case}: {total:.3f} s, {median(decode_ms or [0]):.3f} ms a step",
                flush=True,
            )
    figures = [figure(name, "capture", captured, "s", notes)]
    for case in counts:
        noted = notes | {"rank": work.rank, "requests": work.requests}
        if work.new > 1:
            rates = [work.requests * work.new / s for s in seconds[case]]
            figures.append(figure(name, case, median(rates), "tokens/s", noted))
            figures.append(figure(name, f"{case}/step", median(steps[case]), "ms", noted))
        rates = [work.requests * work.prompt / s for s in prefill[case]]
        figures.append(figure(name, f"{case}/prompts", median(rates), "tokens/s", noted))
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
        for case, count in counts.items():
            if work.new > 1:
                state, idle = trace(program, state, work, count, args.trace / f"{name}-{case}")
                figures.append(figure(name, f"{case}/idle", idle, "share", notes))
    return figures


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
    program: Program, state: EngineState, work: Workload, num_adapters: int, new: int
) -> tuple[EngineState, float, list[float]]:
    """(state, seconds in all, milliseconds of every step that only decoded)"""
    requests = requests_of(program, work, num_adapters, new)
    decode_ms = []
    start = last = time.perf_counter()
    for request in requests:
        state = submit(state, request)
    while not state.host.idle:
        state, outputs = step(program, state)
        now = time.perf_counter()
        if outputs.num_tokens == outputs.num_rows:
            decode_ms.append((now - last) * 1e3)
        last = now
    return state, last - start, decode_ms


def trace(
    program: Program, state: EngineState, work: Workload, num_adapters: int, to: Path
) -> tuple[EngineState, float]:
    """Profile 20 decode steps; the share of them in which no kernel ran."""
    for request in requests_of(program, work, num_adapters, work.new):
        state = submit(state, request)
    decoding = 0
    while decoding < 4:
        state, outputs = step(program, state)
        decoding += outputs.num_tokens == outputs.num_rows
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(min(20, work.new - 8)):
            state, _ = step(program, state)
        torch.cuda.synchronize()
    while not state.host.idle:
        state, _ = step(program, state)
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in kernels)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    idle = 1 - busy / (end - spans[0][0])
    totals: dict[str, list[float]] = {}
    for event in kernels:
        totals.setdefault(event.name[:60], []).append(event.time_range.elapsed_us())
    steps = min(20, work.new - 8)
    lines = [
        f"{sum(times) / steps:9.1f} us, {len(times) / steps:.1f} x {median(times):.2f} {name}"
        for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))
    ]
    text = f"{to.name}: idle {idle:.3f}, step {(end - spans[0][0]) / steps:.0f} us\n"
    to.with_suffix(".txt").write_text(text + "\n".join(lines) + "\n")
    print(text + "\n".join(lines[:14]), flush=True)
    draw(kernels, to)
    return state, idle


def draw(kernels: list[Any], to: Path) -> None:
    """A timeline of two steps' kernels, a lane for each kind of kernel."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is not installed: no picture")
        return
    first = min(e.time_range.start for e in kernels)
    span = max(e.time_range.end for e in kernels) - first
    shown = [e for e in kernels if e.time_range.start < first + span / 10]
    lanes = {name: i for i, name in enumerate(sorted({e.name[:30] for e in shown}))}
    figure, axes = plt.subplots(figsize=(14, 1 + 0.3 * len(lanes)))
    for event in shown:
        start = (event.time_range.start - first) / 1e3
        axes.broken_barh(
            [(start, event.time_range.elapsed_us() / 1e3)], (lanes[event.name[:30]] - 0.4, 0.8)
        )
    axes.set_yticks(range(len(lanes)), [*lanes], fontsize=7)
    axes.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(to.with_suffix(".png"), dpi=90)
    plt.close(figure)


def peers(args: argparse.Namespace, notes: dict[str, Any]) -> list[Figure]:
    """transformers' `generate` on a share of W1: 64 requests x (512 in, 64 out)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rows, prompt, new = (2, 6, 3) if args.smoke else (64, 512, 64)
    shape = tiny_shape() if args.smoke else llama_8b()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads,
                vocab_size=shape.vocab_size,
                max_position_embeddings=4096,
            )
        ).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(3, shape.vocab_size, (rows, prompt), device="cuda")
    figures = []

    def rate(**options: Any) -> float:
        rates = []
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    **options,
                )
            torch.cuda.synchronize()
            rates.append(rows * new / (time.perf_counter() - start))
        return rates[-1]

    figures.append(figure("peers", "transformers", rate(), "tokens/s", notes))
    return figures


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
