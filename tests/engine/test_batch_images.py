"""Images in batch files: each line gets what its request gets alone, or an error of its own."""

import base64
import gc
import io
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from purestep.engine import batch_requests, cli, empty_processor_cache, init, load_adapter, prepare
from purestep.state.sampling import SamplingParams
from tests.engine.batch_fixtures import error_of, read_records, write_lines
from tests.engine.tiny import run
from tests.engine.tiny_images import folder, image_program
from tests.models.tiny_vision import picture
from tests.models.tower_adapters import folder as adapter_folder

ONE, TWO = picture(60, 45), picture(45, 60, seed=1)
QUESTION = {"type": "text", "text": "what is it?"}


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def part(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


def chat(custom_id: str, *parts: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "base", "messages": [{"role": "user", "content": list(parts)}]}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body | {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": True},
    }


def batch(
    kind: str, job: Path, lines: list[Any] | None, *options: str
) -> tuple[int, dict[int, Any]]:
    """The exit code and the records of a run over these lines, or over those that are there."""
    if lines is not None:
        write_lines(job / "in.jsonl", lines)
    files = [str(folder(kind)), str(job / "in.jsonl"), str(job / "out.jsonl")]
    sizes = ["--model-name=base", "--max-rows=4", "--num-blocks=64", "--device=cpu"]
    return cli.main(["batch", *files, *sizes, *options]), read_records(job / "out.jsonl")


def alone(kind: str, *parts: Any) -> list[float]:
    """The logprobs of a request of its own."""
    program = image_program(kind)
    content = [{"type": "image", "image": p} if isinstance(p, Image.Image) else p for p in parts]
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)
    asked = prepare(program, [{"role": "user", "content": content}], id="a", sampling=sampling)
    return run(program, init(program), [asked])[1]["a"].logprobs.tolist()


def logprobs_of(record: dict[str, Any]) -> list[float]:
    if "outputs" in record:
        return [next(iter(token.values())) for token in record["outputs"][0]["logprobs"]]
    tokens = record["response"]["body"]["choices"][0]["logprobs"]["content"]
    return [token["logprob"] for token in tokens]


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_lines_with_images_and_lines_that_fail(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths, data URLs and the plain form; a picture that many lines show is processed once."""
    (tmp_path / "one.png").write_bytes(png(ONE))
    (tmp_path / "torn.png").write_bytes(png(ONE)[:200])
    data = f"data:image/png;base64,{base64.b64encode(png(TWO)).decode()}"
    caches = [empty_processor_cache(0)]
    prepared = batch_requests.prepare_cached

    def noted(*args: Any, **options: Any) -> Any:
        found = prepared(*args, **options)
        caches.append(found[0])
        return found

    monkeypatch.setattr(batch_requests, "prepare_cached", noted)
    plain = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    lines = [
        chat("path", part("one.png"), QUESTION),
        chat("both", part("one.png"), QUESTION, part(data)),
        {"custom_id": "plain", "prompt": QUESTION["text"], "images": ["one.png"], **plain},
        chat("torn", part("torn.png"), QUESTION),
        chat("text", {"type": "text", "text": "<image> is text"}),
        {"custom_id": "place", "prompt": "a <image> place", **plain},
        {"custom_id": "ids", "prompt": [5, image_program(kind).vision.config.marker], **plain},
    ]
    code, records = batch(kind, tmp_path, lines)
    assert code == 1
    said = {
        record["custom_id"]: logprobs_of(record)
        for record in records.values()
        if record["error"] is None
    }
    about_one = pytest.approx(alone(kind, ONE, QUESTION), abs=1e-5)
    assert said["path"] == said["plain"] == about_one
    assert said["both"] == pytest.approx(alone(kind, ONE, QUESTION, TWO), abs=1e-5)
    assert said["both"] != about_one
    assert sorted(said) == ["both", "path", "plain", "text"]
    assert error_of(records[4])[0] == "media_invalid"
    assert "image 1" in error_of(records[4])[1]
    for line in (6, 7):
        assert error_of(records[line])[0] == "media_invalid"
        assert "1 place" in error_of(records[line])[1]
    assert (caches[-1].num_misses, caches[-1].num_hits) == (2, 2)
    usage = records[1]["response"]["body"]["usage"]
    assert usage["prompt_tokens"] > 16, "placeholders are tokens"


def test_a_dry_run_knows_images(tmp_path: Path) -> None:
    """It counts their tokens, and finds what is wrong with them."""
    (tmp_path / "one.png").write_bytes(png(ONE))
    (tmp_path / "torn.png").write_bytes(b"no picture")
    lines = [chat(name, part(f"{name}.png"), QUESTION) for name in ("one", "torn")]
    code, records = batch("llava", tmp_path, lines, "--dry-run")
    assert code == 1
    dry = records[1]["response"]["body"]["usage"]
    assert error_of(records[2])[0] == "media_invalid"
    (tmp_path / "out.jsonl").unlink()
    _, records = batch("llava", tmp_path, lines)
    assert records[1]["response"]["body"]["usage"]["prompt_tokens"] == dry["prompt_tokens"]
    assert error_of(records[2])[0] == "media_invalid"


def test_a_prompt_that_only_its_image_makes_too_long(tmp_path: Path) -> None:
    """BC-10: the text fits the context, the picture's places push it over."""
    (tmp_path / "one.png").write_bytes(png(ONE))
    long = {"type": "text", "text": "what is it? " * 8}
    lines = [chat("short", part("one.png"), QUESTION), chat("long", long)]
    batch("llava", tmp_path, lines)
    used = [
        record["response"]["body"]["usage"]["prompt_tokens"]
        for _, record in sorted(read_records(tmp_path / "out.jsonl").items())
    ]
    (tmp_path / "out.jsonl").unlink()
    limit = f"--max-context={max(used) + 6}"  # each of them, and what is generated
    code, records = batch("llava", tmp_path, [*lines, chat("both", part("one.png"), long)], limit)
    assert code == 1
    assert records[1]["error"] is None
    assert records[2]["error"] is None
    code, message = error_of(records[3])
    assert limit.removeprefix("--max-context=") in message


def test_memory_does_not_grow_with_the_number_of_pictures(tmp_path: Path) -> None:
    """BC-03, MO-01: pictures of 150 kB inside their lines, all different."""
    rng = np.random.default_rng(0)

    def lines(count: int) -> Iterator[dict[str, Any]]:
        for at in range(count):
            noise = Image.fromarray(rng.integers(0, 256, (224, 224, 3), np.uint8))
            data = base64.b64encode(png(noise)).decode()
            yield chat(f"{at}", part(f"data:image/png;base64,{data}"), QUESTION)

    def peak(count: int) -> int:
        write_lines(tmp_path / "in.jsonl", lines(count))
        gc.collect()
        tracemalloc.start()
        try:
            options = ["--dry-run", "--window-bytes=1MiB", "--image-cache-bytes=1MiB"]
            code, records = batch("llava", tmp_path, None, *options)
            found = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert code == 0
        assert len(records) == count
        (tmp_path / "out.jsonl").unlink()
        return found

    peak(5)  # what is made once
    few, many = peak(20), peak(60)
    assert (tmp_path / "in.jsonl").stat().st_size > 10e6
    assert many - few < 1.5e6, f"{few} and {many} bytes"


def test_lines_with_images_get_the_default_adapter(tmp_path: Path) -> None:
    """Which touches the tower, too; lines of text, and lines that name an adapter, do not."""
    kind, files = "llava", {name: adapter_folder("llava", name) for name in ("all", "some")}
    (tmp_path / "one.png").write_bytes(png(ONE))
    seen = chat("default", part("one.png"), QUESTION)
    own = chat("own", part("one.png"), QUESTION)
    own["body"]["model"] = "some"
    lines = [seen, own, chat("text", QUESTION)]
    options = [f"--adapter={name}={path}" for name, path in files.items()]
    code, records = batch(kind, tmp_path, lines, *options, "--default-adapter=image=all")
    assert code == 0
    said = {record["custom_id"]: logprobs_of(record) for record in records.values()}
    program = image_program(kind)
    for id, adapter, content in (
        ("default", "all", [{"type": "image", "image": ONE}, QUESTION]),
        ("own", "some", [{"type": "image", "image": ONE}, QUESTION]),
        ("text", None, [QUESTION]),
    ):
        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)
        words = {"id": id, "adapter": adapter, "sampling": sampling}
        asked = prepare(program, [{"role": "user", "content": content}], **words)
        state = init(program)
        if adapter is not None:
            state = load_adapter(state, files[adapter], name=adapter)
        found = run(program, state, [asked])[1][id].logprobs
        assert said[id] == pytest.approx(found.tolist(), abs=1e-5)
    assert said["default"] != pytest.approx(alone(kind, ONE, QUESTION), abs=1e-3)
    with pytest.raises(SystemExit):
        batch(kind, tmp_path, None, "--default-adapter=image")
    code, _ = batch(kind, tmp_path, None, "--default-adapter=image_url=all")
    assert code == 2
