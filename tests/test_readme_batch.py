"""The README's batch guide runs as printed, and its command line reference is the parser's."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from purestep.engine.cli_reference import reference
from tests.engine.batch_fixtures import bytes_checkpoint
from tests.engine.tiny import adapter_folder

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_reference_is_the_parsers() -> None:
    """To renew it, put what `python -m purestep.engine.cli_reference` prints between the marks."""
    start = "<!-- python -m purestep.engine.cli_reference -->\n"
    printed = README.partition(start)[2].partition("<!-- end -->")[0]
    assert printed.strip() == reference().strip()


def test_the_guide_runs_as_printed(tmp_path: Path) -> None:
    """In an empty directory, on a tiny model and adapter in place of the demo's."""
    guide = README.partition("## Batch files")[2]
    (block,) = re.findall(r"```sh\n(.*?)```", guide.partition("\n## ")[0], re.DOTALL)
    command, demo = f"{sys.executable} -m purestep.engine", tmp_path / "demo"
    shutil.copytree(adapter_folder("a"), demo / "adapters" / "shout")
    (demo / "smollm2-135m-instruct").symlink_to(bytes_checkpoint())
    script = re.sub(r"^pip install .*$", "", block, flags=re.MULTILINE)
    script = re.sub(r"^DEMO=\S+ demo-model\)", f"DEMO={demo}", script, flags=re.MULTILINE)
    script = re.sub(r"^purestep ", f"{command} ", script, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    records = {r["custom_id"]: r for r in map(json.loads, (tmp_path / "out.jsonl").open())}
    assert len(records["q1"]["response"]["body"]["choices"]) == 1
    assert len(records["q2"]["outputs"]) == 2
    assert records["q3"]["adapter"] == "shout"
    assert records["q3"]["error"] is None
    assert records["q4"]["error"]["code"] == "model_not_found"
    assert "exit code 1: some lines failed" in done.stdout
    assert "nothing was left to do" in done.stdout
    assert "left for KV" in done.stdout
