"""What does the host do between two model calls, and how long does it take?

One step of the host is `schedule` and `commit`; here no model stands between them, its results are
made up. All rows decode, with prefix caching, eight adapters in turn and prompts of different
lengths, so that in every step some rows fill a block. A figure is the median over the steps; the
mean stands in its notes. `host_step/R` has R rows at contexts of 4k, `host_step_128k/256` at 128k,
the rows of `host_step_text/256` want their text streamed, and `submit_4000` queues one prompt of
4,000 tokens, its hashes included. One thread, no tensor.

Where vLLM is importable its `Scheduler.schedule` and `update_from_output` run the same trace in the
same process; see `bench/host_step_vllm.py`.
"""

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.report import Figure, parser, report
from purestep.engine.adapters import deliver_loaded
from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.requests import submit
from purestep.engine.schedule import schedule
from purestep.simulation.world import MODEL, loaded, toy_config, toy_state
from purestep.state.engine import EngineState, HostState
from purestep.state.plan import StepResult
from purestep.state.request import Request, frozen
from purestep.state.rows import chain
from purestep.state.sampling import SamplingParams
from purestep.state.text import TokenTable

BLOCK_SIZE = 16
NUM_ADAPTERS = 8
VOCAB = 50_000
TURN = 20  # steps
Stepper = Callable[[int], list[float]]
TABLE = TokenTable(f" w{i}".encode() for i in range(VOCAB))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Decoding rows of one size."""

    figure: str
    rows: int
    context: int
    text: bool = False
    peer: bool = False

    @property
    def num_blocks(self) -> int:
        return self.rows * (self.context // BLOCK_SIZE + 64)

    def prompts(self) -> list[np.ndarray]:
        """All different, and of lengths that end at different places of a block."""
        rng = np.random.default_rng(self.rows)
        lengths = self.context - rng.integers(0, 8 * BLOCK_SIZE, self.rows)
        return [rng.integers(3, VOCAB, n, dtype=np.int32) for n in lengths]


CASES = (
    Case(figure="host_step/64", rows=64, context=4096, peer=True),
    Case(figure="host_step/256", rows=256, context=4096, peer=True),
    Case(figure="host_step/1024", rows=1024, context=4096, peer=True),
    Case(figure="host_step_128k/256", rows=256, context=131_072),
    Case(figure="host_step_text/256", rows=256, context=4096, text=True),
)


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__)
    args.add_argument("--steps", type=int, default=320, help="timed steps of each case")
    args.add_argument("--only", help="cases whose figure contains this")
    args.add_argument("--no-peer", action="store_true", help="leave vLLM out")
    args = args.parse_args(argv)
    cases, steps = CASES, args.steps
    if args.smoke:
        cases = [replace(c, rows=c.rows // 32, context=c.context // 32) for c in CASES]
        steps = 8
    cases = [case for case in cases if not args.only or args.only in case.figure]
    figures = measure(cases, steps, None if args.no_peer else find_peer(), smoke=args.smoke)
    if not args.only or args.only in "submit_4000":
        figures.append(measure_submit(steps, smoke=args.smoke))
    report(figures, args.json)


def find_peer() -> Callable[[Case, int], Stepper] | None:
    """vLLM's turn at a case; None, and a word, where it cannot be imported."""
    if importlib.util.find_spec("vllm") is None:
        print("vllm is not installed: the peer is skipped")
        return None
    from bench.host_step_vllm import vllm_stepper

    return vllm_stepper


def measure(
    cases: Sequence[Case],
    steps: int,
    peer: Callable[[Case, int], Stepper] | None,
    *,
    smoke: bool,
) -> list[Figure]:
    """All cases, and the peer's, take turns of some steps: the machine's speed drifts."""
    ours = [stepper(case, steps) for case in cases]
    theirs = [peer(case, steps) if peer and case.peer else None for case in cases]
    ours_ms, theirs_ms = [[] for _ in cases], [[] for _ in cases]
    gc.collect()
    gc.freeze()  # nobody's collections look at what others hold
    for first in range(0, steps, TURN):
        for n in range(len(cases)):
            ours_ms[n] += ours[n](min(TURN, steps - first))
            if (other := theirs[n]) is not None:
                theirs_ms[n] += other(min(TURN, steps - first))
    gc.unfreeze()
    notes = {"steps": steps, "smoke": smoke}
    return [figure(*each, notes) for each in zip(cases, ours_ms, theirs_ms, strict=True)]


def figure(case: Case, times: list[float], theirs: list[float], notes: dict[str, Any]) -> Figure:
    notes = {"rows": case.rows, "context": case.context, **notes}
    if theirs:
        notes["peer_mean_ms"] = statistics.mean(theirs)
    return Figure(
        figure=case.figure,
        value=statistics.median(times),
        unit="ms",
        peer="vllm" if theirs else None,
        peer_value=statistics.median(theirs) if theirs else None,
        lower_is_better=True,
        notes=notes | {"mean_ms": statistics.mean(times), "p90_ms": p90(times)},
    )


def p90(times: list[float]) -> float:
    return float(np.quantile(times, 0.9))


def stepper(case: Case, steps: int) -> Stepper:
    """Goes on by some steps, of `steps` in all, and gives the host's milliseconds in each."""
    config, host = decoding(case, steps)
    rng, left = np.random.default_rng(0), steps

    def run(count: int) -> list[float]:
        nonlocal host, left
        times = []
        for _ in range(count):
            result = made_up(rng, case.rows)
            begin = time.perf_counter()
            host, plan = schedule(config, host)
            host, outputs = commit(config, host, plan, result)
            times.append((time.perf_counter() - begin) * 1e3)
            assert len(outputs.ids) == plan.descriptor.num_rows == case.rows
        left -= count
        if not left:
            check_progress(case, host, steps)
        return times

    return run


def check_progress(case: Case, host: HostState, steps: int) -> None:
    """That the steps did what a step must: tokens appended, blocks filled, hashed and findable."""
    prompts = case.prompts()
    assert host.rows.num_tokens_R.tolist() == [len(p) + 1 + steps for p in prompts]
    full_R = host.rows.num_computed_R // BLOCK_SIZE
    for row, key in enumerate(host.rows.ids):
        digests = chain(host.rows, row, host.requests[key])[: int(full_R[row])]
        assert len(digests) == full_R[row]
        assert all(d in host.blocks.block_of for d in digests)


def decoding(case: Case, steps: int) -> tuple[Config, HostState]:
    """A state in which every row has computed its prompt and drawn one token."""
    config = bench_config(case, steps)
    state = with_adapters(toy_state(config))
    sampling = SamplingParams(max_tokens=steps + 2, ignore_eos=True, stream=case.text)
    for i, tokens in enumerate(case.prompts()):
        adapter = f"a{i % NUM_ADAPTERS}"
        request = Request(id=f"r{i}", tokens=tokens, adapter=adapter, sampling=sampling)
        state = submit(state, request)
    host, plan = schedule(config, state.host)
    host, _ = commit(config, host, plan, made_up(np.random.default_rng(1), case.rows))
    return config, host


def with_adapters(state: EngineState) -> EngineState:
    for i in range(NUM_ADAPTERS):
        state = deliver_loaded(state, loaded(f"a{i}", f"v{i}", 8, f"folder/a{i}"))
    return state


def bench_config(case: Case, steps: int) -> Config:
    longest = case.context + steps + BLOCK_SIZE
    return toy_config(
        model=replace(MODEL, vocab_size=VOCAB, max_position=longest),
        block_size=BLOCK_SIZE,
        num_blocks=case.num_blocks,
        max_context=longest,
        max_rows=case.rows,
        max_batched_tokens=case.rows * longest,
        max_active_adapters=NUM_ADAPTERS,
        max_registered_adapters=NUM_ADAPTERS,
        lora_rows=8 * NUM_ADAPTERS,
        max_lora_rank=8,
        tokens=TABLE,
    )


def made_up(rng: np.random.Generator, rows: int) -> StepResult:
    """What a device might answer."""
    return StepResult(
        token_S=frozen(rng.integers(3, VOCAB, rows)),
        logprob_S=frozen(-rng.random(rows), np.float32),
    )


def measure_submit(repeats: int, *, smoke: bool) -> Figure:
    """A long prompt into an engine that has the adapters and nothing else."""
    case = Case(figure="submit_4000", rows=1, context=4096)
    state = with_adapters(toy_state(bench_config(case, 1)))
    tokens = np.random.default_rng(2).integers(3, VOCAB, 4000, dtype=np.int32)
    times = []
    for i in range(repeats):
        begin = time.perf_counter()
        after = submit(state, Request(id=f"r{i}", tokens=tokens, adapter="a0"))
        times.append((time.perf_counter() - begin) * 1e3)
        assert len(after.host.requests[f"r{i}"].digests) == 4000 // BLOCK_SIZE
    notes = {"repeats": repeats, "smoke": smoke}
    notes |= {"mean_ms": statistics.mean(times), "p90_ms": p90(times)}
    return Figure(
        figure=case.figure,
        value=statistics.median(times),
        unit="ms",
        notes=notes | {"p90_ms": p90(times)},
        lower_is_better=True,
    )


if __name__ == "__main__":
    main()
