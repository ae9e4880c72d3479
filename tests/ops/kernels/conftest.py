"""Loads the interpreter, where it is needed, before any test imports a kernel."""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from tests.ops.kernels import interpreter  # noqa: F401
