"""`make demo`: one mixed batch over a real model, then states as values.

Three kinds of requests share every step: the base model, the adapter `shout` (answers in capitals)
and the adapter `json` (answers as one JSON object), each about texts and about pictures, which
`demo_out/contact_sheet.png` shows with what was said of them. Afterwards one state is branched,
forked, snapshot, killed and restored, and must give the same tokens each time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from purestep.engine import (
    Completion,
    EngineState,
    Outputs,
    Program,
    Request,
    SamplingParams,
    branch,
    digest,
    fork,
    generate,
    init,
    load_adapter,
    load_program,
    prepare,
    restore,
    snapshot,
    step,
    submit,
)
from purestep.engine.memory import memory_summary
from tests.examples.contact_sheet import Cell, draw_sheet
from tests.examples.evaluate_vlm import Sample, picture_request, samples
from tests.examples.prompts import HELD_OUT, messages
from tests.examples.vlm import shapes_vlm_dir

ADAPTERS = {name: Path(__file__).parent / "adapters" / name for name in ("shout", "json")}
GREEDY = SamplingParams(temperature=0, max_tokens=64)
SHEET = Path("demo_out/contact_sheet.png")
WHO = ("base", *ADAPTERS)


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    program = demo_program()
    print(memory_summary(program.config))
    print("\n== One batch: base model and two adapters, results as they finish ==\n")
    mixed_batch(program)
    print("\n== States are values ==\n")
    states_are_values(program)


def demo_program() -> Program:
    return load_program(shapes_vlm_dir(), max_rows=16, max_context=1024, seed=7)


def mixed_requests(program: Program, shown: Sequence[Sample]) -> Iterator[Request]:
    """As many questions in words alone and about pictures, each to the base model and to both
    adapters."""
    for n, (question, sample) in enumerate(zip(HELD_OUT, shown, strict=False)):
        for who in WHO:
            adapter = None if who == "base" else who
            chat = messages(question)
            yield prepare(program, chat, id=f"{who}-{n}", adapter=adapter, sampling=GREEDY)
            yield picture_request(program, sample, f"{who}-picture-{n}", adapter=adapter)


def mixed_batch(program: Program) -> None:
    shown = list(samples(2))
    requests = list(mixed_requests(program, shown))
    steps: list[Outputs] = []
    done: list[Completion] = []
    start = time.perf_counter()
    for completion in generate(
        program, requests, adapters=ADAPTERS, progress=True, on_step=steps.append
    ):
        done.append(completion)
        *_, kind, n = completion.id.split("-")
        question = shown[int(n)].question.text if kind == "picture" else HELD_OUT[int(n)]
        tqdm.write(f"{completion.id:15} {question}")
        tqdm.write(f"{'':15} {' '.join(completion.text.split())}")
    seconds = time.perf_counter() - start
    print_table(done, steps, seconds)
    show_pictures(shown, {completion.id: completion.text for completion in done})


def show_pictures(shown: Sequence[Sample], texts: Mapping[str, str]) -> None:
    answers = [{who: texts[f"{who}-picture-{n}"] for who in WHO} for n in range(len(shown))]
    right = sum(a["base"] == s.question.answer for a, s in zip(answers, shown, strict=True))
    draw_sheet(
        [Cell(s.picture, s.question.text, a) for s, a in zip(shown, answers, strict=True)], SHEET
    )
    print(f"the base model is right about {right} of {len(shown)} pictures: see {SHEET}")


def print_table(done: list[Completion], steps: list[Outputs], seconds: float) -> None:
    print(
        f"\n{'adapter':8} {'requests':>8} {'prompt':>7} {'cached':>7} {'new':>6}  {'finished by'}"
    )
    for adapter in (None, *ADAPTERS):
        mine = [c for c in done if c.adapter == adapter]
        reasons = sorted({c.finish_reason.value for c in mine})
        print(
            f"{adapter or 'base':8} {len(mine):8} {sum(c.num_prompt_tokens for c in mine):7} "
            f"{sum(c.num_cached_tokens for c in mine):7} {sum(len(c.tokens) for c in mine):6}  "
            f"{', '.join(reasons)}"
        )
    new = sum(len(c.tokens) for c in done)
    counts = [s.num_active_adapters for s in steps]
    hits, prompt = sum(c.num_cached_tokens for c in done), sum(c.num_prompt_tokens for c in done)
    print(
        f"\n{new} tokens in {seconds:.1f} s: {new / seconds:.0f} tokens/s; {len(steps)} steps of "
        f"{sum(s.num_rows for s in steps) / len(steps):.1f} rows; active adapters per step: "
        f"{sum(counts) / len(counts):.1f} on average, {max(counts)} at most; "
        f"prefix hits: {hits} of {prompt} prompt tokens"
    )


def half_way(program: Program) -> EngineState:
    """Three requests, an adapter each, stepped until a KV block is half full in mid-decode."""
    state = init(program)
    for name, folder in ADAPTERS.items():
        state = load_adapter(state, folder, name=name)
    for name in WHO:
        adapter = None if name == "base" else name
        question = messages("What is the capital of France?")
        state = submit(state, prepare(program, question, id=name, adapter=adapter, sampling=GREEDY))
    half = program.config.block_size // 2
    while True:
        state, _ = step(program, state)
        rows = state.host.rows
        decoding = (rows.num_tokens_R > rows.num_prompt_R + 2).all()
        if decoding and rows.num_computed_R[0] % program.config.block_size == half:
            return state


def finish(program: Program, state: EngineState) -> dict[str, list[int]]:
    """Step to the end; the tokens of every request."""
    tokens = {}
    while not state.host.idle:
        state, outputs = step(program, state)
        tokens |= {c.id: c.tokens.tolist() for c in outputs.finished}
    return tokens


def states_are_values(program: Program) -> None:
    state = half_way(program)
    computed = state.host.rows.num_computed_R.tolist()
    print(f"in mid-decode: {len(computed)} rows with {computed} tokens in blocks of 16")
    want = finish(program, fork(program, state))
    print(
        f"forked, and the fork finished: {sum(map(len, want.values()))} tokens; state still valid"
    )
    twins = finish(program, branch(fork(program, state), "shout", ["twin 1", "twin 2"]))
    verdict("branch: both branches of 'shout' equal it", [twins["twin 1"], twins["twin 2"]],
            [want["shout"]] * 2)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="purestep-demo-") as folder:
        path = str(Path(folder) / "snapshot")
        killed = subprocess.run([sys.executable, "-m", "tests.examples.demo", "--write", path])
        size = sum(f.stat().st_size for f in Path(path).iterdir()) / 2**20
        print(
            f"process 1: snapshot of {size:.1f} MiB in mid-decode, then signal {-killed.returncode}"
        )
        out = subprocess.run(
            [sys.executable, "-m", "tests.examples.demo", "--read", path],
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
    told = json.loads(out.stdout)
    print(f"process 2: restored state {told['digest'][:16]}, here it is {digest(state.host)[:16]}")
    verdict("restore: the second process finished with the same tokens", told["tokens"], want)
    verdict("the original state, stepped last, gives the same tokens", finish(program, state), want)


def verdict(what: str, got: object, want: object) -> None:
    print(f"{what}: {'yes' if got == want else 'NO'}")
    if got != want:
        raise SystemExit(f"expected {want}, got {got}")


def write_and_die(path: str) -> None:
    """Snapshot in mid-decode, then die without any clean-up."""
    snapshot(half_way(demo_program()), path)
    os.kill(os.getpid(), signal.SIGKILL)


def read_and_finish(path: str) -> None:
    """Restore and print what the state is and how it ends."""
    program = demo_program()
    state = restore(program, path)
    print(json.dumps({"digest": digest(state.host), "tokens": finish(program, state)}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--write", path]:
            write_and_die(path)
        case ["--read", path]:
            read_and_finish(path)
        case _:
            main()
