"""Batch runs over several GPUs or machines, on Ray (extra `purestep[ray]`).

`purestep batch --ray` reads lines on the driver as actors ask for them, at most two windows an
actor ahead, and writes records there; so a run is resumed, and bad lines are told, just as without
Ray. `ray_processor` is for a pipeline of one's own: a function from one Ray Dataset to another.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import ray
import torch

from purestep.engine.batch import OpenLine, Sink, fail, open_lines, run_lines, windows
from purestep.engine.batch_files import Line, ResultFile, read_lines
from purestep.engine.batch_job import BatchJob, check_job
from purestep.engine.batch_media import MediaRule
from purestep.engine.batch_progress import Counts, Progress
from purestep.engine.batch_rows import FIELDS, custom_id_of, read_object
from purestep.engine.dry_run import dry_program
from purestep.engine.loader import folder_resolver
from purestep.engine.program import load_program
from purestep.state.errors import BatchLineError

KNOWN = {"method", "url", "body", *FIELDS["plain"]}
AHEAD = 2  # windows an actor has at a time, so that it never waits for the driver
TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens", "steps", "computed_tokens",
          "preemptions")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """How many actors, and what each has. On a CPU torch takes `num_cpus` threads."""

    count: int = 1
    num_cpus: int = 1
    num_gpus: float = 0


@dataclass(slots=True)
class Records:
    """A sink in memory: (line, record, failed)."""

    found: list[tuple[Line, bytes, bool]] = field(default_factory=list)

    def write(self, line: Line, record: bytes, *, failed: bool) -> None:
        """Take one line's record."""
        self.found.append((replace(line, raw=b""), record, failed))


class BatchActor:
    """An engine of its own, and the lines it is given."""

    def __init__(self, model: str, options: Mapping[str, Any], job: BatchJob, threads: int) -> None:
        torch.set_num_threads(threads)
        self.program = (dry_program if job.dry_run else load_program)(model, **options)
        self.job = replace(job, strict=False)  # the driver stops the run

    def run(self, lines: list[Line]) -> tuple[list[tuple[Line, bytes, bool]], Counts]:
        """The records of lines that are known to be JSON."""
        records, progress = Records(), Progress(total=None, bar=False, metrics=None)
        with progress:
            run_lines(self.program, self.job, map(_opened, lines), records, progress)
        return records.found, progress.counts


def _opened(line: Line) -> OpenLine:
    given = read_object(line.raw)
    return OpenLine(line, custom_id_of(given), given)


def run_batch_ray(
    model: str, options: Mapping[str, Any], job: BatchJob, workers: Workers, progress: Progress
) -> Counts:
    """`run_batch` with `workers`, on the Ray that this process is connected to; `options` are those
    of `load_program`. Paths must mean the same files for every worker. Raises as `run_batch` does,
    and Ray's errors where actors cannot be had."""
    check_job(job)
    actor = ray.remote(num_cpus=workers.num_cpus, num_gpus=workers.num_gpus)(BatchActor)
    with ResultFile(job.output, dry_run=job.dry_run) as results, progress:
        results.check_input(job.input, job.max_line_bytes)
        progress.counts.skipped_failed = results.num_failed
        actors = [
            actor.remote(model, dict(options), job, workers.num_cpus) for _ in range(workers.count)
        ]
        opened = open_lines(job, read_lines(job.input, job.max_line_bytes), results, progress)
        lines = windows(job, (line for line, _, _ in opened), lambda line: line)
        try:
            for found, counts in _in_flight(actors, lines):
                for name in TOKENS:
                    setattr(progress.counts, name, getattr(progress.counts, name) + counts[name])
                for line, record, failed in found:
                    _take(job, results, progress, line, record, failed)
        finally:
            for handle in actors:
                ray.kill(handle)
    return progress.counts


def _in_flight(
    actors: list[Any], given: Iterator[list[Line]]
) -> Iterator[tuple[list[tuple[Line, bytes, bool]], dict[str, int]]]:
    """What the actors return, as it comes; each has up to `AHEAD` windows."""
    owner: dict[Any, Any] = {}
    for handle, window in zip(islice(cycle(actors), AHEAD * len(actors)), given, strict=False):
        owner[handle.run.remote(window)] = handle
    while owner:
        (done,), _ = ray.wait(list(owner), num_returns=1)
        handle = owner.pop(done)
        for window in islice(given, 1):
            owner[handle.run.remote(window)] = handle
        found, counts = ray.get(done)
        yield found, asdict(counts)


def _take(
    job: BatchJob, results: Sink, progress: Progress, line: Line, record: bytes, failed: bool
) -> None:
    if failed and job.strict:
        told = json.loads(record)
        error = told["error"]
        cause = BatchLineError(error["code"], error["message"], error["status"])
        fail(job, results, progress, line, told["custom_id"], cause)
    results.write(line, record, failed=failed)
    progress.end(failed=failed)


def ray_processor(
    model: str,
    *,
    base_names: tuple[str, ...] = ("base",),
    adapters: Mapping[str, str] | None = None,
    adapter_dir: str | None = None,
    media_folder: str = ".",
    max_tokens: int = 256,
    batch_size: int = 256,
    workers: Workers = Workers(),
    **options: Any,
) -> Callable[[Any], Any]:
    """A function from a Ray Dataset to one with a column `result` beside its own.

    Columns called as the fields of a line of a batch file, of either form, are what a row asks for;
    nulls count as absent, other columns are the caller's own.
    Images are files below `media_folder`.
    `result` is the JSON text of the record, without `line` and `digest`; a row that cannot be run
    has an `error` there. `options` are those of `load_program`. Raises nothing itself; what
    `load_program` raises in an actor, Ray raises where the Dataset is consumed.
    """
    folder = Path(media_folder)
    job = BatchJob(
        input=folder,
        output=folder,
        base_names=base_names,
        adapters=dict(adapters or {}),
        resolver=None if adapter_dir is None else folder_resolver(adapter_dir),
        media=MediaRule(folder=folder),
        max_tokens=max_tokens,
        window=batch_size,
    )

    def process(dataset: Any) -> Any:
        return dataset.map_batches(
            _Mapper,
            fn_constructor_args=(model, options, job, workers.num_cpus),
            batch_size=batch_size,
            batch_format="pyarrow",
            concurrency=workers.count,
            num_cpus=workers.num_cpus,
            num_gpus=workers.num_gpus or None,
        )

    return process


class _Mapper(BatchActor):
    """Rows of a Ray Dataset as lines."""

    def __call__(self, table: Any) -> Any:
        rows = [
            {name: _without_nulls(value) for name, value in row.items()
             if name in KNOWN and value is not None}
            for row in table.to_pylist()
        ]  # fmt: skip
        lines = [Line(n, 1, json.dumps(row).encode()) for n, row in enumerate(rows, start=1)]
        results = [""] * len(rows)
        for line, record, _ in self.run(lines)[0]:
            told = json.loads(record)
            kept = {name: value for name, value in told.items() if name not in ("line", "digest")}
            results[line.number - 1] = json.dumps(kept)
        return table.append_column("result", [results])


def _without_nulls(value: Any) -> Any:
    """Columns of one type give every row every field."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
