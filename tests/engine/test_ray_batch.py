"""A batch on a local Ray with two actors gives what one engine gives; so does a pipeline."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="pip install purestep[ray]")

from purestep.engine.ray_batch import Workers, ray_processor  # noqa: E402
from tests.engine.batch_fixtures import (  # noqa: E402
    adapters,
    batch,
    bytes_checkpoint,
    error_of,
    read_records,
    write_lines,
)
from tests.engine.tiny import adapter_folder  # noqa: E402

pytestmark = pytest.mark.slow
OPTIONS = {"device": "cpu", "dtype": "float32", "max_rows": 4, "num_blocks": 128}


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    root = Path(__file__).parent.parent.parent
    paths = [str(path) for path in (root / ".wt", root) if path.exists()]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def lines() -> list[Any]:
    asked: list[Any] = [
        {"custom_id": f"{at}", "prompt": f"question {at}", "adapter": [None, "a", "c"][at % 3],
         "max_tokens": 3 + at % 5, "n": 1 + at % 2, "temperature": float(at % 2)}
        for at in range(40)
    ]  # fmt: skip
    asked[5], asked[9] = b"{", {"custom_id": "3", "prompt": "again"}
    asked[20] = {"prompt": "x", "adapter": "nobody"}
    return asked


def test_two_actors_write_what_one_engine_writes(tmp_path: Path, local_ray: None) -> None:
    write_lines(tmp_path / "in.jsonl", lines())
    assert batch(tmp_path, *adapters(), output="alone.jsonl") == 1
    want = read_records(tmp_path / "alone.jsonl")
    on_ray = ["--ray", "--ray-actors=2", "--window=8", *adapters()]
    assert batch(tmp_path, *on_ray) == 1
    out = tmp_path / "out.jsonl"
    assert read_records(out) == want
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:17]) + whole[17][:30])
    assert batch(tmp_path, *on_ray) == 1
    assert read_records(out) == want, "resumed, too"
    assert batch(tmp_path, *on_ray, "--strict", output="strict.jsonl") == 3


def test_a_processor_reads_images_below_its_media_folder_alone(tmp_path: Path) -> None:
    """Not below the folder that this one is in."""
    (tmp_path / "images").mkdir()

    class Rows:
        def map_batches(self, _: Any, *, fn_constructor_args: Any, **__: Any) -> Any:
            return fn_constructor_args

    folder = tmp_path / "images"
    made = ray_processor("model", media_folder=str(folder), workers=Workers(count=1))(Rows())
    job = made[2]
    assert job.media is not None
    assert (job.media.folder, job.media.roots) == (folder, ())


def test_a_processor_takes_its_place_in_a_pipeline(local_ray: None) -> None:
    process = ray_processor(
        str(bytes_checkpoint()),
        adapters={"a": str(adapter_folder("a"))},
        batch_size=4,
        workers=Workers(count=2),
        max_tokens=3,
        **OPTIONS,
    )
    rows = [{"prompt": f"{at}", "adapter": ["a", None, "x"][at % 3], "mine": at} for at in range(9)]
    found = process(ray.data.from_items(rows)).take_all()
    assert sorted(row["prompt"] for row in found) == [f"{at}" for at in range(9)]
    for row in found:
        result = json.loads(row["result"])
        assert row["prompt"] == str(row["mine"])
        if row["adapter"] == "x":
            assert error_of(result | {"line": result["error"]["line"]})[0] == "model_not_found"
        else:
            assert len(result["outputs"][0]["tokens"]) == 3
