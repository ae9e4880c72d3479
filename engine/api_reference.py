"""The page of the public API, `engine/API.md`, made from the sources; run this module to print it.

Signatures, fields and their comments stand there as the files have them, so nothing is said twice.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent  # where `engine/` lies, in a checkout and once installed
WIDTH = 100
GROUPS = {
    "A program and a state": (
        "load_program", "make_program", "Program", "Config", "init", "EngineState", "HostState",
        "DeviceState",
    ),
    "Requests": (
        "prepare", "prepare_cached", "Request", "SamplingParams", "for_adapters", "submit", "abort",
        "branch", "progress",
    ),
    "Steps": ("step", "step_ahead", "recover", "Outputs", "generate", "warm_up"),
    "Results": ("Completion", "FinishReason", "logprob_dicts", "prompt_logprob_dicts"),
    "The parts of a step": (
        "schedule", "plan_ahead", "execute", "launch", "wait", "commit", "StepPlan", "StepResult",
        "BatchDescriptor", "Policy", "Order", "fcfs", "by_priority",
    ),
    "Adapters": (
        "load_adapter", "load_adapter_tensors", "register_adapter", "unload_adapter", "pin_adapter",
        "unpin_adapter", "list_adapters", "AdapterStatus", "deliver", "AdapterLoaded",
        "AdapterFailed", "Loader", "Resolver", "folder_resolver",
    ),
    "Images": (
        "read_picture", "PictureOptions", "Feature", "empty_processor_cache", "ProcessorCache",
    ),
    "States as values": (
        "digest", "fork", "snapshot", "restore", "begin_recording", "record", "replay", "flush",
        "with_weights", "adopt",
    ),
    "Batch files": ("run_batch", "BatchJob", "ray_processor", "Workers"),
}  # fmt: skip
ELSEWHERE = {  # what only some need, by the module it is imported from
    "purestep.engine.batch_media": ("MediaRule",),
    "purestep.engine.batch_progress": ("Progress", "Counts"),
    "purestep.engine.dry_run": ("dry_program", "dry_step"),
    "purestep.engine.memory_plan": ("read_model_config", "read_tower", "Wishes", "memory_plan"),
    "purestep.engine.memory_measure": ("measure",),
    "purestep.engine.ray_batch": ("run_batch_ray",),
    "purestep.engine.lm_eval": ("PurestepLM",),
}
HEAD = """# API

<!-- Made by `python -m purestep.engine.api_reference`; change the sources, not this page. -->

What `purestep.engine` exports, then what lies in modules of its own, then all errors. Capitals at
the end of a name are its axes: `tokens_T` has T entries, `x_TD` is T by D; arrays are numpy's and
read-only, tensors torch's. A function that raises has changed nothing, unless it says so. What only
a wrong type of argument brings about (TypeError, AttributeError) is not listed.
"""


def reference() -> str:
    """The page as Markdown."""
    parts = [HEAD, *_contents()]
    modules = exported()
    for title, names in GROUPS.items():
        parts += [f"## {title}", "", *(line for n in names for line in _entry(n, modules[n]))]
    parts += ["## In modules of their own", ""]
    for module, names in ELSEWHERE.items():
        parts += [line for name in names for line in _entry(name, module, shown=module)]
    parts += ["## Errors", "", "All in `purestep.state.errors`.", "", "| error | is a | when |"]
    parts += ["|---|---|---|", *_errors()]
    return "\n".join(parts) + "\n"


def exported() -> dict[str, str]:
    """The module of each name in `purestep.engine.__all__`."""
    tree = ast.parse((ROOT / "engine" / "__init__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def definition(name: str, module: str) -> ast.stmt:
    """The statement that defines a public name."""
    body = _parsed(module)[1].body
    return next(node for node in body if name in _names(node))


@cache
def _parsed(module: str) -> tuple[list[str], ast.Module]:
    """(lines, tree) of a module of purestep."""
    text = (ROOT / f"{module.removeprefix('purestep.').replace('.', '/')}.py").read_text()
    return text.splitlines(), ast.parse(text)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()


def _contents() -> Iterator[str]:
    for title, names in GROUPS.items():
        yield f"* {title}: " + ", ".join(f"[`{name}`](#{name.lower()})" for name in names)
    yield "* Elsewhere: " + ", ".join(
        f"[`{name}`](#{name.lower()})" for names in ELSEWHERE.values() for name in names
    )
    yield ""


def _entry(name: str, module: str, shown: str = "") -> Iterator[str]:
    """One name's section."""
    node = definition(name, module)
    place = f"{module.removeprefix('purestep.').replace('.', '/')}.py"
    yield from (f"### {name}", "")
    yield "```python"
    if shown:
        yield from (f"from {shown} import {name}", "", "")
    if isinstance(node, ast.FunctionDef):
        yield from signature(node)
    elif isinstance(node, ast.ClassDef):
        yield from _fields(node, module)
    else:
        yield ast.unparse(node)
    yield from ("```", "", said_of(node, module), "")
    if isinstance(node, ast.ClassDef):
        for method in public_methods(node):
            yield from ("```python", *signature(method, of=name), "```", "")
            yield from (said_of(method, module), "")
    yield from (f"[`{place}`](../{place})", "")


def signature(node: ast.FunctionDef, of: str = "") -> list[str]:
    """A function's first line; of one that is too long a line for each argument."""
    args, marks = node.args, [ast.unparse(mark) for mark in node.decorator_list]
    head = f"{of}.{node.name}" if of else node.name
    head = of if node.name == "__init__" else head
    result = f" -> {_type(node.returns)}" if node.returns and head != of else ""
    if "property" in marks:
        return [f"{head}{result.replace(' ->', ':')}"]
    given = args.args[1:] if of else args.args
    words = [_argument(a, None) for a in given]
    for place, default in enumerate(reversed(args.defaults), start=1):
        words[-place] = _argument(given[-place], default)
    if args.vararg:
        words.append("*" + _argument(args.vararg, None))
    elif args.kwonlyargs:
        words.append("*")
    words += [_argument(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        words.append("**" + _argument(args.kwarg, None))
    line = f"{head}({', '.join(words)}){result}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{head}(", *(f"    {word}," for word in words), f"){result}"]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {_type(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default else "")


def _type(annotation: ast.expr) -> str:
    is_text = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return annotation.value if is_text else ast.unparse(annotation)


def _fields(node: ast.ClassDef, module: str) -> Iterator[str]:
    """A class as its file begins it: its fields with their comments, else how it is made."""
    bases = [ast.unparse(base) for base in node.bases]
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign | ast.Assign)]
    fields = [part for part in fields if not _target(part).startswith("_")]
    if not fields:
        made = (part for part in node.body if isinstance(part, ast.FunctionDef))
        made = [part for part in made if part.name == "__init__"]
        yield from (line for part in made for line in signature(part, of=node.name))
        return
    yield f"class {node.name}" + (f"({', '.join(bases)})" if bases else "") + ":"
    lines, _ = _parsed(module)
    first, last = fields[0].lineno - 1, fields[-1].end_lineno or fields[-1].lineno
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    while last < len(lines) and lines[last].strip().startswith("#"):
        last += 1
    yield from textwrap.indent(textwrap.dedent("\n".join(lines[first:last])), "    ").split("\n")


def _target(field: ast.AnnAssign | ast.Assign) -> str:
    return ast.unparse(field.target if isinstance(field, ast.AnnAssign) else field.targets[0])


def public_methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            yield part


def said_of(node: ast.stmt, module: str) -> str:
    """A docstring; of an alias the string behind it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return ast.get_docstring(node) or ""
    body = _parsed(module)[1].body
    behind = body[body.index(node) + 1]
    is_text = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
    return inspect.cleandoc(behind.value.value) if is_text else ""


def _errors() -> Iterator[str]:
    for node in _parsed("purestep.state.errors")[1].body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            said = " ".join((ast.get_docstring(node) or "").split())
            yield f"| `{node.name}` | {bases} | {said} |"


if __name__ == "__main__":
    print(reference(), end="")
