"""The backend of lm-evaluation-harness against the harness's own `hf`, on a small local task."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="pip install lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from purestep.engine.lm_eval import PurestepLM  # noqa: E402
from tests.engine.batch_fixtures import bytes_checkpoint  # noqa: E402
from tests.engine.tiny import adapter_folder  # noqa: E402

QUESTIONS = [
    {"question": f"{a} plus {b} is", "choices": [f"{a + b}", f"{a + b + 1}", "a word"], "answer": 0}
    for a, b in ((1, 2), (3, 4), (2, 2), (5, 1), (7, 8), (10, 10))
]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=at)
        for at, given in enumerate(arguments)
    ]


def pair(folder: Path, **adapter: str) -> tuple[PurestepLM, HFLM]:
    peft = {"peft": adapter["adapter"]} if adapter else {}
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, **peft)
    mine = PurestepLM(str(folder), device="cpu", dtype="float32", max_rows=8, **adapter)
    return mine, theirs


def write_task(folder: Path) -> None:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    (folder / "sums.yaml").write_text(TASK.replace("FILE", str(data)))


def compare(folder: Path, tmp_path: Path, **adapter: str) -> None:
    write_task(tmp_path)
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    mine, theirs = pair(folder, **adapter)
    found = [
        lm_eval.simple_evaluate(model=model, tasks=["sums"], task_manager=tasks, bootstrap_iters=0)
        for model in (mine, theirs)
    ]
    ours, wanted = (result["results"]["sums"] for result in found)
    for metric in ("acc,none", "acc_norm,none"):
        assert ours[metric] == wanted[metric]
    for one, other in zip(*(result["samples"]["sums"] for result in found), strict=True):
        for (score, greedy), (want, is_greedy) in zip(
            [x[0] for x in one["resps"]], [x[0] for x in other["resps"]], strict=True
        ):
            assert float(score) == pytest.approx(float(want), abs=1e-3)
            assert str(greedy) == str(is_greedy)


def test_a_tiny_model_scores_as_it_does_in_transformers(tmp_path: Path) -> None:
    compare(bytes_checkpoint(), tmp_path)


def test_an_adapter_scores_as_it_does_in_peft(tmp_path: Path) -> None:
    compare(bytes_checkpoint(), tmp_path, adapter=str(adapter_folder("a")))


def test_rolling_and_generated_texts_are_transformers_own(tmp_path: Path) -> None:
    mine, theirs = pair(bytes_checkpoint())
    texts = instances("loglikelihood_rolling", [("a short text",), ("longer " * 20,)])
    assert mine.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(
        theirs.loglikelihood_rolling(texts, disable_tqdm=True), abs=1e-3
    )
    # Windows: a context of 64 holds 64 tokens that are read or scored; theirs scores one more.
    mine.max_length, theirs._max_length = 64, 63
    assert mine.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(
        theirs.loglikelihood_rolling(texts, disable_tqdm=True), abs=1e-3
    )
    mine.max_length = theirs._max_length = 512
    asked = [("Once", {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}),
             ("Twice upon", {"until": [], "max_gen_toks": 5})]  # fmt: skip
    said = mine.generate_until(instances("generate_until", asked), disable_tqdm=True)
    want = theirs.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert said == want


def test_the_entry_point_names_what_is_registered() -> None:
    """The group in which versions behind 0.4.13 look for models."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["purestep"].partition(":")
    assert (module, name) == (PurestepLM.__module__, PurestepLM.__name__)
    assert get_model("purestep") is PurestepLM


@pytest.mark.slow
def test_the_command_line_knows_the_backend(tmp_path: Path) -> None:
    """As the README has it."""
    write_task(tmp_path)
    command = [sys.executable, "-m", "purestep.engine.lm_eval", "--model", "purestep", "--tasks"]
    options = f"pretrained={bytes_checkpoint()},dtype=float32,max_rows=8"
    files = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json")]
    done = subprocess.run(
        [*command, "sums", "--model_args", options, "--device", "cpu", *files],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("**/out*.json")
    found = json.loads(written.read_text())
    assert set(found["results"]) == {"sums"}
    assert found["config"]["model"] == "purestep"


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_scores_as_it_does_in_transformers(tmp_path: Path) -> None:
    from purestep.engine.demo_model import smollm2_dir

    compare(smollm2_dir(), tmp_path)
