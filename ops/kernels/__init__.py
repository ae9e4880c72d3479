"""Triton kernels, imported by an op at its first launch, so that a CPU needs no triton."""

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

from purestep.state.errors import KernelError

Op = TypeVar("Op", bound=Callable[..., Any])


@cache
def usable() -> bool:
    """Whether triton is there; False, with one warning, where it is not."""
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn(
        "a GPU, but no triton: its work is done by plain torch ops, slowly; install triton",
        stacklevel=3,
    )
    return False


def named(name: str) -> Callable[[Op], Op]:
    """For a function that launches kernels as the op `name`: where one cannot be compiled, or asks
    for more of the device than it has, KernelError names the op and what it was called with."""

    def decorate(op: Op) -> Op:
        @wraps(op)
        def launching(*args: Any, **kwargs: Any) -> Any:
            try:
                return op(*args, **kwargs)
            except Exception as error:
                if not _is_triton(error):
                    raise
                given = inspect.signature(op).bind(*args, **kwargs).arguments
                told = ", ".join(f"{key}={_shown(value)}" for key, value in given.items())
                raise KernelError(f"{name}: no kernel for {told}: {error}") from error

        return launching

    return decorate


def _is_triton(error: Exception) -> bool:
    own = any(kind.__module__.partition(".")[0] == "triton" for kind in type(error).__mro__)
    return own or (type(error) is RuntimeError and "PassManager" in str(error))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple):  # of tensors, as deltas are
        return f"({', '.join(map(_shown, value))})"
    return repr(value)
