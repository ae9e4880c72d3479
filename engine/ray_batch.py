"""Batch runs over several GPUs or machines, on Ray Data (extra `purestep[ray]`).

`purestep batch --ray` is a stream: one task reads windows of lines, a pool of actors with an engine
each runs them, and the driver writes the records as they come; Ray Data holds back who is ahead.
So a run is resumed, and bad lines are told, just as without Ray. `ray_processor` takes the same
actors into a pipeline of one's own: a function from one Ray Dataset to another.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from purestep.engine.batch import fail
from purestep.engine.batch_files import Line, ResultFile, count_lines, read_lines
from purestep.engine.batch_job import BatchJob, check_job
from purestep.engine.batch_media import MediaRule
from purestep.engine.batch_progress import Counts, Progress
from purestep.engine.batch_rows import FIELDS
from purestep.engine.loader import folder_resolver
from purestep.engine.ray_engine import (
    BatchActor,
    Ended,
    Message,
    Window,
    packed,
    read_windows,
    unpacked,
)
from purestep.state.errors import BatchLineError, ConfigError

KNOWN = {"method", "url", "body", *FIELDS["plain"]}
SPENT = ("prompt_tokens", "cached_tokens", "output_tokens", "steps", "computed_tokens",
         "preemptions")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """How many actors, and what each has. On a CPU torch takes `num_cpus` threads."""

    count: int | None = None  # as many as find room in the cluster
    num_cpus: int = 1
    num_gpus: float | None = None  # 1 where the cluster has GPUs and `device` is no CPU, else 0


def import_ray() -> Any:
    """Ray, with Ray Data. Raises ImportError naming the extra."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(f"Ray Data is missing ({error}): pip install 'purestep[ray]'") from error
    return ray


def on_cluster(workers: Workers, nodes: list[Mapping[str, float]], device: str) -> Workers:
    """`workers` with all numbers, on machines that have so much "CPU" and "GPU" each.

    Raises ConfigError where no machine has room for one."""
    num_gpus = workers.num_gpus
    if num_gpus is None:
        has_gpu = any(node.get("GPU", 0) for node in nodes)
        num_gpus = 1 if has_gpu and not device.startswith("cpu") else 0
    count = workers.count
    if count is None:
        needs = {"CPU": workers.num_cpus, "GPU": num_gpus}
        count = sum(
            min(int(node.get(name, 0) // need) for name, need in needs.items() if need)
            for node in nodes
        )
        if not count:
            raise ConfigError(
                f"no machine of the cluster has num_cpus={workers.num_cpus} and "
                f"num_gpus={num_gpus} for an engine: they have {[dict(node) for node in nodes]}"
            )
    return replace(workers, count=count, num_gpus=num_gpus)


def _resolved(ray: Any, workers: Workers, options: Mapping[str, Any]) -> Workers:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kept = [{k: v for k, v in node.items() if k in ("CPU", "GPU")} for node in nodes]
    return on_cluster(workers, kept, str(options.get("device", "auto")))


def run_batch_ray(
    model: str, options: Mapping[str, Any], job: BatchJob, workers: Workers, progress: Progress
) -> Counts:
    """`run_batch` with `workers`, on the Ray that this process is connected to; `options` are those
    of `load_program`. Paths must mean the same files everywhere. An actor that dies is started
    again, and its lines are run once more. Raises as `run_batch` and `load_program` do, ConfigError
    where no machine has room for an actor, ImportError without Ray Data, and RuntimeError where
    Ray gives up an engine, or a line."""
    ray = import_ray()
    check_job(job)
    workers = _resolved(ray, workers, options)
    with ResultFile(job.output, dry_run=job.dry_run) as results, progress:
        results.check_input(job.input, job.max_line_bytes)
        progress.counts.skipped_failed = results.num_failed
        progress.skip(results.num_finished)
        num_lines = count_lines(job.input)
        num_open = num_lines - results.num_finished
        rows = {}  # of each engine, and its adapters
        stream = _messages(ray, model, options, job, workers, results.finished_bits(), num_open)
        with closing(stream):
            for message in stream:
                if message.refusal:
                    raise ConfigError(message.refusal)
                rows[message.engine] = message.rows, message.active_adapters
                progress.rows, progress.active_adapters = map(sum, zip(*rows.values(), strict=True))
                _add_spent(progress.counts, message)
                for ended in message.ended:
                    _take(job, results, progress, ended)
                progress.tell()
        lines = read_lines(job.input, job.max_line_bytes)
        if left := sum(not results.finished(line.number) for line in lines):
            raise RuntimeError(f"Ray ended, but {left} lines of {job.input} have no record")
        progress.blank(num_lines - results.num_finished)
    return progress.counts


def _messages(
    ray: Any,
    model: str,
    options: Mapping[str, Any],
    job: BatchJob,
    workers: Workers,
    finished_bits: np.ndarray,
    num_open: int,
) -> Iterator[Message]:
    """What the engines tell, as it comes."""
    engines = workers.count or 1
    fill = min(int(options.get("max_rows", 64)), -(-num_open // engines))
    settings = {"engines": engines, "rows": max(fill, 1)}
    try:
        with _row_by_row(ray.data.DataContext.get_current()):
            windows = ray.data.from_items([0]).map_batches(
                _read, fn_args=(job, finished_bits, num_open), fn_kwargs=settings, batch_size=None,
                num_cpus=0,
            )  # fmt: skip
            told = _through_engines(ray, windows, workers, (model, dict(options), job), _tell, 1)
            for table in told.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            ):
                yield from unpacked(table)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or str(error).partition("\n")[0]
        raise RuntimeError(f"Ray gave up an engine or the reading: {cause!r}") from error


@contextmanager
def _row_by_row(context: Any) -> Iterator[None]:
    """A block for each row, so that none waits for others. The settings are of all Datasets, since
    Ray 2.40 has no others; they are put back."""
    settings = {"target_max_block_size": 1, "enable_progress_bars": False}
    before = {name: getattr(context, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(context, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)


def _read(_: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield from map(packed, read_windows(*args, **kwargs))


def _tell(run: Callable[[Window], Iterator[Message]], table: Any) -> Iterator[Any]:
    for window in unpacked(table):
        yield from map(packed, run(window))


def _through_engines(
    ray: Any,
    dataset: Any,
    workers: Workers,
    engine: tuple[str, Mapping[str, Any], BatchJob],
    answer: Callable[..., Any],
    batch_size: int,
) -> Any:
    """The dataset behind a pool of BatchActors. None gets a task while it has one: that would wait
    there, although another engine may be idle."""
    return dataset.map_batches(
        BatchActor,
        fn_constructor_args=(*engine, workers.num_cpus, answer),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=workers.count, max_tasks_in_flight_per_actor=1),
        num_cpus=workers.num_cpus,
        num_gpus=workers.num_gpus or None,
    )


def _add_spent(counts: Counts, message: Message) -> None:
    for name in SPENT:
        setattr(counts, name, getattr(counts, name) + message.spent[name])


def _take(job: BatchJob, results: ResultFile, progress: Progress, ended: Ended) -> None:
    line, record, failed = ended
    if results.finished(line.number):
        return  # told before its window had ended
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
    has an `error` there. `options` are those of `load_program`. Raises ImportError without Ray
    Data; the function ConfigError where no machine has room for an actor. What `load_program`
    raises in an actor, Ray raises where the Dataset is consumed.
    """
    ray = import_ray()
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
        engines = _resolved(ray, workers, options)
        engine = model, options, job
        return _through_engines(ray, dataset, engines, engine, _add_results, batch_size)

    return process


def _add_results(run: Callable[[Window], Iterator[Message]], table: Any) -> Any:
    """The table with the column `result`."""
    rows = [
        {name: _without_nulls(value) for name, value in row.items()
         if name in KNOWN and value is not None}
        for row in table.to_pylist()
    ]  # fmt: skip
    lines = [Line(n, 1, json.dumps(row).encode()) for n, row in enumerate(rows, start=1)]
    results = [""] * len(rows)
    *_, last = run(Window(lines=lines))
    if last.refusal:
        raise ConfigError(last.refusal)
    for line, record, _ in last.ended:
        told = json.loads(record)
        kept = {name: value for name, value in told.items() if name not in ("line", "digest")}
        results[line.number - 1] = json.dumps(kept)
    return table.append_column("result", [results])


def _without_nulls(value: Any) -> Any:
    """Columns of one type give every row every field."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
