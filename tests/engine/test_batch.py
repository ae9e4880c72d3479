"""A batch run as its user sees it: cases BC-01 to BC-10, in files and exit codes."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from purestep.engine import batch as batch_module
from purestep.engine import batch_requests, init, load_adapter, load_program, prepare
from purestep.engine.batch_records import NEVER, _finite, encoded
from purestep.engine.generate import generate
from purestep.state.sampling import SamplingParams
from tests.engine.batch_fixtures import (
    adapters,
    batch,
    bytes_checkpoint,
    chat,
    error_of,
    read_records,
    run_lines,
    write_lines,
)
from tests.engine.tiny import adapter_folder, run

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_one_bad_line_spoils_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BC-01."""
    good = {"prompt": "hello", "max_tokens": 3}
    write_lines(tmp_path / "in.jsonl", [])
    lines = [
        b"\xef\xbb\xbf" + json.dumps(good | {"custom_id": "first"}).encode(),
        b"   ",
        b"{",
        b"[1,2]",
        b"null",
        json.dumps(good | {"foo": 1, "custom_id": "foo"}).encode(),
        json.dumps(good | {"max_tokens": "5"}).encode(),
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b"[" * 100_000,
        json.dumps(good).encode() + b"\r",
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n" + json.dumps(good).encode())
    assert batch(tmp_path) == 1
    records = read_records(tmp_path / "out.jsonl")
    assert sorted(records) == [1, *range(3, 13)]
    assert {n for n, r in records.items() if r["error"] is None} == {1, 11, 12}
    assert records[1]["custom_id"] == "first"
    assert records[6]["custom_id"] == "foo"
    assert records[1]["outputs"] == records[11]["outputs"] == records[12]["outputs"]
    codes = {n: error_of(records[n])[0] for n in sorted(records) if records[n]["error"]}
    broken = dict.fromkeys((3, 4, 5, 8, 9, 10), "invalid_json")
    assert codes == broken | {6: "invalid_request", 7: "request_failed"}
    assert "unknown field 'foo'" in error_of(records[6])[1]
    assert "max_tokens='5'" in error_of(records[7])[1]
    assert "8 lines of" in capsys.readouterr().err


def test_each_form_gets_what_the_engine_says_alone(tmp_path: Path) -> None:
    """Chat, completions and the plain form, base and adapter: tokens, texts, logprobs, usage."""
    text = "Once upon a time"
    asks = {"max_tokens": 6, "ignore_eos": True}
    completion = {
        "custom_id": "t",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "a", "prompt": [text], "logprobs": 2, **asks},
    }
    lines = [
        chat("c", text, logprobs=True, top_logprobs=3, **asks),
        completion,
        {"prompt": text, "adapter": "a", "logprobs": 2, "prompt_logprobs": 1, **asks},
        {"prompt": list(text.encode()), **asks},
        {"prompt": [{"role": "user", "content": text}], "adapter": None, **asks},
    ]
    code, records = run_lines(tmp_path, lines, *adapters())
    assert code == 0, records

    program = load_program(bytes_checkpoint(), device="cpu", dtype="float32")
    state = load_adapter(init(program), adapter_folder("a"), name="a")
    greedy = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    messages = [{"role": "user", "content": text}]
    wanted = [
        prepare(program, messages, id="chat", sampling=greedy),
        prepare(program, text, id="base", sampling=greedy),
        prepare(program, text, id="a", adapter="a", sampling=greedy),
    ]
    _, done = run(program, state, wanted)

    body = records[1]["response"]["body"]
    (choice,) = body["choices"]
    assert records[1]["response"]["status_code"] == 200
    assert (body["object"], body["model"]) == ("chat.completion", bytes_checkpoint().name)
    assert choice["message"] == {"role": "assistant", "content": done["chat"].text}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == done["chat"].num_prompt_tokens
    assert body["usage"]["completion_tokens"] == 6
    content = choice["logprobs"]["content"]
    for said, want, tops in zip(
        content, done["chat"].logprobs, done["chat"].top_logprobs, strict=True
    ):
        assert said["logprob"] == pytest.approx(want, abs=1e-5)
        assert [x["logprob"] for x in said["top_logprobs"]] == pytest.approx(tops, abs=1e-5)
    assert b"".join(bytes(x["bytes"]) for x in content).decode(errors="replace") == (
        done["chat"].text
    )

    body = records[2]["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "a")
    (choice,) = body["choices"]
    assert choice["text"] == done["a"].text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(done["a"].logprobs, abs=1e-5)
    assert [len(x) for x in choice["logprobs"]["top_logprobs"]] == [2] * 6
    pieces = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    assert all(t.startswith("bytes:") or choice["text"][at:].startswith(t) for t, at in pieces)

    (output,) = records[3]["outputs"]
    assert output["tokens"] == done["a"].tokens.tolist()
    chosen = [
        scores[str(t)] for t, scores in zip(output["tokens"], output["logprobs"], strict=True)
    ]
    assert chosen == pytest.approx(done["a"].logprobs, abs=1e-5)
    assert all(2 <= len(scores) <= 3 for scores in output["logprobs"]), "the chosen and two"
    assert output["prompt_logprobs"][0] is None
    assert len(output["prompt_logprobs"]) == len(text)
    assert records[4]["outputs"][0]["tokens"] == done["base"].tokens.tolist()
    assert records[5]["outputs"][0]["tokens"] == done["chat"].tokens.tolist()
    assert done["a"].tokens.tolist() != done["base"].tokens.tolist()


def test_one_record_a_line_in_the_order_of_completion(tmp_path: Path) -> None:
    """BC-05: `line` says where a record belongs, `custom_id` whose it is; n choices inside it."""
    rng = np.random.default_rng(0)
    lines: list[Any] = []
    for at in range(40):
        body = {"max_tokens": int(rng.integers(1, 12)), "ignore_eos": True}
        body |= {"n": 2, "temperature": 1.0, "seed": at} if at % 5 == 0 else {}
        lines.append(chat(f"id-{at}", f"question {at}", **body))
    lines[7]["body"]["max_tokens"] = -1
    code, records = run_lines(tmp_path, lines)
    assert code == 1
    assert sorted(records) == list(range(1, 41))
    assert list(records) != sorted(records), "not in the order of input"
    for at, line in enumerate(lines):
        record = records[at + 1]
        assert record["custom_id"] == line["custom_id"]
        if at == 7:
            assert "max_tokens=-1" in error_of(record)[1]
            continue
        choices = record["response"]["body"]["choices"]
        assert [choice["index"] for choice in choices] == list(range(line["body"].get("n", 1)))
        usage = record["response"]["body"]["usage"]
        assert usage["completion_tokens"] == len(choices) * line["body"]["max_tokens"]


@pytest.fixture
def picture_server() -> Iterator[str]:
    """Serves a picture, a slow one, and a redirect to a file."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/redirect":
                self.send_response(302)
                self.send_header("Location", "file:///etc/passwd")
                self.end_headers()
                return
            if self.path == "/no-http":
                self.wfile.write(b"220 another protocol\r\n")
                return
            self.send_response(200 if self.path == "/dot.png" else 404)
            self.end_headers()
            self.wfile.write(PNG)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_adapters_and_images_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture_server: str
) -> None:
    """BC-06: as each line asks; unknown adapters and files outside the root are its errors."""
    outside, folder = tmp_path / "outside", tmp_path / "job"
    outside.mkdir()
    folder.mkdir()
    for place in (outside / "dot.png", folder / "dot.png"):
        place.write_bytes(PNG)
    (folder / "large.png").write_bytes(PNG * 100)
    (folder / "link.png").symlink_to(outside / "dot.png")
    data = base64.b64encode(PNG).decode()
    seen: list[bytes] = []
    read = batch_requests.read_media

    def reading(rule: Any, source: str) -> bytes:
        seen.append(read(rule, source))
        return seen[-1]

    monkeypatch.setattr(batch_requests, "read_media", reading)
    sources = {
        "dot.png": None,
        str(folder / "dot.png"): None,
        f"file://{folder}/dot.png": None,
        f"data:image/png;base64,{data}": None,
        f"{picture_server}/dot.png": None,
        "missing.png": "media_not_found",
        "../outside/dot.png": "media_forbidden",
        str(outside / "dot.png"): "media_forbidden",
        "file://elsewhere/dot.png": "media_forbidden",
        "link.png": "media_forbidden",
        "large.png": "media_too_large",
        "a\0b": "media_not_found",
        "data:image/png;base64,?": "media_invalid",
        "data:nothing": "media_invalid",
        f"data:image/png;base64,{data * 100}": "media_too_large",
        f"{picture_server}/nothing.png": "media_fetch_failed",
        f"{picture_server}/redirect": "media_fetch_failed",
        "http://127.0.0.1:1/x.png": "media_fetch_failed",
        f"{picture_server}/a dot.png": "media_fetch_failed",
        f"{picture_server}/no-http": "media_fetch_failed",
        "file://[dot.png": "media_invalid",
        "data": "media_not_found",
    }
    part = {"type": "text", "text": "what is it?"}
    lines = [
        chat("base", "hello", ignore_eos=True),
        chat("a", "hello", "a", ignore_eos=True),
        chat("c", "hello", "c", ignore_eos=True),
        chat("unknown", "hello", "gpt-4"),
        {"prompt": "hello", "images": ["dot.png"]},
        *(
            chat(f"i{at}", [part, {"type": "image_url", "image_url": {"url": source}}])
            for at, source in enumerate(sources)
        ),
    ]
    limits = ["--allow-remote", f"--max-image-bytes={4 * len(PNG)}", "--remote-seconds=5"]
    code, records = run_lines(folder, lines, *adapters(), *limits)
    assert code == 1
    said = {
        record["custom_id"]: record["response"]["body"]["choices"][0]["message"]["content"]
        for record in records.values()
        if record["error"] is None
    }
    assert sorted(said) == ["a", "base", "c"]
    assert len(set(said.values())) == 3, "each adapter says something else"
    code, message = error_of(records[4])
    assert (code, records[4]["error"]["status"]) == ("model_not_found", 404)
    assert "'gpt-4'" in message
    assert "'a'" in message
    assert error_of(records[5])[0] == "modality_not_supported"
    for line, (source, problem) in enumerate(sources.items(), start=6):
        assert error_of(records[line])[0] == (problem or "modality_not_supported"), source
    assert seen == [PNG] * 6

    remote = chat("r", [part, {"type": "image_url", "image_url": {"url": picture_server}}])
    out = folder / "out.jsonl"
    out.unlink()
    elsewhere = chat("o", [{"type": "image_url", "image_url": {"url": str(outside / "dot.png")}}])
    code, records = run_lines(folder, [remote, elsewhere], f"--media-root={outside}")
    assert error_of(records[1])[0] == "media_forbidden"
    assert "--allow-remote" in error_of(records[1])[1]
    assert error_of(records[2])[0] == "modality_not_supported"


def test_what_this_engine_does_not_do_is_that_lines_error(tmp_path: Path) -> None:
    """BC-07, and the modalities to come."""
    whole = chat("x", "hello")

    def with_(**changes: Any) -> dict[str, Any]:
        changed = whole | changes
        return {k: v for k, v in changed.items() if v != "gone"}

    def body(**changes: Any) -> dict[str, Any]:
        return whole | {"body": whole["body"] | changes}

    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    bad = [
        (with_(url="/v1/embeddings"), "not_supported", "/v1/embeddings"),
        (with_(url="/v1/responses"), "not_supported", "/v1/responses"),
        (with_(url="gone"), "not_supported", "url=None"),
        (with_(url=["/v1/completions"]), "not_supported", "url="),
        (with_(method="GET"), "invalid_request", "method='GET'"),
        (with_(body="gone"), "invalid_request", "body=None"),
        (with_(body=[1]), "invalid_request", "body=[1]"),
        (with_(custom_id="gone"), "invalid_request", "custom_id=None"),
        (with_(custom_id=7), "invalid_request", "custom_id=7"),
        (with_(custom_id="\ud800"), "invalid_request", "custom_id="),
        (with_(priority=1), "invalid_request", "unknown field 'priority'"),
        (body(stream=True), "not_supported", "stream=True"),
        (body(tools=[{}]), "not_supported", "tools="),
        (body(model=None), "invalid_request", "model is missing"),
        (body(model="gpt-4"), "model_not_found", "'gpt-4'"),
        (body(model=5), "invalid_request", "model=5"),
        (body(messages=[]), "invalid_request", "messages=[]"),
        (body(messages="hello"), "invalid_request", "messages='hello'"),
        (body(messages=[{"role": "user"}]), "invalid_request", "content=None"),
        (body(messages=[{"content": "x"}]), "invalid_request", "role"),
        (body(messages=[{"role": "user", "content": "\udc00"}]), "invalid_request", "surrogate"),
        (body(messages=[{"role": "user", "content": [part]}]), "modality_not_supported", "audio"),
        (
            body(messages=[{"role": "user", "content": [{"type": "video_url"}]}]),
            "modality_not_supported",
            "video",
        ),
        (body(top_logprobs=3), "invalid_request", "logprobs=true"),
        (body(max_completion_tokens=9), "invalid_request", "max_completion_tokens=9"),
        (body(logit_bias={"x": 1}), "invalid_request", "logit_bias"),
        (body(n=0), "request_failed", "n=0"),
        (body(salt=[1]), "request_failed", "salt=[1]"),
        ({"prompt": ["a", "b"]}, "invalid_request", "prompt="),
        ({"prompt": None}, "invalid_request", "prompt=None"),
        ({"custom_id": "y"}, "invalid_request", "prompt=None"),
        ({"prompt": "a", "model": "a"}, "invalid_request", "unknown field 'model'"),
        ({"prompt": ""}, "request_failed", "empty"),
        ({"prompt": [9999]}, "request_failed", "9999"),
    ]
    lines = [line | {"custom_id": f"{n}"} if line.get("custom_id") == "x" else line
             for n, (line, _, _) in enumerate(bad)]  # fmt: skip
    code, records = run_lines(tmp_path, [*lines, chat("ok", "hello", user="me", stop=None)])
    assert code == 1
    for number, (line, want, words) in enumerate(bad, start=1):
        code, message = error_of(records[number])
        assert code == want, (line, message)
        assert words in message, line
        assert records[number]["error"]["status"] == (404 if want == "model_not_found" else 400)
    assert records[len(bad) + 1]["error"] is None


def test_every_output_line_is_strict_json(tmp_path: Path) -> None:
    """BC-09: odd bytes in texts, and tokens that a line bans (-inf only in what is sampled)."""
    prompts = [f"{at}" for at in range(12)]
    odd = [0xE2, 0x80, 0xA8, 0xC2, 0x85, 0xED, 0xA0, 0x80, 0x00]  # U+2028, U+0085, half a pair, NUL
    lines = [
        {"prompt": text, "allowed_ids": odd, "max_tokens": 24, "logprobs": 257, "temperature": 1.5,
         "custom_id": f"\u2028{text}\x85"}
        for text in prompts
    ]  # fmt: skip
    code, records = run_lines(tmp_path, lines)
    assert code == 0
    for number, record in records.items():
        assert record["custom_id"] == lines[number - 1]["custom_id"]
        assert set(record["outputs"][0]["tokens"]) <= {*odd, 2}
        assert all(len(scores) == 257 for scores in record["outputs"][0]["logprobs"])


def test_a_logprob_of_minus_infinity_is_written_as_a_number() -> None:
    line = encoded({"x": _finite({3: float("-inf"), 4: -1.5})})
    assert json.loads(line) == {"x": {"3": NEVER, "4": -1.5}}
    with pytest.raises(ValueError, match="JSON"):
        encoded({"x": float("nan")})


def test_limits_reached_inside_a_run(tmp_path: Path) -> None:
    """BC-10: every tenth line is too long or too big, the others finish, nothing is tried again."""
    lines: list[Any] = [{"prompt": f"line {at}", "max_tokens": 2} for at in range(200)]
    for at in range(0, 200, 10):
        lines[at] = [
            {"prompt": "long " * 100, "max_tokens": 2},  # more than max_context
            {"prompt": "many " * 14, "max_tokens": 2},  # more than all KV blocks
            {"prompt": "grows" * 9, "max_tokens": 60, "ignore_eos": True},  # more with its tokens
            {"prompt": "x", "max_tokens": 10**12, "stop_ids": list(range(257))},  # fine: it stops
        ][at // 10 % 4]
    code, records = run_lines(tmp_path, lines, "--max-context=128", "--num-blocks=16")
    assert code == 1
    assert sorted(records) == list(range(1, 201))
    failed = {n - 1 for n, record in records.items() if record["error"]}
    assert failed == {at for at in range(0, 200, 10) if at // 10 % 4 != 3}
    codes = {at // 10 % 4: error_of(records[at + 1])[0] for at in sorted(failed)}
    assert codes == {0: "request_failed", 1: "request_failed", 2: "out_of_kv_memory"}
    assert "max_context=128" in error_of(records[1])[1]
    assert "num_blocks=16" in error_of(records[21])[1]


def test_a_broken_adapter_fails_its_own_lines(tmp_path: Path) -> None:
    """Found on demand below --adapter-dir; a damaged one hurts nobody."""
    shelf = tmp_path / "shelf" / "team"
    shelf.mkdir(parents=True)
    for name in ("a", "c", "d"):
        (shelf / name).symlink_to(adapter_folder(name))
    (shelf / "a").unlink()
    whole = shelf / "a"
    whole.mkdir()
    for file in adapter_folder("a").iterdir():
        (whole / file.name).write_bytes(file.read_bytes())
    broken = tmp_path / "shelf" / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{")
    models = ["team/a", "broken", "team/none", "../shelf", None] * 3
    lines = [
        {"prompt": f"{at}", "adapter": model, "max_tokens": 2} for at, model in enumerate(models)
    ]
    lines += [{"prompt": "n", "adapter": "broken", "n": 3, "temperature": 1.0}]
    code, records = run_lines(tmp_path, lines, f"--adapter-dir={tmp_path / 'shelf'}")
    assert code == 1
    for number, line in enumerate(lines, start=1):
        match line["adapter"]:
            case "broken":
                code, message = error_of(records[number])
                assert (code, "adapter_config.json" in message) == ("request_failed", True)
            case "team/none" | "../shelf":
                assert error_of(records[number])[0] == "model_not_found"
            case _:
                assert records[number]["error"] is None


def test_duplicate_ids_are_errors_of_the_later_lines(tmp_path: Path) -> None:
    lines = [chat("same", "1"), chat("other", "2"), chat("same", "3"), {"prompt": "4"}]
    code, records = run_lines(tmp_path, [*lines, chat("same", "5")])
    assert code == 1
    assert [n for n in records if records[n]["error"]] == [3, 5]
    assert error_of(records[3])[0] == "duplicate_custom_id"
    again = batch(tmp_path)
    assert (again, sorted(read_records(tmp_path / "out.jsonl"))) == (1, [1, 2, 3, 4, 5])


def test_a_run_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """AU-08: Ctrl-C after some lines, a torn record, then the same command."""
    lines = [
        {"prompt": f"line {at}", "max_tokens": 5, "n": 1 + at % 2, "temperature": at % 2 * 1.0}
        for at in range(30)
    ]
    write_lines(tmp_path / "in.jsonl", [*lines, b"{"])
    assert batch(tmp_path, output="whole.jsonl") == 1
    want = read_records(tmp_path / "whole.jsonl")
    out = tmp_path / "out.jsonl"
    collect = batch_module._Run.collect

    def interrupted(run: Any, completion: Any) -> None:
        if run.results.num_finished >= 9:
            raise KeyboardInterrupt
        collect(run, completion)

    with monkeypatch.context() as patch:
        patch.setattr(batch_module._Run, "collect", interrupted)
        assert batch(tmp_path) == 130
    kept = read_records(out)
    assert 0 < len(kept) < len(want)
    out.write_bytes(out.read_bytes() + b'{"line":30,"dig')
    capsys.readouterr()
    assert batch(tmp_path) == 1
    assert f"{len(kept)} finished before" in capsys.readouterr().err
    assert read_records(out) == want
    before = out.read_bytes()
    assert batch(tmp_path) == 1
    assert out.read_bytes() == before, "nothing left to do"


def test_an_output_of_another_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": f"{at}", "max_tokens": 1} for at in range(3)]
    assert run_lines(tmp_path, lines)[0] == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    for changed, words in (
        ([lines[0], {"prompt": "other"}, lines[2]], "another line 2"),
        (lines[:2], "1 lines that"),
    ):
        write_lines(tmp_path / "in.jsonl", changed)
        assert batch(tmp_path) == 2
        assert words in capsys.readouterr().err
        assert (tmp_path / "out.jsonl").read_bytes() == before
    code, records = run_lines(tmp_path, [*lines, lines[0]])
    assert (code, sorted(records)) == (0, [1, 2, 3, 4]), "lines may be added"
    (tmp_path / "notes.txt").write_text("not a record")
    assert batch(tmp_path, output="notes.txt") == 2
    assert (tmp_path / "notes.txt").read_text() == "not a record"
    assert batch(tmp_path, "--dry-run") == 2
    assert "real run" in capsys.readouterr().err


def test_strict_stops_at_the_first_bad_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Any] = [{"prompt": f"{at}", "max_tokens": 2} for at in range(12)]
    write_lines(tmp_path / "in.jsonl", [*lines[:8], b"{", *lines[9:]])
    assert batch(tmp_path, "--strict", "--window=4") == 3
    assert "line 9: the line is no JSON" in capsys.readouterr().err
    kept = read_records(tmp_path / "out.jsonl")
    assert all(record["error"] is None for record in kept.values())
    code, records = run_lines(tmp_path, lines, "--strict", "--window=4")
    assert (code, sorted(records)) == (0, list(range(1, 13)))
    assert kept.items() <= records.items()


def test_figures_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--metrics, the bar and the summary."""
    shared = "The same long beginning of every prompt. "
    lines = [{"prompt": f"{shared}{at}", "adapter": "a", "max_tokens": 3, "ignore_eos": True}
             for at in range(12)]  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    code, _ = run_lines(tmp_path, lines, *adapters(), f"--metrics={metrics}", "--progress")
    assert code == 0
    *_, last = map(json.loads, metrics.read_text().splitlines())
    assert last["final"] is True
    assert (last["done"], last["failed"], last["output_tokens"]) == (12, 0, 36)
    assert last["cache_hit_rate"] > 0.5
    assert last["requests_per_s"] > 0
    said = capsys.readouterr().err
    assert "12 lines done, 0 failed" in said
    assert "12/12" in said


def test_a_dry_run_checks_everything_but_the_model(tmp_path: Path) -> None:
    lines = [
        {"prompt": "x", "adapter": "a", "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 0},
        {"prompt": "y", "adapter": "nobody"},
        chat("c", "hello", n=2, temperature=1.0, ignore_eos=True),
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    assert batch(tmp_path, *adapters(), "--dry-run") == 1
    records = read_records(tmp_path / "out.jsonl")
    assert all(record["dry_run"] for record in records.values())
    assert error_of(records[2])[0] == "model_not_found"
    assert len(records[3]["response"]["body"]["choices"]) == 2
    assert batch(tmp_path, *adapters()) == 2, "its output is no real one's"


def test_lines_are_ordered_inside_a_window_alone(tmp_path: Path) -> None:
    """Locality: of one window adapters and beginnings come together; windows keep their order."""
    seen: list[tuple[str | None, int]] = []
    real = generate

    def watching(program: Any, requests: Any, **options: Any) -> Any:
        def noted() -> Iterator[Any]:
            for item in requests:
                seen.append((item.adapter, int(item.id.removeprefix("line-"))))
                yield item

        return real(program, noted(), **options)

    lines = [{"prompt": f"{'xy'[at % 2]}{at}", "adapter": [None, "a"][at // 2 % 2],
              "max_tokens": 1} for at in range(24)]  # fmt: skip
    write_lines(tmp_path / "in.jsonl", lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "generate", watching)
        assert batch(tmp_path, *adapters(), "--window=12") == 0
    for half in (seen[:12], seen[12:]):
        names = [name for name, _ in half]
        assert names == sorted(names, key=lambda name: name or ""), "an adapter's lines together"
    assert {n for _, n in seen[:12]} == set(range(1, 13))
    texts = [lines[n - 1]["prompt"][0] for name, n in seen[:12] if name is None]
    assert texts == sorted(texts), "equal beginnings together"
