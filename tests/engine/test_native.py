"""Compiling the C forms: once, in the user's cache; without them one warning and plain torch."""

import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from purestep.engine import init, native
from purestep.ops import native as forms
from tests.engine.tiny import prompt, request, run, tiny_program
from tests.ops.forms import form


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    """Nothing is decided yet; and afterwards all is as it was."""
    with form("torch"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.delenv(native.SWITCH, raising=False)
        native.use_native.cache_clear()
        yield
        monkeypatch.undo()
    native.use_native.cache_clear()


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("gcc", "cc", "clang"))), reason="needs a C compiler"
)


@needs_compiler
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = native.build()
    (library,) = (file for file in cache.rglob("*") if file.is_file())
    assert first == library == native.build()
    monkeypatch.setattr(native, "_compile", None)  # it would raise if it were called
    assert native.use_native()
    assert forms.loaded()
    assert tiny_program().fused


@needs_compiler
def test_other_flags_are_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.build()
    plain = ("-O1", *(flag for flag in native.FLAGS if flag not in ("-O3", "-march=native")))
    monkeypatch.setattr(native, "FLAGS", plain)
    assert native.build() != first


def test_the_switch_asks_for_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = tiny_program()
    assert not program.fused
    assert not forms.loaded()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_one_warning_and_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    """None at all, or one that fails."""
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(UserWarning, match="no C forms of the ops.*" + compiler) as caught:
        plain, _ = tiny_program(), tiny_program()
    assert len(caught) == 1
    assert not plain.fused
    _, got = run(plain, init(plain), [request("x", prompt(1, 5))])
    monkeypatch.delenv("CC")
    native.use_native.cache_clear()
    usual = tiny_program()
    _, want = run(usual, init(usual), [request("x", prompt(1, 5))])
    assert got["x"].tokens.tolist() == want["x"].tokens.tolist()


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = native.cache_dir()
    assert folder.is_dir()
    assert tmp_path not in folder.parents


def test_a_cache_of_one_process_leaves_with_it(tmp_path: Path) -> None:
    """Also where a user has no home at all, as in a container."""
    (tmp_path / "file").touch()
    (tmp_path / "new").mkdir()
    code = """
        import pathlib
        from purestep.engine import native
        def homeless(): raise RuntimeError("Could not determine home directory.")
        print(native.cache_dir())
        pathlib.Path.home = homeless
        native.os.environ.pop("XDG_CACHE_HOME")
        print(native.cache_dir())
    """
    places = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "new")}
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | places,
        capture_output=True,
        text=True,
        check=True,
    )
    folders = list(map(Path, told.stdout.split()))
    assert [folder.parent for folder in folders] == [tmp_path / "new"] * 2
    assert not list((tmp_path / "new").iterdir())


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"torn"])
def test_a_broken_library_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_compile", lambda _, target: target.write_bytes(content))
    library = native.build()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.use_native()
    assert library.read_bytes() != content


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_float32_is_fused_on_a_cpu(dtype: str) -> None:
    assert tiny_program(dtype=dtype).fused == (dtype == "float32")
    assert not tiny_program(dtype=dtype).graphs
