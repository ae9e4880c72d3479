"""Triton kernels, imported by an op at its first launch, so that a CPU needs no triton."""

import importlib.util
import warnings
from functools import cache


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
