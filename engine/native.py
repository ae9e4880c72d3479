"""Compiles the C forms of the ops (ops/native/cpu.c) for this machine, once, and has them used.

Nothing is compiled at import, nothing has to be: without a compiler everything runs in plain torch.
"""

import atexit
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

from blake3 import blake3

from purestep.ops import native

SOURCE = Path(native.__file__).with_name("cpu.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=gnu11", "-fPIC", "-fopenmp")
SWITCH = "PURESTEP_NATIVE"  # 0: plain torch


@cache
def use_native() -> bool:
    """Whether the C forms are in use, which they are from the first call on if they can be.

    False, with one warning that says why, where compiling fails; without one where it was asked for
    or where this is not Linux.
    """
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux":
        return False
    try:
        _load(build())
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        warnings.warn(
            f"no C forms of the ops, plain torch runs instead, at about half the speed: {why} "
            f"({SWITCH}=0 in the environment takes this warning away)",
            stacklevel=4,
        )
    return native.loaded()


def build() -> Path:
    """The compiled library, from the user's cache directory if it is there. Raises OSError or
    SubprocessError."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    # A library for another machine's CPU may lie in the same home directory.
    words = [SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _cpu().encode()]
    name = blake3(b"".join(blake3(word).digest() for word in words)).hexdigest(length=16)
    target = cache_dir() / f"cpu-{name}.so"
    if not target.exists():
        _compile(compiler, target)
    return target


def _load(library: Path) -> None:
    """Have a library used. One that cannot be loaded (a power cut may leave an empty file under its
    name) is compiled anew, once."""
    try:
        native.load(str(library))
    except OSError:
        _compile(_compiler(), library)
        native.load(str(library))


def cache_dir() -> Path:
    """A directory of the user's that can be written, or else a new one for this process, which
    takes it away at its end."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "purestep" / "native"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home directory
        pass
    folder = Path(tempfile.mkdtemp(prefix="purestep-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(compiler: str, target: Path) -> None:
    """Linked without an OpenMP library: the one that torch has loaded is used, with its threads."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole, linked = Path(folder) / "cpu.o", Path(folder) / "cpu.so"
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(whole)],
            [compiler, "-shared", str(whole), "-o", str(linked), "-lm"],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        linked.replace(target)  # at once, whoever else compiles


def _compiler() -> str:
    """$CC, or the first that is found. Raises OSError."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "cc", "clang"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise FileNotFoundError(f"no C compiler was found ({', '.join(names)})")
    return found


def _cpu() -> str:
    """What a library for this machine may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {flags}"
