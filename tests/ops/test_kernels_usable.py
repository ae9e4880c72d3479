"""A GPU without triton falls back to plain torch, and says so once."""

import importlib.util

import pytest

from purestep.ops import kernels


def test_one_warning_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kernels.usable.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no triton") as caught:
            found = [kernels.usable() for _ in range(2)]
        assert found == [False, False]
        assert len(caught) == 1
    finally:
        kernels.usable.cache_clear()
