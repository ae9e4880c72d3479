"""A batch on a local Ray with two actors gives what one engine gives, whoever dies on the way; so
does a pipeline."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="pip install purestep[ray]")

from purestep.engine import Workers, cli, ray_processor  # noqa: E402
from tests.engine.batch_fixtures import (  # noqa: E402
    SMALL,
    adapters,
    batch,
    bytes_checkpoint,
    error_of,
    read_records,
    write_lines,
)
from tests.engine.test_batch_images import ONE, QUESTION, part, png  # noqa: E402
from tests.engine.test_batch_images import chat as chat_with  # noqa: E402
from tests.engine.tiny import adapter_folder  # noqa: E402
from tests.engine.tiny_images import folder as image_folder  # noqa: E402

pytestmark = pytest.mark.slow
OPTIONS = {"device": "cpu", "dtype": "float32", "max_rows": 4, "num_blocks": 128}
RECORD = b'{"line":'


@pytest.fixture(scope="module")
def local_ray() -> Iterator[str]:
    """The address of a Ray with room for two actors."""
    root = Path(__file__).parent.parent.parent
    paths = [str(path) for path in (root / ".wt", root) if path.exists()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(paths), prepend=":")  # of all its processes
        patch.setenv("OMP_NUM_THREADS", "1")
        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()


def lines(count: int, longest: int) -> list[Any]:
    asked: list[Any] = [
        {"custom_id": f"{at}", "prompt": f"question {at}", "adapter": [None, "a", "c"][at % 3],
         "max_tokens": 3 + at % longest, "n": 1 + at % 2, "temperature": float(at % 2),
         "ignore_eos": True}
        for at in range(count)
    ]  # fmt: skip
    asked[5], asked[9] = b"{", {"custom_id": "3", "prompt": "again"}
    asked[20] = {"prompt": "x", "adapter": "nobody"}
    return asked


def alone(folder: Path) -> dict[int, Any]:
    assert batch(folder, *adapters(), output="alone.jsonl") == 1
    return read_records(folder / "alone.jsonl")


def when(happened: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Acts once, beside a run."""

    def wait() -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if happened():
                return act()
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def num_records(path: Path) -> int:
    return path.read_bytes().count(RECORD) if path.exists() else 0


def descendants(of: int) -> list[tuple[int, str]]:
    """(pid, command) of the processes below one."""
    parent, command = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "stat").read_text().rpartition(") ")[2].split()
                name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            parent[int(entry.name)], command[int(entry.name)] = int(status[1]), name

    def below(pid: int) -> bool:
        while pid in parent and pid != of:
            pid = parent[pid]
        return pid == of

    return [(pid, command[pid]) for pid in parent if pid != of and below(pid)]


def actors() -> list[int]:
    found = descendants(os.getpid())
    return [pid for pid, name in found if name.startswith("ray::") and "BatchActor" in name]


def test_two_actors_write_what_one_engine_writes(tmp_path: Path, local_ray: str) -> None:
    write_lines(tmp_path / "in.jsonl", lines(40, 5))
    want, metrics = alone(tmp_path), tmp_path / "metrics"
    on_ray = ["--ray", "--window=8", *adapters()]
    assert batch(tmp_path, *on_ray, f"--metrics={metrics}") == 1
    out = tmp_path / "out.jsonl"
    assert read_records(out) == want
    told = json.loads(metrics.read_text().splitlines()[-1])
    assert (told["done"], told["failed"], told["final"]) == (37, 3, True)
    sampled = [o for r in want.values() if not r["error"] for o in r["outputs"]]
    assert told["output_tokens"] == sum(len(output["tokens"]) for output in sampled)
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:17]) + whole[17][:30])
    assert batch(tmp_path, *on_ray) == 1
    assert read_records(out) == want, "resumed, too"
    assert out.read_bytes().startswith(b"".join(whole[:17]))


def test_an_actor_that_dies_loses_nothing(
    tmp_path: Path, local_ray: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray starts it again; what it had told before is not written twice."""
    write_lines(tmp_path / "in.jsonl", lines(150, 60))
    want, out, killed = alone(tmp_path), tmp_path / "out.jsonl", []

    def kill_one() -> None:
        killed.append(actors()[0])
        os.kill(killed[0], signal.SIGKILL)

    thread = when(lambda: num_records(out) > 0 and len(actors()) == 2, kill_one)
    assert batch(tmp_path, "--ray", "--ray-actors=2", *adapters()) == 1
    thread.join()
    assert killed
    assert read_records(out) == want


def test_a_driver_that_dies_is_started_again(tmp_path: Path, local_ray: str) -> None:
    """On the Ray of another process, at its address."""
    write_lines(tmp_path / "in.jsonl", lines(150, 60))
    want, out = alone(tmp_path), tmp_path / "out.jsonl"
    files = [str(bytes_checkpoint()), str(tmp_path / "in.jsonl"), str(out)]
    command = [sys.executable, "-m", "purestep.engine", "batch", *files, *SMALL, *adapters()]
    driver = subprocess.Popen([*command, f"--ray={local_ray}"], stderr=subprocess.PIPE)
    thread = when(lambda: num_records(out) > 0 or driver.poll() is not None, driver.kill)
    _, said = driver.communicate()
    thread.join()
    assert driver.returncode == -signal.SIGKILL, said.decode()
    kept = num_records(out)
    print(f"killed with {kept} of {len(want)} records")
    assert 0 < kept < len(want)
    assert batch(tmp_path, "--ray", *adapters()) == 1
    assert read_records(out) == want


def test_images_are_read_beside_the_input(tmp_path: Path, local_ray: str) -> None:
    (tmp_path / "one.png").write_bytes(png(ONE))
    pictures = ["one.png", "missing.png", "../elsewhere.png", "one.png"]
    asked = [chat_with(f"{n}", part(url), QUESTION) for n, url in enumerate(pictures)]
    for line in asked:
        del line["body"]["logprobs"]  # which differ in their last bits
    write_lines(tmp_path / "in.jsonl", asked)

    def run(output: str, *options: str) -> dict[int, Any]:
        files = [str(image_folder("llava")), str(tmp_path / "in.jsonl"), str(tmp_path / output)]
        sizes = ["--model-name=base", "--max-rows=4", "--num-blocks=64", "--device=cpu"]
        assert cli.main(["batch", *files, *sizes, *options]) == 1
        return read_records(tmp_path / output)

    found = run("out.jsonl", "--ray", "--ray-actors=2")
    assert found == run("alone.jsonl")
    assert [bool(found[n]["error"]) for n in (1, 2, 3, 4)] == [False, True, True, False]


def test_strict_stops_and_frees_the_actors(
    tmp_path: Path, local_ray: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = lines(40, 5)
    asked[5], asked[9] = asked[0] | {"custom_id": "five"}, asked[1] | {"custom_id": "nine"}
    write_lines(tmp_path / "in.jsonl", asked)
    assert batch(tmp_path, "--ray", "--window=4", "--strict", *adapters()) == 3
    assert "line 21: no model or adapter is called 'nobody'" in capfd.readouterr().err
    kept = read_records(tmp_path / "out.jsonl")
    assert all(record["error"] is None for record in kept.values())
    end = time.monotonic() + 60
    while actors() and time.monotonic() < end:
        time.sleep(0.1)
    assert not actors()


def test_an_engine_that_cannot_be_made_ends_the_run(
    tmp_path: Path, local_ray: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", lines(40, 5))
    assert batch(tmp_path, "--ray", "--ray-actors=1", "--max-batched-tokens=0") == 2
    assert "purestep: max_batched_tokens=0" in capfd.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_processor_reads_images_below_its_media_folder_alone(tmp_path: Path) -> None:
    """Not below the folder that this one is in."""
    (tmp_path / "images").mkdir()

    class Rows:
        def map_batches(self, _: Any, *, fn_constructor_args: Any, **__: Any) -> Any:
            return fn_constructor_args

    folder = tmp_path / "images"
    process = ray_processor("model", media_folder=str(folder), workers=Workers(count=1, num_gpus=0))
    _, _, job, *_ = process(Rows())
    assert job.media is not None
    assert (job.media.folder, job.media.roots) == (folder, ())


def test_a_processor_takes_its_place_in_a_pipeline(local_ray: str) -> None:
    process = ray_processor(
        str(bytes_checkpoint()),
        adapters={"a": str(adapter_folder("a"))},
        batch_size=4,
        workers=Workers(count=2),
        max_tokens=3,
        **OPTIONS,
    )
    rows = [
        {"prompt": f"{at}", "adapter": ["a", None, "x"][at % 3], "mine": at, "custom_id": None}
        for at in range(9)
    ]
    rows[4]["custom_id"] = "x" * 1000
    found = process(ray.data.from_items(rows)).take_all()
    assert sorted(row["prompt"] for row in found) == [f"{at}" for at in range(9)]
    for row in found:
        result = json.loads(row["result"])
        assert row["prompt"] == str(row["mine"])
        code = None
        if result["error"]:
            code, _ = error_of(result | {"line": result["error"]["line"]})
        want = {4: "invalid_request"} | dict.fromkeys((2, 5, 8), "model_not_found")
        assert code == want.get(row["mine"])
        if code is None:
            assert len(result["outputs"][0]["tokens"]) == 3
