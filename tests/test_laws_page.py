"""The page of laws names every law, and nothing that is not there."""

import ast
import re
from pathlib import Path

from purestep.simulation import laws

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "tests" / "LAWS.md").read_text()


def functions(file: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}


def test_every_law_stands_on_the_page_once() -> None:
    known = {name for name in vars(laws) if name.startswith("law_")}
    named = re.findall(r"\| `(law_\w+)` \|", PAGE)
    assert sorted(named) == sorted(known)
    assert len(known) > 20


def test_every_law_is_asked_by_the_simulation() -> None:
    """By the machine, by the runs of bounded wait, or by what these two call."""
    names = ("laws", "machine", "fairness")
    source = "\n".join((ROOT / "tests" / "simulation" / f"{n}.py").read_text() for n in names)
    for law in re.findall(r"`(law_\w+)`", PAGE):
        assert re.search(rf"(?<!def )\b{law}\(", source), law


def test_every_function_and_test_on_the_page_exists() -> None:
    for name, file in re.findall(r"`(check_\w+)` in `([\w/]+\.py)`", PAGE):
        assert name in functions(ROOT / file), name
    for name in re.findall(r"`(check_\w+)` \|", PAGE):
        assert name in functions(ROOT / "tests" / "simulation" / "laws.py"), name
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    for file, name in named:
        assert name in functions(ROOT / file), f"{file}::{name}"
    for file in re.findall(r"`((?:tests|state|engine)/[\w/]+\.py)`", PAGE):
        assert (ROOT / file).exists(), file
