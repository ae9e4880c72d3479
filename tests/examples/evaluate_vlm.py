"""How many questions about held-out combinations the model of `vlm.py` answers right.

Pictures go through the checkpoint's image processor and its chat template, answers are free and
greedy, and right means equal to the last letter. Beside it: the same questions about a blank
picture, about pictures with two groups of shapes, and through the demo's adapters, whose answers
must have the adapter's form.

    python -m tests.examples.evaluate_vlm --questions 300     of each kind
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from purestep.engine import Program, Request, SamplingParams, generate, load_program, prepare
from tests.examples.shapes import KINDS, Question, draw, make_scene, questions
from tests.examples.train_adapters import ADAPTERS, RECIPES, print_table
from tests.examples.vlm import SIDE, composed, shapes_vlm_dir

SEED = 2  # of pictures that nothing was chosen by
SHORT = SamplingParams(temperature=0, max_tokens=24)
BLANK = Image.new("RGB", (SIDE, SIDE), "white")
FORMS: dict[str, Callable[[str], str]] = {recipe.name: recipe.rewrite for recipe in RECIPES}

FOLDERS = {name: ADAPTERS / name for name in FORMS}


@dataclass(frozen=True, slots=True)
class Sample:
    picture: Image.Image
    question: Question


def samples(count: int, *, groups: int = 1, seed: int = SEED) -> Iterator[Sample]:
    """So many questions of every kind, each about a held-out picture of its own."""
    source = random.Random(f"evaluate {seed} {groups}")
    left = {kind: count for kind in KINDS if groups == 1 or kind != "place"}
    while any(left.values()):
        scene = make_scene(source, held_out=True, groups=groups)
        asked = {question.kind: question for question in questions(scene, source)}
        kind = max(asked, key=lambda k: left[k])
        if left[kind]:
            left[kind] -= 1
            yield Sample(draw(scene), asked[kind])


def picture_request(
    program: Program, sample: Sample, id: str, *, adapter: str | None = None, blank: bool = False
) -> Request:
    parts = [
        {"type": "image", "image": BLANK if blank else sample.picture},
        {"type": "text", "text": sample.question.text},
    ]
    messages = [{"role": "user", "content": parts}]
    return prepare(program, messages, id=id, adapter=adapter, sampling=SHORT)


def answers(
    program: Program, asked: list[Sample], *, adapter: str | None = None, blank: bool = False
) -> list[str]:
    """In the order of the samples."""
    requests = (
        picture_request(program, sample, str(n), adapter=adapter, blank=blank)
        for n, sample in enumerate(asked)
    )
    done = generate(program, requests, adapters=FOLDERS)
    texts = {int(completion.id): completion.text for completion in done}
    return [texts[n] for n in range(len(asked))]


def shares(asked: list[Sample], said: list[str], write: Callable[[str], str]) -> dict[str, float]:
    """Of right answers, by kind."""
    right: dict[str, list[bool]] = {}
    for sample, text in zip(asked, said, strict=True):
        right.setdefault(sample.question.kind, []).append(text == write(sample.question.answer))
    return {kind: sum(values) / len(values) for kind, values in right.items()}


def as_it_is(answer: str) -> str:
    return answer


def evaluate(program: Program, count: int) -> dict[str, dict[str, float]]:
    one, two = list(samples(count)), list(samples(count, groups=2))
    found = {
        "pictures": shares(one, answers(program, one), as_it_is),
        "blank": shares(one, answers(program, one, blank=True), as_it_is),
        "two groups": shares(two, answers(program, two), as_it_is),
    }
    for name, write in FORMS.items():
        found[name] = shares(one, answers(program, one, adapter=name), write)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=300, help="of each kind")
    parser.add_argument("--vision", type=Path, help="weights of tower and projector to take")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="a file for the shares")
    asked = parser.parse_args()
    folder = composed(asked.vision) if asked.vision else shapes_vlm_dir()
    program = load_program(folder, max_context=512, device=asked.device)
    start = time.perf_counter()
    found = evaluate(program, asked.questions)
    rows = [
        [name, *(f"{got[k]:.1%}" if k in got else "" for k in KINDS)] for name, got in found.items()
    ]
    print_table(["", *KINDS], rows)
    print(f"{asked.questions} of each in {time.perf_counter() - start:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
