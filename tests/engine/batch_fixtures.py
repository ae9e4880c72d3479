"""What tests of batch runs share: a tiny checkpoint that speaks bytes, files, a command line."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from purestep.engine import cli
from tests.engine.test_generate import byte_tokenizer
from tests.engine.tiny import adapter_folder, checkpoint

SMALL = ["--max-rows=4", "--block-size=4", "--max-active-adapters=2", "--lora-rows=32"]


@cache
def bytes_checkpoint() -> Path:
    """T-LLAMA over bytes, greedy by default, with tokenizer and chat template."""
    folder, _ = checkpoint(vocab_size=257, max_position_embeddings=512)
    byte_tokenizer().save_pretrained(folder)
    return folder


def adapters(names: str = "ac") -> list[str]:
    """--adapter options."""
    return [f"--adapter={name}={adapter_folder(name)}" for name in names]


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """A file of lines: bytes as they are, anything else as JSON."""
    whole = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    path.write_bytes(b"\n".join(whole) + b"\n")
    return path


def batch(folder: Path, *options: str, output: str = "out.jsonl") -> int:
    """`purestep batch` on `in.jsonl` of a folder; its exit code."""
    files = [str(bytes_checkpoint()), str(folder / "in.jsonl"), str(folder / output)]
    return cli.main(["batch", *files, *SMALL, *options])


def read_records(path: Path) -> dict[int, dict[str, Any]]:
    """Records by line number, read as strictly as JSON is meant."""

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is no JSON")

    found = {}
    for text in path.read_bytes().decode().splitlines():  # also at U+2028 and the like
        record = json.loads(text, parse_constant=refuse)
        assert record["line"] not in found, "one record a line"
        found[record["line"]] = record
    return found


def run_lines(folder: Path, lines: Iterable[Any], *options: str) -> tuple[int, dict[int, Any]]:
    """The exit code and the records of a run over these lines."""
    write_lines(folder / "in.jsonl", lines)
    code = batch(folder, *options)
    return code, read_records(folder / "out.jsonl")


def chat(custom_id: str, text: Any, model: str | None = None, **body: Any) -> dict[str, Any]:
    """A chat line of the OpenAI batch format."""
    named = model or bytes_checkpoint().name
    fields = {"model": named, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": fields | body,
    }


def error_of(record: dict[str, Any]) -> tuple[str, str]:
    """(code, message) of an error record."""
    assert record["response"] is None
    assert record["error"]["line"] == record["line"]
    return record["error"]["code"], record["error"]["message"]
