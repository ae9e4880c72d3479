"""What a batch run on Ray does in each process, tried without Ray."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.engine import BatchJob, ray_processor
from purestep.engine.batch_files import ResultFile, count_lines
from purestep.engine.ray_batch import Workers, on_cluster
from purestep.engine.ray_engine import (
    LEAST_TOLD,
    BatchActor,
    Ended,
    Message,
    Window,
    message_size,
    read_windows,
    window_size,
)
from purestep.state.errors import ConfigError
from tests.engine.batch_fixtures import adapters, batch, bytes_checkpoint, read_records, write_lines
from tests.engine.tiny import adapter_folder

OPTIONS = {"device": "cpu", "dtype": "float32", "max_rows": 4, "block_size": 4, "lora_rows": 32,
           "max_active_adapters": 2, "num_blocks": 128}  # fmt: skip


def job_of(folder: Path, **options: Any) -> BatchJob:
    names = tuple(sorted({bytes_checkpoint().name, str(bytes_checkpoint())}))
    paths = {name: str(adapter_folder(name)) for name in "ac"}
    files = {"input": folder / "in.jsonl", "output": folder / "out.jsonl"}
    return BatchJob(**files, base_names=names, adapters=paths, **options)


def windows_of(job: BatchJob, *, engines: int = 2, rows: int = 4) -> list[Window]:
    with ResultFile(job.output) as results:
        num_open = count_lines(job.input) - results.num_finished
        bits = results.finished_bits()
    return list(read_windows(job, bits, num_open, engines=engines, rows=rows))


def numbers(window: Window) -> list[int]:
    return sorted(line.number for line in [*window.lines, *(e.line for e in window.ended)])


@given(
    left=st.integers(0, 10**6),
    engines=st.integers(1, 64),
    rows=st.integers(1, 256),
    most=st.integers(1, 2048),
)
def test_no_engine_is_given_more_than_its_share(
    left: int, engines: int, rows: int, most: int
) -> None:
    size = window_size(left, most=most, engines=engines, rows=rows)
    assert 1 <= size <= most
    assert size <= max(rows, -(-left // engines)), "the others get something, too"
    assert size == most or size >= rows, "an engine is full"


@given(
    lines=st.lists(st.sampled_from(["good", "bad", "blank", "again"]), max_size=60),
    finished=st.sets(st.integers(1, 60)),
    window=st.integers(1, 20),
    engines=st.integers(1, 3),
)
def test_every_line_without_a_record_is_in_one_window(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    finished: set[int],
    window: int,
    engines: int,
) -> None:
    """In the file's order, the same each time; bad and double ones with their records."""
    folder = tmp_path_factory.mktemp("windows")
    texts = {"bad": b"{", "blank": b"", "again": b'{"prompt": "x", "custom_id": "0"}'}
    write_lines(
        folder / "in.jsonl", [texts.get(x, {"prompt": str(n)}) for n, x in enumerate(lines)]
    )
    full = [n for n, kind in enumerate(lines, start=1) if kind != "blank"]
    job = job_of(folder, window=window)
    last = max(finished, default=0)
    bits = np.packbits(np.array([n in finished for n in range(1, last + 1)], bool))
    settings = {"engines": engines, "rows": 2}
    found = list(read_windows(job, bits, len(lines), **settings))
    assert [numbers(x) for x in read_windows(job, bits, len(lines), **settings)] == [
        numbers(x) for x in found
    ]
    assert [n for x in found for n in numbers(x)] == [n for n in full if n not in finished]
    assert all(len(numbers(x)) <= window for x in found)
    first = next((n for n, kind in enumerate(lines, start=1) if kind == "again"), None)
    for ended in (ended for x in found for ended in x.ended):
        error, number = json.loads(ended.record)["error"], ended.line.number
        again = lines[number - 1] == "again"
        assert error["code"] == ("duplicate_custom_id" if again else "invalid_json")
        assert number != first
        assert ended.failed


def test_a_window_ends_with_its_bytes(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x" * 1000}] * 10)
    found = windows_of(job_of(tmp_path, window_bytes=2500), engines=1, rows=10)
    assert [len(window.lines) for window in found] == [3, 3, 3, 1]


def lines_of(count: int) -> list[Any]:
    asked: list[Any] = [
        {"custom_id": f"{at}", "prompt": f"question {at}", "adapter": [None, "a", "c"][at % 3],
         "max_tokens": 1 + at % 5, "n": 1 + at % 2, "temperature": float(at % 2)}
        for at in range(count)
    ]  # fmt: skip
    asked[5], asked[9] = b"{", {"custom_id": "3", "prompt": "again"}
    asked[20] = {"prompt": "x", "adapter": "nobody"}
    return asked


def union(messages: list[Message]) -> dict[int, dict[str, Any]]:
    ended: list[Ended] = [ended for message in messages for ended in message.ended]
    return {e.line.number: json.loads(e.record) for e in reversed(ended)}


def test_an_actor_tells_what_one_engine_writes(tmp_path: Path) -> None:
    """Whatever messages of a first try the driver had, those of a second one give it the rest."""
    write_lines(tmp_path / "in.jsonl", lines_of(60))
    assert batch(tmp_path, *adapters(), output="alone.jsonl") == 1
    want = read_records(tmp_path / "alone.jsonl")
    job = job_of(tmp_path)
    (window,) = windows_of(job, engines=1, rows=60)
    actor = BatchActor(str(bytes_checkpoint()), OPTIONS, job, 1, lambda run, table: run(table))
    first, second = list(actor(window)), list(actor(window))
    assert message_size(60) == LEAST_TOLD
    assert message_size(1000) == 125
    assert len(first) == len(second) == -(-60 // LEAST_TOLD)
    assert [len(m.ended) for m in first] == [LEAST_TOLD] * (len(first) - 1) + [60]
    for had in range(len(first)):
        assert union([*first[:had], *second[had:]]) == want
    assert sum(m.spent["output_tokens"] for m in first) == sum(
        len(output["tokens"]) for r in want.values() if not r["error"] for output in r["outputs"]
    )
    cached = [sum(m.spent["cached_tokens"] for m in messages) for messages in (first, second)]
    assert cached[0] < cached[1], "the engine goes on from its state"


def test_an_engine_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", lines_of(30))
    options = OPTIONS | {"max_rows": 0}
    actor = BatchActor(str(bytes_checkpoint()), options, job_of(tmp_path), 1, lambda run, x: run(x))
    (message,) = actor(Window(lines=[]))
    assert "max_rows=0" in message.refusal


NODES = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0}, {"CPU": 1.0, "GPU": 4.0}]


@pytest.mark.parametrize(
    ("workers", "device", "count", "num_gpus"),
    [
        (Workers(), "auto", 2 + 1, 1),  # one for each GPU that has a CPU beside it
        (Workers(), "cpu", 8 + 3 + 1, 0),
        (Workers(num_cpus=2), "cpu:0", 4 + 1, 0),
        (Workers(num_gpus=0.5), "cuda", 4 + 1, 0.5),
        (Workers(num_gpus=0), "auto", 12, 0),
        (Workers(count=5), "auto", 5, 1),
    ],
)
def test_as_many_actors_as_find_room(
    workers: Workers, device: str, count: int, num_gpus: float
) -> None:
    found = on_cluster(workers, NODES, device)
    assert (found.count, found.num_gpus) == (count, num_gpus)


def test_a_cluster_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_cpus=16 and num_gpus=1 .*'CPU': 8"):
        on_cluster(Workers(num_cpus=16), NODES, "auto")
    assert on_cluster(Workers(), NODES[1:2], "auto") == Workers(count=3, num_gpus=0)


def test_without_ray_the_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'purestep\[ray\]'"):
        ray_processor("model")
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    assert batch(tmp_path, "--ray") == 2
    assert "pip install 'purestep[ray]'" in capsys.readouterr().err
