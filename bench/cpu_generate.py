"""How fast is offline generation on a CPU, alone and with a different adapter on every row?

16 requests of 64 prompt tokens generate 64 tokens each, greedily, end tokens ignored. `base` is the
plain model, its peer transformers' `generate`; `mixed4` gives the rows the base model and four
adapters in turn (rank 8 on all seven linears), its peer PEFT's mixed batches (`adapter_names=`).
Ours and the peers take turns in every round, and what is reported is the median of the rounds.
The time is from the first submit to the last completion; loading and one warm-up are not in it.
"""

import argparse
import importlib.util
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.report import Figure, figures_of, parser, report
from purestep.engine import (
    EngineState,
    Program,
    Request,
    SamplingParams,
    init,
    load_adapter,
    load_program,
    step,
    submit,
)

ADAPTERS = ("a0", "a1", "a2", "a3")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Names = list[str | None]  # the adapter of every row
Result = tuple[float, np.ndarray]  # seconds, and the new tokens of every row


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rows: int = 16
    prompt: int = 64
    new: int = 64

    @property
    def names(self) -> Names:
        """The base model and the adapters in turn."""
        return [(None, *ADAPTERS)[row % (1 + len(ADAPTERS))] for row in range(self.rows)]


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads or before)
    try:
        with tempfile.TemporaryDirectory(prefix="purestep-bench-") as folder:
            report(measure(args, Path(folder)), args.json)
    finally:
        torch.set_num_threads(before)


def arguments() -> argparse.ArgumentParser:
    args = parser(__doc__)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="float32")
    args.add_argument("--model", type=Path, help="checkpoint folder; default: SmolLM2-135M")
    args.add_argument("--threads", type=int, help="default: what torch chooses")
    args.add_argument("--compile", action="store_true", help="ours with compile=True")
    return args


def measure(args: argparse.Namespace, folder: Path) -> list[Figure]:
    sizes = Sizes(rows=5, prompt=8, new=4) if args.smoke else Sizes()
    model, figures = checkpoint(args, folder), []
    adapters = make_adapters(model, folder)
    for dtype in ["float32", "bfloat16"] if args.dtype == "both" else [args.dtype]:
        runs = compete(args, sizes, model, adapters, dtype)
        notes = {"threads": torch.get_num_threads(), "compile": args.compile, "smoke": args.smoke}
        peers = {"base": "transformers", "mixed4": "peft"}
        name = f"cpu_generate/{{case}}/{dtype}"
        figures += figures_of(name, runs, peers, "tokens/s", **notes)
        if "mixed4" in runs:
            value = figures[-1].value / figures[-2].value
            name = f"cpu_generate/mixed4_over_base/{dtype}"
            figures.append(Figure(figure=name, value=value, unit="ratio", notes=notes))
    return figures


def checkpoint(args: argparse.Namespace, folder: Path) -> Path:
    if args.smoke:
        from tests.models.tiny import save_checkpoint

        save_checkpoint(folder / "model")
        return folder / "model"
    if args.model:
        return args.model
    from purestep.engine.demo_model import smollm2_dir

    return smollm2_dir()


def make_adapters(model: Path, folder: Path) -> dict[str, Path]:
    """Random adapters as PEFT saves them; none without PEFT."""
    if importlib.util.find_spec("peft") is None:
        print("peft is not installed: mixed4 is skipped")
        return {}
    from peft import LoraConfig, get_peft_model

    for seed, name in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        config = LoraConfig(r=8, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        get_peft_model(base, config).save_pretrained(folder / name)
    return {name: folder / name for name in ADAPTERS}


def compete(
    args: argparse.Namespace, sizes: Sizes, model: Path, adapters: dict[str, Path], dtype: str
) -> dict[str, list[float]]:
    """Tokens per second of every round, by case and by peer, each pair checked to agree before."""
    program = load_program(
        model,
        dtype=dtype,
        device="cpu",
        max_rows=sizes.rows,
        max_context=sizes.prompt + sizes.new,
        max_batched_tokens=sizes.rows * sizes.prompt,
        prefix_caching=False,  # every round does all the work
        compile=args.compile,
    )
    prompts_RT = np.random.default_rng(0).integers(
        3, program.config.model.vocab_size, (sizes.rows, sizes.prompt)
    )
    cases: dict[str, Names] = {"base": [None] * sizes.rows}
    if adapters:
        cases["mixed4"] = sizes.names
    peers = {"base": ("transformers", transformers_model(model, {}, dtype))}
    if adapters:
        peers["mixed4"] = ("peft", transformers_model(model, adapters, dtype))
    state = init(program)
    for name, source in adapters.items():
        state = load_adapter(state, source, name=name)
    runs: dict[str, list[float]] = {}
    for turn in range(-1, args.rounds):
        for case, names in cases.items():
            state, mine = ours(program, state, prompts_RT, names, sizes.new)
            peer, oracle = peers[case]
            theirs = generate(oracle, prompts_RT, names, sizes.new)
            if turn < 0:  # the warm-up
                differ = int((mine[1] != theirs[1]).any(1).sum())
                what = f"{differ} of {sizes.rows} rows differ from {peer}'s tokens"
                print(f"{case} {dtype}: {what}", flush=True)
                continue
            for name, (seconds, _) in ((case, mine), (peer, theirs)):
                runs.setdefault(name, []).append(sizes.rows * sizes.new / seconds)
                print(f"round {turn + 1}: {name} {dtype} {runs[name][-1]:.1f} tokens/s", flush=True)
    return runs


def ours(
    program: Program, state: EngineState, prompts_RT: np.ndarray, names: Names, new: int
) -> tuple[EngineState, Result]:
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    requests = [
        Request(id=str(row), tokens=prompt.tolist(), adapter=name, sampling=sampling)
        for row, (prompt, name) in enumerate(zip(prompts_RT, names, strict=True))
    ]
    done: dict[str, np.ndarray] = {}
    start = time.perf_counter()
    for request in requests:
        state = submit(state, request)
    while not state.host.idle:
        state, outputs = step(program, state)
        done |= {completion.id: completion.tokens for completion in outputs.finished}
    seconds = time.perf_counter() - start
    return state, (seconds, np.stack([done[str(row)] for row in range(len(names))]))


def transformers_model(model: Path, adapters: dict[str, Path], dtype: str) -> Any:
    """transformers' model, in PEFT's wrapper where there are adapters."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    if not adapters:
        return base
    from peft import PeftModel

    first, *others = adapters.items()
    wrapped = PeftModel.from_pretrained(base, first[1], adapter_name=first[0])
    for name, source in others:
        wrapped.load_adapter(source, adapter_name=name)
    return wrapped.eval()


def generate(model: Any, prompts_RT: np.ndarray, names: Names, new: int) -> Result:
    """One batch of transformers' `generate`, or PEFT's."""
    given = torch.from_numpy(prompts_RT)
    options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    if any(names):
        options["adapter_names"] = [name or "__base__" for name in names]
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    return time.perf_counter() - start, out[:, given.shape[1] :].numpy()


if __name__ == "__main__":
    main()
