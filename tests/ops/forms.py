"""Both forms of an op on a CPU, C and plain torch, for the tests of its laws."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from purestep.engine.native import build
from purestep.ops import native


@contextmanager
def form(name: str) -> Iterator[None]:
    """The ops run in "C" (skips without a compiler) or in "torch"."""
    before = native.loaded()
    try:
        path = str(build()) if before or name == "C" else None
    except FileNotFoundError as error:  # a compiler that fails is a failed test
        pytest.skip(str(error))
    native.load(path if name == "C" else None)
    try:
        yield
    finally:
        native.load(path if before else None)


@pytest.fixture(params=["C", "torch"], autouse=True, scope="module")
def both_forms(request: pytest.FixtureRequest) -> Iterator[None]:
    """Imported by a test file: each of its tests runs in both forms."""
    with form(request.param):
        yield
