"""The benchmarks run anywhere with --smoke, and write what a reader of their files relies on."""

import importlib.util
import json
from datetime import date
from pathlib import Path

import pytest

from bench import (
    batch_file,
    cpu_generate,
    gpu_engine,
    gpu_loading,
    gpu_ops,
    host_step,
    image_prefill,
    loading,
)
from bench.gpu_trace import idle_of
from bench.report import Figure


def test_cpu_generate_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    cpu_generate.main(["--smoke", "--rounds", "1", "--dtype", "both", "--json", str(file)])
    lines = {line["figure"]: line for line in map(json.loads, file.read_text().splitlines())}
    cases = {"base": "transformers", "mixed4": "peft", "mixed4_over_base": None}
    if importlib.util.find_spec("peft") is None:
        cases = {"base": "transformers"}
    names = [f"cpu_generate/{case}/{dtype}" for dtype in ("float32", "bfloat16") for case in cases]
    assert list(lines) == names
    for name, line in lines.items():
        peer = cases[name.split("/")[1]]
        assert line["value"] > 0
        assert line["unit"] == ("tokens/s" if peer else "ratio")
        assert date.fromisoformat(line["date"]) <= date.today()
        assert {"python", "torch", "transformers", "purestep"} <= set(line["versions"])
        assert line.get("peer") == peer
        if peer:
            assert line["ratio"] == pytest.approx(line["value"] / line["peer_value"])
    shown = capsys.readouterr().out
    assert "base float32: 0 of 5 rows differ" in shown
    assert "mixed4 float32: 0 of 5 rows differ" in shown or "mixed4" not in cases


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the loop is PEFT's")
def test_batch_file_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    batch_file.main(["--smoke", "--threads", "1", "--json", str(file)])
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["figure"], line["unit"]) == ("batch_file/wall", "s")
    assert line["ratio"] == pytest.approx(line["peer_value"] / line["value"])
    assert "0 of 6 texts differ" in capsys.readouterr().out


def test_gpu_ops_smoke(tmp_path: Path) -> None:
    """Without a GPU it checks the plain-torch ops and writes void numbers."""
    file = tmp_path / "figures.json"
    gpu_ops.main(["--smoke", "--json", str(file)])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {"gpu_ops/copy", "gpu_ops/lora/qkv/rows8/adapters8"} <= {x["figure"] for x in lines}
    assert all(line["value"] is not None and line["device"] for line in lines)


def test_gpu_engine_smoke(tmp_path: Path) -> None:
    """Without a GPU it runs a tiny model; both drivers have figures of their own."""
    file = tmp_path / "figures.json"
    options = ["--rounds", "1", "--only", "W2", "--cases", "base", "--drivers", "ahead", "plain"]
    gpu_engine.main(["--smoke", "--json", str(file), *options])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = {"start", "base", "base/step", "base/plain", "base/plain/step"}
    assert {f"gpu_engine/W2/{name}" for name in names} <= {line["figure"] for line in lines}


def test_gpu_engine_mixed_smoke(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    gpu_engine.main(["--smoke", "--json", str(file), "--rounds", "1", "--only", "mixed"])
    lines = {line["figure"]: line for line in map(json.loads, file.read_text().splitlines())}
    cases = ("base", "adapters8", "base/eager", "adapters8/eager")
    assert {f"gpu_engine/mixed/{case}" for case in cases} <= set(lines)
    assert all(line["value"] > 0 for line in lines.values())


def test_idle_between_steps_is_told_from_idle_within() -> None:
    """Kernels of two steps: 2 us idle in the first, then 3 and 4 around a copy, 1 in the second."""
    spans = [("_add_norm", 0, 10), ("gemm", 12, 20), ("_join", 20, 21), ("Memcpy", 24, 25)]
    spans += [("_add_norm", 29, 39), ("gemm", 35, 49), ("_join", 50, 51)]
    found = idle_of(spans)
    assert (found.between, found.within) == (7 / 51, 3 / 51)


def test_a_missing_peer_is_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "figures.json"
    cpu_generate.main(["--smoke", "--rounds", "1", "--json", str(file)])
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["figure"] == "cpu_generate/base/float32"
    assert "peft is not installed: mixed4 is skipped" in capsys.readouterr().out


def test_ratios_are_above_one_where_we_are_better() -> None:
    fields = {"figure": "x", "unit": "s", "peer": "p"}
    assert Figure(value=3.0, peer_value=2.0, **fields).ratio == 1.5
    assert Figure(value=3.0, peer_value=2.0, lower_is_better=True, **fields).ratio == 2 / 3
    assert Figure(value=3.0, unit="s", figure="x").ratio is None


def test_host_step_smoke(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    host_step.main(["--smoke", "--no-peer", "--json", str(file)])
    lines = {line["figure"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert set(lines) == {case.figure for case in host_step.CASES} | {"submit_4000"}
    assert all(line["value"] > 0 and line["unit"] == "ms" for line in lines.values())


def test_loading_smoke(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    file = tmp_path / "figures.json"
    loading.main(["--smoke", "--json", str(file)])
    lines = {line["figure"]: line for line in map(json.loads, file.read_text().splitlines())}
    ratios = {"loading/p50_ratio", "loading/p99_ratio", "loading/copies_p50_ratio", "loading/load"}
    assert ratios < set(lines)
    assert all(line["value"] > 0 for line in lines.values())
    assert lines["loading/p50_ratio"]["steps"] >= 4
    assert lines["loading/p50_ratio"]["loads"] >= 1


def test_gpu_loading_smoke(tmp_path: Path) -> None:
    """On a CPU, in seconds: what is measured there is void."""
    file = tmp_path / "figures.json"
    gpu_loading.main(["--smoke", "--json", str(file)])
    lines = {line["figure"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert {"gpu_loading/p50_ratio", "gpu_loading/p99_ratio", "gpu_loading/rate"} < set(lines)
    assert all(line["value"] > 0 for line in lines.values())


def test_image_prefill_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    image_prefill.main(["--smoke", "--rounds", "1", "--threads", "1", "--json", str(file)])
    lines = {line["figure"]: line for line in map(json.loads, file.read_text().splitlines())}
    for family in ("llava", "qwen2_vl"):
        for case, has_peer in image_prefill.CASES.items():
            line = lines[f"image_prefill/{case}/{family}/cpu"]
            assert line["unit"] == "ms"
            assert ("ratio" in line) == has_peer
            assert line["worst"] >= line["value"] > 0
    assert capsys.readouterr().out.count("equals that of transformers") >= 6
