"""The page of the API is the sources', and says of every public name what a caller has to know."""

import ast
import re
from collections.abc import Iterator

import pytest

import purestep.engine
from purestep.engine.api_reference import (
    ELSEWHERE,
    GROUPS,
    ROOT,
    definition,
    exported,
    public_methods,
    reference,
    said_of,
)

PLACES = exported() | {name: place for place, names in ELSEWHERE.items() for name in names}
DTYPES = re.compile(r"\b(bool|u?int(8|32|64)|float(32|64))\b")


def functions() -> Iterator[tuple[str, ast.FunctionDef, str]]:
    for name, module in PLACES.items():
        node = definition(name, module)
        if isinstance(node, ast.FunctionDef):
            yield name, node, said_of(node, module)


def test_the_page_is_the_sources() -> None:
    """To renew it, `python -m purestep.engine.api_reference > engine/API.md`."""
    assert (ROOT / "engine" / "API.md").read_text() == reference()


def test_every_public_name_has_one_place() -> None:
    named = [name for names in GROUPS.values() for name in names]
    assert sorted(named) == sorted(purestep.engine.__all__)


@pytest.mark.parametrize("name", PLACES)
def test_every_name_says_what_it_is(name: str) -> None:
    module = PLACES[name]
    node = definition(name, module)
    parts = [node, *(public_methods(node) if isinstance(node, ast.ClassDef) else ())]
    for part in parts:
        assert len(said_of(part, module)) > 15, ast.unparse(part)[:80]


@pytest.mark.parametrize(("name", "node", "said"), [pytest.param(*f, id=f[0]) for f in functions()])
def test_every_function_says_what_it_raises(name: str, node: ast.FunctionDef, said: str) -> None:
    assert re.search(r"\bRaises\b", said), f"{name}: Raises ..., or Raises nothing"
    for part in ast.walk(node):
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call):
            assert ast.unparse(part.exc.func) in said, name
    if "ndarray" in ast.unparse(node.returns):
        assert re.search(r"\[\w", said), f"{name}: a shape, as in [H, W]"
        assert DTYPES.search(said), f"{name}: a type"


@pytest.mark.parametrize("name", PLACES)
def test_every_array_in_a_value_has_axes_and_a_type(name: str) -> None:
    node = definition(name, PLACES[name])
    file = ROOT / f"{PLACES[name].removeprefix('purestep.').replace('.', '/')}.py"
    lines = file.read_text().splitlines()
    for field in getattr(node, "body", ()):
        kind = ast.unparse(field.annotation) if isinstance(field, ast.AnnAssign) else ""
        if kind not in ("np.ndarray", "np.ndarray | None"):
            continue
        said = "\n".join(lines[field.lineno - 3 : field.lineno])
        said = lines[field.lineno - 1].partition("#")[2] or said  # behind it, or above
        assert re.search(r"_[A-Z0-9]+$", ast.unparse(field.target)) or "[" in said, said
        assert DTYPES.search(said), said
