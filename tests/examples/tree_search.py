"""Tree search: the best beams are branched, the others dropped, and all share the KV they have.

Every `stride` tokens the live beams are ranked by the model's own logprob of what they have drawn;
the best `width` go on, each as `fan` branches that draw from noise of their own. Nothing is
recomputed: a branch shares its parent's KV blocks and copies at most the last, partial one.
`python -m tests.examples.tree_search` runs on a tiny random model in seconds.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from purestep.engine import (
    EngineState,
    Program,
    Request,
    SamplingParams,
    abort,
    branch,
    init,
    load_program,
    progress,
    step,
    submit,
)
from tests.models.tiny import save_checkpoint

PROMPT = [5, 17, 33, 2, 9, 64, 3, 28, 71]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best sequence, and what the search took."""

    tokens: list[int]
    logprob: float  # of all its tokens together
    computed: int  # tokens that went through the model
    most_blocks: int  # KV blocks in use at one time


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = tiny_program(Path(folder))
        for width in (1, 2, 4):
            best = search(program, PROMPT, width=width)
            print(
                f"width {width}: logprob {best.logprob:.2f} after {best.computed} computed tokens, "
                f"at most {best.most_blocks} blocks: {best.tokens}"
            )


def tiny_program(folder: Path) -> Program:
    save_checkpoint(folder)
    return load_program(folder, max_rows=32, block_size=4, num_blocks=256, device="cpu")


def search(
    program: Program,
    prompt: Sequence[int],
    *,
    width: int = 4,
    fan: int = 4,
    stride: int = 3,
    levels: int = 5,
    seed: int = 0,
) -> Found:
    """The likeliest of the sequences of `stride` x `levels` tokens that the search comes by."""
    sampling = SamplingParams(max_tokens=stride * levels + 1, seed=seed, ignore_eos=True)
    state = submit(init(program), Request(id="beam", tokens=prompt, sampling=sampling))
    state, outputs = step(program, state)  # the prompt, once for all
    computed, most_blocks, beams = outputs.num_tokens, 0, ["beam"]
    for level in range(1, levels + 1):
        for beam in list(beams):
            children = [f"{beam}/{level}.{n}" for n in range(1, fan)]
            state, beams = branch(state, beam, children), beams + children
        while min(length(state, beam) for beam in beams) < stride * level:
            state, outputs = step(program, state)
            computed += outputs.num_tokens
            most_blocks = max(most_blocks, state.host.blocks.num_held)
        ranked = sorted(beams, key=lambda beam: -score(state, beam))
        for beam in ranked[width:]:
            state = abort(state, beam)
        beams = ranked[:width]
    best = progress(state.host, beams[0])
    return Found(
        tokens=best.generated.tolist(),
        logprob=float(best.logprobs.sum()),
        computed=computed,
        most_blocks=most_blocks,
    )


def length(state: EngineState, beam: str) -> int:
    return len(progress(state.host, beam).generated)


def score(state: EngineState, beam: str) -> float:
    return float(progress(state.host, beam).logprobs.sum())


if __name__ == "__main__":
    main()
