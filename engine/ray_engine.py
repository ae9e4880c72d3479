"""What a batch run on Ray does away from its driver: it reads lines, and runs windows of them.

A window and a message cross Ray Data pickled, each in one cell, so that none is split.
"""

import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch

from purestep.engine.batch import OpenLine, fail, open_line, run_lines
from purestep.engine.batch_files import DigestSet, Line, read_lines
from purestep.engine.batch_job import BatchJob
from purestep.engine.batch_progress import Progress
from purestep.engine.batch_rows import custom_id_of, read_object
from purestep.engine.dry_run import dry_program
from purestep.engine.program import load_program
from purestep.state.engine import EngineState
from purestep.state.errors import BatchLineError, PurestepError

CELL = "cell"  # the column of windows and messages
LEAST_TOLD = 16  # lines that have ended, when they are told before their window has
MOST_MESSAGES = 8  # of a window, before its last: Ray Data keeps some KB of each while a run lasts


class Ended(NamedTuple):
    """A line, without its bytes, and its record."""

    line: Line
    record: bytes
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What an engine gets at a time: lines that are known to be JSON, and records of others."""

    lines: list[Line]
    ended: list[Ended] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What an engine tells: lines that ended, and what it did since its last message.

    The last message of a window has all lines of it, those of earlier ones, too."""

    engine: str
    ended: list[Ended] = field(default_factory=list)
    spent: dict[str, int] = field(default_factory=dict)  # fields of Counts
    rows: int = 0
    active_adapters: int = 0
    refusal: str = ""  # why the engine could not be made


@dataclass(slots=True)
class Records:
    """Records in memory, in place of a ResultFile."""

    ended: list[Ended] = field(default_factory=list)
    finished_N: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # by number - 1

    def write(self, line: Line, record: bytes, *, failed: bool) -> None:
        """Take one line's record."""
        self.ended.append(Ended(replace(line, raw=None), record, failed))

    def finished(self, number: int) -> int:
        """1 for a line that had its record before, else 0."""
        return int(number <= len(self.finished_N) and self.finished_N[number - 1])


def window_size(left: int, *, most: int, engines: int, rows: int) -> int:
    """How many of the lines that are left go into the next window.

    A quarter of an engine's share, so that windows shrink towards the end and no engine is idle
    while another has lines to spare; but no fewer than `rows`, which fill an engine."""
    return min(most, max(rows, -(-left // (4 * engines))))


def message_size(num_lines: int) -> int:
    """How many lines of a window are told at a time."""
    return max(LEAST_TOLD, -(-num_lines // MOST_MESSAGES))


def read_windows(
    job: BatchJob, finished_bits: np.ndarray, num_open: int, *, engines: int, rows: int
) -> Iterator[Window]:
    """All lines that have no record yet, in the order of the file.

    `finished_bits` is as `ResultFile.finished_bits` gives it; `num_open` lines, or fewer, are left.
    A window of `window_bytes` ends early. Equal arguments give equal windows."""
    job = replace(job, strict=False)  # the driver stops the run
    records = Records(finished_N=np.unpackbits(finished_bits).astype(bool))
    seen = DigestSet()
    lines: list[Line] = []
    nbytes = 0
    with Progress(total=None, bar=False, metrics=None) as progress:
        for line in read_lines(job.input, job.max_line_bytes):
            if open_line(job, line, seen, records, progress) is not None:
                lines.append(line)
                nbytes += len(line.raw or b"")
            count = len(lines) + len(records.ended)
            size = window_size(num_open, most=job.window, engines=engines, rows=rows)
            if count >= size or nbytes >= job.window_bytes:
                yield Window(lines=lines, ended=records.ended)
                num_open -= count
                lines, records.ended, nbytes = [], [], 0
    if lines or records.ended:
        yield Window(lines=lines, ended=records.ended)


class BatchActor:
    """An engine of its own, for `map_batches`: `answer(run, table)` makes the new table of one, or
    several of it. Its state lasts from window to window, with adapters, caches and graphs."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        job: BatchJob,
        threads: int,
        answer: Callable[[Callable[[Window], Iterator[Message]], Any], Any],
    ) -> None:
        torch.set_num_threads(threads)
        self.job = replace(job, strict=False)
        self.answer, self.name, self.refusal = answer, uuid4().hex, ""
        self.state: EngineState | None = None
        try:
            self.program = (dry_program if job.dry_run else load_program)(model, **options)
        except PurestepError as error:  # told as a value: of an actor's error Ray keeps its text
            self.refusal = str(error)

    def __call__(self, table: Any) -> Any:
        return self.answer(self.run, table)

    def run(self, window: Window) -> Iterator[Message]:
        """Messages while a window runs.

        How many there are depends on the number of its lines alone: where Ray runs it once more,
        because the actor died, the driver does not get those again that it had already, whatever
        is in them now, but it gets the last one, with all lines."""
        if self.refusal:
            yield Message(engine=self.name, refusal=self.refusal)
            return
        size = message_size(len(window.lines) + len(window.ended))
        records, told = Records(list(window.ended)), 0
        with Progress(total=None, bar=False, metrics=None) as progress:
            lines = self._opened(window.lines, records, progress)
            steps = run_lines(self.program, self.job, lines, records, progress, self.state)
            self.state = None  # spent, should this fail
            for _ in self._kept(steps):
                if len(records.ended) - told > size:
                    part = records.ended[told : told + size]
                    told += size
                    yield self._message(part, progress)
            while len(records.ended) - told > size:
                told += size
                yield self._message([], progress)
        yield self._message(records.ended, progress)

    def _opened(
        self, lines: list[Line], records: Records, progress: Progress
    ) -> Iterator[OpenLine]:
        for line in lines:
            try:
                given = read_object(line.raw or b"")
                yield OpenLine(line, custom_id_of(given), given)
            except BatchLineError as error:
                fail(self.job, records, progress, line, None, error)

    def _kept(self, steps: Generator[None, None, EngineState]) -> Iterator[None]:
        self.state = yield from steps

    def _message(self, ended: list[Ended], progress: Progress) -> Message:
        spent, progress.counts = asdict(progress.counts), type(progress.counts)()
        return Message(
            engine=self.name,
            ended=ended,
            spent=spent,
            rows=progress.rows,
            active_adapters=progress.active_adapters,
        )


def packed(value: Window | Message) -> dict[str, list[bytes]]:
    """A batch of one row."""
    return {CELL: [pickle.dumps(value)]}


def unpacked(table: Any) -> list[Any]:
    """The windows or messages of a pyarrow Table."""
    return [pickle.loads(cell.as_py()) for cell in table[CELL]]
