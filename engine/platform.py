"""What this machine can do: devices, number formats, compilers, memory."""

import os
import shutil
import warnings
from pathlib import Path

import torch

from purestep.state.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def resolve_device(device: str) -> str:
    """ "cuda" where there is one, for "auto"; else what was asked for. Raises ConfigError."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: {error}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no CUDA device")
    return device


def resolve_dtype(dtype: str, device: str, stored: str) -> str:
    """The compute dtype; "auto" is the checkpoint's own where the device has units for it.

    Without them 16-bit products are emulated: a bfloat16 prefill was seen 11 times slower than
    float32 on an AVX2 CPU. Raises ConfigError.
    """
    if dtype in DTYPES:
        return dtype
    if dtype != "auto":
        raise ConfigError(f"dtype={dtype!r} must be 'auto' or one of {DTYPES}")
    if torch.device(device).type != "cpu":
        return stored if stored in DTYPES else "bfloat16"
    return "bfloat16" if stored == "bfloat16" and cpu_has_bf16() else "float32"


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; False where /proc/cpuinfo cannot tell."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def can_compile(device: str) -> bool:
    """Whether torch.compile can work; False, with one warning, on a CPU without a C++ compiler."""
    if torch.device(device).type != "cpu" or _cpp_compiler():
        return True
    warnings.warn(
        "compile=True, but no C++ compiler was found (g++, clang++ or $CXX): running eagerly",
        stacklevel=3,
    )
    return False


def _cpp_compiler() -> str | None:
    chosen = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [chosen] if chosen else ["g++", "clang++"])), None)


def available_bytes() -> int:
    """Host memory this process may still take, within its control group."""
    limits = [_meminfo_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such controller, or the word "max"
            continue
    return max(min(limits), 0)


def _meminfo_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
