"""The README's command line reference, made from the parser; run this module to print it.

It does not take argparse's own help, whose layout changes with Python.
"""

import argparse
from collections.abc import Iterator

from purestep.engine.cli import make_parser
from purestep.engine.cli_batch import EXIT_CODES


def reference() -> str:
    """Markdown: a table of arguments and options for each command, and the exit codes."""
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parts = []
    for name, command in commands.choices.items():
        rows = list(_rows(command))
        given = [a.metavar for a in command._actions if not a.option_strings]
        words = " ".join(["purestep", name, *(["[options]"] if rows else []), *given])
        parts += [f"**`{words}`**", "", command.description, ""]
        if rows:
            parts += ["| option | default | |", "|---|---|---|", *rows, ""]
    parts += ["| exit code | |", "|---|---|"]
    parts += [f"| {code} | {what} |" for code, what in EXIT_CODES.items()]
    return "\n".join(parts)


def _rows(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = f" {action.metavar}" if action.metavar and action.option_strings else ""
        named = ", ".join(f"`{option}{value}`" for option in action.option_strings)
        default = "" if action.default in (None, [], argparse.SUPPRESS) else action.default
        default = "" if default is False else default
        shown = action.help or ""
        yield f"| {named or f'`{action.metavar}`'} | {default} | {shown.replace('|', '&#124;')} |"


if __name__ == "__main__":
    print(reference())
