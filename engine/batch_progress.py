"""What a batch run tells while it goes on: counts, a progress bar, metrics as JSON lines."""

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from purestep.state.plan import Outputs
from purestep.state.request import Completion


@dataclass(slots=True, kw_only=True)
class Counts:
    """Of one run. Lines count once, whatever their `n`."""

    done: int = 0  # lines with a result
    failed: int = 0  # lines with an error record
    skipped: int = 0  # lines that an earlier run had finished, with a result or an error record
    skipped_failed: int = 0  # with an error record
    prompt_tokens: int = 0  # of each line once
    cached_tokens: int = 0  # of them, found in the prefix cache
    output_tokens: int = 0
    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0

    @property
    def all_failed(self) -> int:
        """Lines of the output that are error records."""
        return self.failed + self.skipped_failed


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counts what happens, and tells of it. A context manager."""

    total: int | None  # lines of the input, where they were counted
    bar: bool
    metrics: Path | None
    metrics_seconds: float = 5.0
    counts: Counts = field(default_factory=Counts)
    started: float = field(default_factory=time.monotonic)
    _told: float = 0.0  # when the bar's figures were renewed
    _written: float = 0.0  # and the file's
    rows: int = 0  # of the last step
    active_adapters: int = 0
    _file: IO[str] | None = None
    _tqdm: Any = None

    def __enter__(self) -> "Progress":
        self._tqdm = tqdm(
            total=self.total, disable=not self.bar, unit="line", smoothing=0.1, file=sys.stderr
        )
        self._file = self.metrics.open("a") if self.metrics else None
        return self

    def __exit__(self, *_: object) -> None:
        self._tqdm.close()
        if self._file is not None:
            self._write(final=True)
            self._file.close()

    def skip(self, count: int = 1) -> None:
        """Lines that an earlier run had finished."""
        self.counts.skipped += count
        self._tqdm.update(count)

    def blank(self, count: int) -> None:
        """Lines that hold nothing."""
        self._tqdm.update(count)

    def end(self, *, failed: bool) -> None:
        """A line whose record is written."""
        self.counts.failed += failed
        self.counts.done += not failed
        self._tqdm.update()

    def sample(self, completion: Completion) -> None:
        """One finished sample of a line."""
        self.counts.output_tokens += len(completion.tokens)
        if completion.index == 0:
            self.counts.prompt_tokens += completion.num_prompt_tokens
            self.counts.cached_tokens += completion.num_cached_tokens

    def step(self, outputs: Outputs) -> None:
        """One step of the engine."""
        counts = self.counts
        counts.steps += 1
        counts.computed_tokens += outputs.num_tokens
        counts.preemptions += outputs.num_preempted
        self.rows, self.active_adapters = outputs.num_rows, outputs.num_active_adapters
        self.tell()

    def tell(self) -> None:
        """Renew the bar's figures and the file's, where it is time to."""
        now = time.monotonic()
        if self.bar and now - self._told > 0.5:
            self._told = now
            self._tqdm.set_postfix_str(self._line(), refresh=False)
        if self._file is not None and now - self._written > self.metrics_seconds:
            self._write(final=False)

    def _line(self) -> str:
        figures = self.figures()
        return (
            f"{figures['output_tokens_per_s']:.0f} tokens/s, {figures['rows']} rows, "
            f"{figures['active_adapters']} adapters, hits {figures['cache_hit_rate']:.0%}"
        )

    def figures(self) -> dict[str, Any]:
        """All that is known, as --metrics writes it: numbers, and None for a total not counted."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        counts = self.counts
        lines = counts.done + counts.failed
        return {
            "seconds": round(seconds, 3),
            **asdict(counts),
            "total": self.total,
            "requests_per_s": round(lines / seconds, 3),
            "output_tokens_per_s": round(counts.output_tokens / seconds, 3),
            "rows": self.rows,
            "active_adapters": self.active_adapters,
            "cache_hit_rate": round(counts.cached_tokens / max(counts.prompt_tokens, 1), 4),
        }

    def summary(self) -> str:
        """A line for people."""
        figures, counts = self.figures(), self.counts
        rates = f"{figures['output_tokens_per_s']:.1f} tokens/s, {figures['requests_per_s']:.2f}"
        return (
            f"{counts.done} lines done, {counts.failed} failed, {counts.skipped} finished before "
            f"({counts.skipped_failed} of them failed); {counts.output_tokens} tokens from "
            f"{counts.prompt_tokens} prompt tokens, {figures['cache_hit_rate']:.0%} of which were "
            f"cached, in {figures['seconds']:.1f} s: {rates} requests/s"
        )

    def _write(self, *, final: bool) -> None:
        self._written = time.monotonic()
        self._file.write(json.dumps(self.figures() | {"final": final}) + "\n")
        self._file.flush()
