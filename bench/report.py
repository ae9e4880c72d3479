"""What every benchmark writes: a table to read and, with --json, one JSON object a line."""

import argparse
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "peft", "purestep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number, and a peer's where there is one."""

    figure: str  # bench/case/dtype
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    lower_is_better: bool = False
    notes: dict[str, Any] = field(default_factory=dict)  # sizes, threads and the like

    @property
    def ratio(self) -> float | None:
        """Above 1 where purestep is better than the peer."""
        if not self.peer_value or not self.value:
            return None
        ratio = self.value / self.peer_value
        return 1 / ratio if self.lower_is_better else ratio


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options of every benchmark."""
    args = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("--json", type=Path, metavar="FILE", help="also write one JSON object a line")
    args.add_argument(
        "--smoke", action="store_true", help="a tiny random model: seconds, anywhere; numbers void"
    )
    return args


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def figures_of(
    name: str, runs: dict[str, list[float]], peers: dict[str, str], unit: str, **notes: Any
) -> list[Figure]:
    """Medians of the rounds of each case `runs` holds under its own name and its peer's."""
    return [
        Figure(
            figure=name.format(case=case),
            value=median(runs[case]),
            unit=unit,
            peer=peer if peer in runs else None,
            peer_value=median(runs[peer]) if peer in runs else None,
            notes=notes,
        )
        for case, peer in peers.items()
        if case in runs
    ]


def report(figures: Iterable[Figure], to: Path | None) -> None:
    """Print the table; write the file."""
    figures = tuple(figures)
    rows = [("figure", "value", "unit", "peer", "peer's value", "ratio")]
    for it in figures:
        peer = "" if it.peer_value is None else f"{it.peer_value:.2f}"
        ratio = "" if it.ratio is None else f"{it.ratio:.2f}"
        rows.append((it.figure, f"{it.value:.2f}", it.unit, it.peer or "", peer, ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    save(figures, to)


def save(figures: Iterable[Figure], to: Path | None) -> None:
    """Write the file, if there is to be one."""
    lines = []
    for it in figures:
        known = {k: v for k, v in asdict(it).items() if v is not None and k != "notes"}
        if it.ratio is not None:
            known["ratio"] = it.ratio
        lines.append(json.dumps(known | it.notes | stamp()))
    if to is not None:
        to.write_text("".join(f"{line}\n" for line in lines))


def stamp() -> dict[str, Any]:
    """When and with what a number was measured."""
    versions = {name: installed(name) for name in PACKAGES}
    return {
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version()}
        | {name: found for name, found in versions.items() if found},
    }
