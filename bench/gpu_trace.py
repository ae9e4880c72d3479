"""A profile of a GPU: what runs in a step, for how long the device idles in and between them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

FIRST, LAST = "_add_norm", "_join"  # the kernels a step begins and ends with, but for small ones


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the traced time in which the device did nothing."""

    between: float  # behind one step's last kernel and before the next one's first
    within: float  # between kernels of one step


def trace(advance: Callable[[], Any], steps: int, to: Path) -> Idle:
    """Profile calls of `advance`; writes a table and a picture."""
    activities = list(torch.profiler.supported_activities())
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            advance()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: e.time_range.start)
    idle = idle_of([(e.name, e.time_range.start, e.time_range.end) for e in kernels])
    span = max(e.time_range.end for e in kernels) - kernels[0].time_range.start
    totals: dict[str, list[float]] = {}
    for event in kernels:
        totals.setdefault(event.name[:60], []).append(event.time_range.elapsed_us())
    lines = [
        f"{to.name}: idle {idle.between:.4f} between steps, {idle.within:.4f} within, "
        f"step {span / steps:.0f} us"
    ]
    lines += [
        f"{sum(times) / steps:9.1f} us, {len(times) / steps:.1f} x {median(times):.2f} {name}"
        for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))
    ]
    to.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:18]), flush=True)
    draw(kernels, to)
    return idle


def idle_of(events: list[tuple[str, float, float]]) -> Idle:
    """Of (name, start, end) in order of start: the gaps that nothing covers. Copies count as work,
    but the gaps around those that lie between two steps do not."""
    begin, end = events[0][1], events[0][1]
    between = within = 0.0
    ended = False  # whether the last step's last kernel lies behind
    for name, start, stop in events:
        gap = max(0.0, start - end)
        between, within = (between + gap, within) if ended else (between, within + gap)
        end = max(end, stop)
        ended = (ended and not name.startswith(FIRST)) or name.startswith(LAST)
    return Idle(between / (end - begin), within / (end - begin))


def draw(kernels: list[Any], to: Path) -> None:
    """A timeline of two steps' kernels, a lane for each kind of kernel."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is not installed: no picture")
        return
    first = min(e.time_range.start for e in kernels)
    span = max(e.time_range.end for e in kernels) - first
    shown = [e for e in kernels if e.time_range.start < first + span / 10]
    lanes = {name: i for i, name in enumerate(sorted({e.name[:30] for e in shown}))}
    figure, axes = plt.subplots(figsize=(14, 1 + 0.3 * len(lanes)))
    for event in shown:
        start = (event.time_range.start - first) / 1e3
        axes.broken_barh(
            [(start, event.time_range.elapsed_us() / 1e3)], (lanes[event.name[:30]] - 0.4, 0.8)
        )
    axes.set_yticks(range(len(lanes)), [*lanes], fontsize=7)
    axes.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(to.with_suffix(".png"), dpi=90)
    plt.close(figure)
