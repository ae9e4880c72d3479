"""The command line: `purestep batch`, `plan`, `demo-model`, or `python -m purestep.engine`."""

import argparse
import warnings
from collections.abc import Sequence

from purestep.engine.cli_batch import add_batch
from purestep.engine.cli_plan import add_plan
from purestep.engine.demo_model import add_demo_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    args = make_parser().parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    return args.run(args)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="purestep",
        description="Run batch files, plan memory, get a demo model.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_batch(commands)
    add_plan(commands)
    add_demo_model(commands)
    return parser
