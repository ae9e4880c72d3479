"""A run that is killed again and again writes what an undisturbed one does; memory stays put."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.batch_fixtures import (
    SMALL,
    adapters,
    bytes_checkpoint,
    read_records,
    write_lines,
)

# A process that has everything imported starts the runs, and kills each when the output has grown
# by some number of bytes, wherever the run is then: a busy machine would let a clock strike early.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from purestep.engine import cli, prepare
from transformers import AutoTokenizer
times, *command = sys.argv[1:]
output, dice = Path(command[3]), random.Random(5)
for _ in range(int(times)):
    goal = dice.randrange(6000) + (output.stat().st_size if output.exists() else 0)
    if (child := os.fork()) == 0:
        os._exit(cli.main(command))
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if output.exists() and output.stat().st_size >= goal:
            time.sleep(dice.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.stat().st_size)
            break
        time.sleep(0.001)
sys.exit(cli.main(command))
"""


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"custom_id": f"{at}", "prompt": f"question {at}", "adapter": [None, "a", "c"][at % 3],
         "max_tokens": 4 + at % 12, "ignore_eos": True, "n": 1 + at % 2,
         "temperature": float(at % 2)}
        for at in range(200)
    ]  # fmt: skip
    lines[17], lines[150] = b"{", {"custom_id": "3", "prompt": "again"}
    source = write_lines(tmp_path / "in.jsonl", lines)

    def run(times: int, output: str) -> tuple[list[str], dict[int, Any]]:
        command = ["batch", str(bytes_checkpoint()), str(source), str(tmp_path / output), *SMALL]
        done = subprocess.run(
            [sys.executable, "-c", KILLER, str(times), *command, *adapters()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        return done.stdout.splitlines(), read_records(tmp_path / output)

    _, want = run(0, "whole.jsonl")
    assert sorted(want) == list(range(1, 201))
    ends, found = run(20, "killed.jsonl")
    assert found == want
    killed = [line for line in ends if line.startswith("-9 ")]
    sizes = {int(line.split()[1]) for line in killed}
    print(f"{len(killed)} of 20 runs were killed before their end, at {len(sizes)} sizes")
    assert len(sizes) >= 10


# Not by getrusage, whose peak begins with that of the process that forked.
MEASURED = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from purestep.engine import cli
code = cli.main(sys.argv[1:])
status = Path("/proc/self/status").read_text().splitlines()
print(code, next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """BC-03: a million lines take less than 100 MB more than ten thousand; every line has a name,
    which is remembered. Every 50th runs, the others want an adapter that nobody has: all million
    through the scheduler take a quarter of an hour (WHOLE=1)."""
    step = 1 if os.environ.get("WHOLE") else 50

    def peak(count: int) -> int:
        source, output = tmp_path / f"{count}.jsonl", tmp_path / f"{count}.out"
        with source.open("w") as file:
            for at in range(count):
                line = {"custom_id": f"name-{at}", "prompt": "hi"}
                file.write(json.dumps(line | ({"adapter": "x"} if at % step else {})) + "\n")
        command = ["batch", str(bytes_checkpoint()), str(source), str(output), "--dry-run",
                   "--max-tokens=1", "--max-rows=256", "--max-batched-tokens=4096"]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        code, kib = map(int, done.stdout.split())
        assert code == (step > 1)
        with output.open() as file:
            assert sum(1 for _ in file) == count
        return kib * 1024

    small, large = peak(10_000), peak(1_000_000)
    print(f"{small / 1e6:.0f} MB for 10,000 lines, {large / 1e6:.0f} MB for 1,000,000")
    assert large - small < 100e6
