"""A batch run: a JSONL file in, a JSONL file out, whatever happens on the way.

Lines are read as they are needed, brought into an order by adapter and prompt inside a window, and
each record is written when the last sample of its line has finished. So records come in the order
of completion; `line` says where each belongs.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from purestep.engine.batch_files import DigestSet, Line, ResultFile, read_lines
from purestep.engine.batch_job import BatchJob, check_job
from purestep.engine.batch_progress import Counts, Progress
from purestep.engine.batch_records import RecordMaker, encoded, failed_record
from purestep.engine.batch_requests import request_of
from purestep.engine.batch_rows import Row, custom_id_of, read_object, row_of
from purestep.engine.dry_run import dry_step
from purestep.engine.generate import generate
from purestep.engine.program import Program
from purestep.state.engine import EngineState
from purestep.state.errors import BatchLineError, MediaError, RequestError
from purestep.state.processor_cache import empty_processor_cache
from purestep.state.request import Completion, FinishReason, Request

T = TypeVar("T")


class OpenLine(NamedTuple):
    """A line that has no record yet, and what it holds."""

    line: Line
    custom_id: str | None
    given: Mapping[str, Any]


def run_batch(program: Program, job: BatchJob, progress: Progress | None = None) -> Counts:
    """Run every line of `job.input` that `job.output` has no record of, and write its record.

    A line that cannot be run gets a record with an `error` and hurts no other. Returns the counts
    of this run. After an interrupt or a crash, the same call goes on where the last one ended.

    Raises BatchFileError before any change where the output does not belong to the input, or an
    adapter has the base model's name; OSError where a file cannot be read or written; with
    `strict`, BatchLineError. Lines that are finished by then are kept.
    """
    check_job(job)
    progress = progress or Progress(total=None, bar=False, metrics=None)
    with ResultFile(job.output, dry_run=job.dry_run) as results, progress:
        results.check_input(job.input, job.max_line_bytes)
        progress.counts.skipped_failed = results.num_failed
        lines = read_lines(job.input, job.max_line_bytes)
        opened = open_lines(job, lines, results, progress)
        for _ in run_lines(program, job, opened, results, progress):
            pass
    return progress.counts


class Sink(Protocol):
    """Where records go."""

    def write(self, line: Line, record: bytes, *, failed: bool) -> None:
        """Take one line's record."""


class Results(Sink, Protocol):
    """Where records go, and which lines had theirs before."""

    def finished(self, number: int) -> int:
        """Not 0 for a line that has a record."""


def open_lines(
    job: BatchJob, lines: Iterable[Line], results: Results, progress: Progress
) -> Iterator[OpenLine]:
    """The lines that have no record yet. Those that are no JSON, or have the `custom_id` of an
    earlier one, get theirs at once."""
    seen, before = DigestSet(), 0
    for line in lines:
        progress.blank(line.number - before - 1)
        before = line.number
        if (opened := open_line(job, line, seen, results, progress)) is not None:
            yield opened


def open_line(
    job: BatchJob, line: Line, seen: DigestSet, results: Results, progress: Progress
) -> OpenLine | None:
    """One of `open_lines`; `seen` has the ids of all lines before it."""
    finished = bool(results.finished(line.number))
    if finished:
        progress.skip()
    custom_id = None
    try:
        given = _object(job, line)
        custom_id = custom_id_of(given)
        is_new = custom_id is None or seen.add(custom_id)
        if not finished and not is_new:
            what = f"an earlier line has the custom_id {custom_id!r}"
            raise BatchLineError("duplicate_custom_id", what)
    except BatchLineError as error:
        if not finished:
            fail(job, results, progress, line, custom_id, error)
        return None
    return None if finished else OpenLine(line, custom_id, given)


def _object(job: BatchJob, line: Line) -> dict[str, Any]:
    if line.raw is None:
        limit = f"the line has {job.max_line_bytes} bytes or more (see --max-line-bytes)"
        raise BatchLineError("line_too_long", limit)
    return read_object(line.raw)


def fail(
    job: BatchJob,
    results: Sink,
    progress: Progress,
    line: Line,
    custom_id: str | None,
    error: Exception,
) -> None:
    """Write an error record; with `strict`, raise BatchLineError instead."""
    if not isinstance(error, BatchLineError):
        code = "media_invalid" if isinstance(error, MediaError) else "invalid_request"
        error = BatchLineError(code, str(error))
    if job.strict:
        where = f"{job.input}, line {line.number}: {error}"
        raise BatchLineError(error.code, where, error.status) from error
    record = failed_record(line.number, line.digest, custom_id, error, dry_run=job.dry_run)
    results.write(line, encoded(record), failed=True)
    progress.end(failed=True)


def run_lines(
    program: Program,
    job: BatchJob,
    lines: Iterable[OpenLine],
    results: Sink,
    progress: Progress,
    state: EngineState | None = None,
) -> Generator[None, None, EngineState]:
    """Run lines to their end, and write each one's record; yields now and then. `state` and the
    generator's value are as `generate` has them."""
    maker = RecordMaker(
        tokens=program.config.tokens,
        created=int(job.input.stat().st_mtime),
        fingerprint=program.config.weights[:16],
        dry_run=job.dry_run,
    )
    run = _Run(program=program, job=job, results=results, progress=progress, maker=maker)
    completions = generate(
        program,
        run.requests(lines),
        adapters=job.adapters,
        resolver=job.resolver,
        on_step=progress.step,
        advance=dry_step if job.dry_run else None,
        state=state,
    )
    while True:
        try:
            completion = next(completions)
        except StopIteration as end:
            return end.value
        run.collect(completion)
        yield


@dataclass(frozen=True, slots=True)
class _Pending:
    """A line in the engine, without the tensors of its pictures."""

    line: Line  # without its bytes
    row: Row  # without its prompt, which may hold a picture's bytes
    tokens: Sequence[int]  # of its prompt
    num_samples: int
    samples: dict[int, Completion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The two ends of a run: lines to requests, completions to records."""

    program: Program
    job: BatchJob
    results: Sink
    progress: Progress
    maker: RecordMaker
    pending: dict[str, _Pending] = field(default_factory=dict)  # by request id

    def requests(self, lines: Iterable[OpenLine]) -> Iterator[Request]:
        """The requests of the lines, in the order of their windows; bad ones are recorded."""
        cache = empty_processor_cache(self.job.image_cache_bytes)
        for window in windows(self.job, self._rows(lines), lambda item: item[0]):
            window.sort(key=lambda item: item[1].locality)
            window.reverse()
            while window:
                line, row = window.pop()  # what has been asked for is held no longer
                try:
                    cache, request = request_of(
                        self.program, cache, self.job, f"line-{line.number}", row
                    )
                except (BatchLineError, RequestError) as error:
                    self._fail(line, row.custom_id, error)
                    continue
                self.pending[request.id] = _Pending(
                    line=replace(line, raw=b""),
                    row=replace(row, prompt=""),
                    tokens=request.tokens,
                    num_samples=request.sampling.n,
                )
                yield request

    def _rows(self, lines: Iterable[OpenLine]) -> Iterator[tuple[Line, Row]]:
        for line, custom_id, given in lines:
            try:
                row = row_of(given, self.job.base_names)
            except BatchLineError as error:
                self._fail(line, custom_id, error)
                continue
            yield line, row

    def collect(self, completion: Completion) -> None:
        """Take one sample; write the line's record with its last."""
        if completion.id not in self.pending:
            return  # another sample has failed the line
        pending = self.pending[completion.id]
        self.progress.sample(completion)
        if (error := failure_of(completion, self.program)) is not None:
            del self.pending[completion.id]
            self._fail(pending.line, pending.row.custom_id, error)
            return
        pending.samples[completion.index] = completion
        if len(pending.samples) < pending.num_samples:
            return
        del self.pending[completion.id]
        line, row = pending.line, pending.row
        samples = [sample for _, sample in sorted(pending.samples.items())]
        record = self.maker.done(line.number, line.digest, row, pending.tokens, samples)
        self.results.write(line, encoded(record), failed=False)
        self.progress.end(failed=False)

    def _fail(self, line: Line, custom_id: str | None, error: Exception) -> None:
        fail(self.job, self.results, self.progress, line, custom_id, error)


def windows(job: BatchJob, items: Iterable[T], line_of: Callable[[T], Line]) -> Iterator[list[T]]:
    """Items in lists of up to `window` lines, which end early where they hold `window_bytes`."""
    window: list[T] = []
    nbytes = 0
    for item in items:
        window.append(item)
        nbytes += len(line_of(item).raw or b"")
        if len(window) == job.window or nbytes >= job.window_bytes:
            yield window
            window, nbytes = [], 0
    if window:
        yield window


def failure_of(completion: Completion, program: Program) -> BatchLineError | None:
    """Why a completion is no result; None where it is one."""
    if completion.finish_reason == FinishReason.ERROR:
        return BatchLineError("request_failed", completion.error or "")
    if completion.finish_reason == FinishReason.CAPACITY:
        config = program.config
        return BatchLineError(
            "out_of_kv_memory",
            f"{completion.num_prompt_tokens} prompt and {len(completion.tokens)} generated tokens "
            f"fill all num_blocks={config.num_blocks} blocks of {config.block_size} tokens",
        )
    return None
