"""What a batch run refuses before it begins, and what its exit codes promise."""

import os
from pathlib import Path
from typing import Any

import pytest

from purestep.engine import cli_batch
from purestep.engine.cli import main
from tests.engine.batch_fixtures import SMALL, batch, bytes_checkpoint, write_lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-rows=0"], "max_rows=0"),
        (["--window=0"], "window=0"),
        (["--window-bytes=0"], "--window-bytes"),
        (["--device=nowhere"], "nowhere"),
        (["--adapter-bytes=100"], "adapter_bytes=100"),
        (["--model-name=a", "--adapter=a=anywhere"], "name of the base model"),
        (["--max-tokens=-1"], "max_tokens=-1"),
        (["--threads=0"], "--threads"),
        (["--ray-actors=0"], "--ray-actors"),
        (["--ray-cpus=-1"], "--ray-cpus"),
        (["--ray-gpus=1.5"], "--ray-gpus"),
        (["--remote-seconds=inf"], "--remote-seconds"),
        (["--remote-seconds=0"], "--remote-seconds"),
        (["--kv-bytes=infGiB"], "--kv-bytes"),
        (["--media-root=/no/such/folder"], "media root /no/such/folder"),
        (["--adapter-dir=/no/such/folder"], "--adapter-dir /no/such/folder"),
        (["--adapter=a=here", "--adapter=a=there"], "names 'a' more than once"),
        (["--metrics=/no/such/folder/file"], "/no/such/folder/file"),
        (["--metrics=IN"], "is the input or the output"),
        (["--metrics=OUT"], "is the input or the output"),
    ],
)
def test_wrong_options_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    small = [option for option in SMALL if not option.startswith("--lora")]
    files = [str(bytes_checkpoint()), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    places = {"--metrics=IN": f"--metrics={files[1]}", "--metrics=OUT": f"--metrics={files[2]}"}
    options = [places.get(option, option) for option in options]
    before = (tmp_path / "in.jsonl").read_bytes()
    assert exit_code(["batch", *files, *small, *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    assert (tmp_path / "in.jsonl").read_bytes() == before


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:  # of argparse
        return int(end.code)


def test_files_that_are_none_are_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe would lose the lines that are read in advance; an output has to be read again."""
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    cases = {
        ("in.jsonl", "folder"): "no regular file",
        ("in.jsonl", "pipe"): "no regular file",
        ("in.jsonl", "/dev/null"): "no regular file",
        ("in.jsonl", "no/out.jsonl"): "no such folder",
        ("in.jsonl", "in.jsonl"): "the same file",
        ("pipe", "out.jsonl"): "no regular file",
        ("folder", "out.jsonl"): "no regular file",
        ("missing", "out.jsonl"): "No such file",
    }
    for (given, wanted), words in cases.items():
        files = [str(tmp_path / given), str(tmp_path / wanted)]
        assert main(["batch", str(tmp_path / "no model"), *files]) == 2
        told = capsys.readouterr().err
        assert words in told, (given, wanted)
        assert files[words != "No such file" and given == "in.jsonl"].split("/")[-1] in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.jsonl", "pipe"]


def test_no_failure_looks_like_a_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own exit code for an error that nothing catches is 1: every line has a record."""

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a bug")

    write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with monkeypatch.context() as patch:
        patch.setattr(cli_batch, "run_batch", broken)
        assert batch(tmp_path) == 4
    assert "a bug" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(cli_batch, "load_program", broken)
        assert batch(tmp_path) == 2
    assert "a bug" in capsys.readouterr().err

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cli_batch, "load_program", stopped)
        assert batch(tmp_path) == 130
    assert batch(tmp_path) == 0
