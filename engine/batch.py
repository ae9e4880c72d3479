"""A batch run: a JSONL file in, a JSONL file out, whatever happens on the way.

Lines are read as they are needed, brought into an order by adapter and prompt inside a window, and
each record is written when the last sample of its line has finished. So records come in the order
of completion; `line` says where each belongs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from purestep.engine.batch_files import DigestSet, Line, ResultFile, read_lines
from purestep.engine.batch_media import MediaRule, read_media
from purestep.engine.batch_progress import Counts, Progress
from purestep.engine.batch_records import RecordMaker, encoded
from purestep.engine.batch_rows import Row, custom_id_of, read_object, row_of
from purestep.engine.dry_run import dry_step
from purestep.engine.generate import generate
from purestep.engine.loader import Resolver
from purestep.engine.prepare import prepare
from purestep.engine.program import Program
from purestep.state.errors import BatchFileError, BatchLineError, RequestError
from purestep.state.request import Completion, FinishReason, Request
from purestep.state.sampling import GREEDY_BELOW, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """What a run is told. `adapters` maps names to PEFT folders, `resolver` finds others."""

    input: Path
    output: Path
    base_names: tuple[str, ...]  # what `model` may call the base model
    adapters: Mapping[str, str] = field(default_factory=dict)
    resolver: Resolver | None = None
    media: MediaRule | None = None  # by default files below the input's folder
    window: int = 1024  # lines that are brought into an order
    max_tokens: int = 256  # of a line that does not say
    max_line_bytes: int = 64 << 20
    strict: bool = False  # raise BatchLineError at the first bad line
    dry_run: bool = False


def run_batch(program: Program, job: BatchJob, progress: Progress | None = None) -> Counts:
    """Run every line of `job.input` that `job.output` has no record of, and write its record.

    A line that cannot be run gets a record with an `error` and hurts no other. Returns the counts
    of this run. After an interrupt or a crash, the same call goes on where the last one ended.

    Raises BatchFileError before any change where the output does not belong to the input, or an
    adapter has the base model's name; OSError where a file cannot be read or written; with
    `strict`, BatchLineError. Lines that are finished by then are kept.
    """
    if taken := sorted({*job.base_names} & {*job.adapters}):
        raise BatchFileError(f"adapter {taken[0]!r} has a name of the base model")
    if job.window < 1:
        raise BatchFileError(f"window={job.window} must be at least 1")
    if job.input.resolve() == job.output.resolve():
        raise BatchFileError(f"input and output are the same file, {job.input}")
    created = int(job.input.stat().st_mtime)
    progress = progress or Progress(total=None, bar=False, metrics=None)
    with ResultFile(job.output, dry_run=job.dry_run) as results, progress:
        results.check_input(job.input, job.max_line_bytes)
        progress.counts.skipped_failed = results.num_failed
        maker = RecordMaker(
            tokens=program.config.tokens,
            created=created,
            fingerprint=program.config.weights[:16],
            dry_run=job.dry_run,
        )
        run = _Run(program=program, job=job, results=results, progress=progress, maker=maker)
        for completion in generate(
            program,
            run.requests(),
            adapters=job.adapters,
            resolver=job.resolver,
            on_step=progress.step,
            advance=dry_step if job.dry_run else None,
        ):
            run.collect(completion)
    return progress.counts


@dataclass(frozen=True, slots=True)
class _Pending:
    """A line in the engine."""

    line: Line
    row: Row
    request: Request
    samples: dict[int, Completion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The two ends of a run: lines to requests, completions to records."""

    program: Program
    job: BatchJob
    results: ResultFile
    progress: Progress
    maker: RecordMaker
    pending: dict[str, _Pending] = field(default_factory=dict)  # by request id

    def requests(self) -> Iterator[Request]:
        """The requests of all lines that are left; bad lines are recorded on the way."""
        rows = self._rows()
        while window := list(islice(rows, self.job.window)):
            window.sort(key=lambda item: item[1].locality)
            for line, row in window:
                try:
                    request = request_of(self.program, self.job, f"line-{line.number}", row)
                except (BatchLineError, RequestError) as error:
                    self._fail(line, row.custom_id, error)
                    continue
                self.pending[request.id] = _Pending(line, row, request)
                yield request

    def _rows(self) -> Iterator[tuple[Line, Row]]:
        seen, before = DigestSet(), 0
        for line in read_lines(self.job.input, self.job.max_line_bytes):
            self.progress.blank(line.number - before - 1)
            before = line.number
            finished = bool(self.results.finished(line.number))
            if finished:
                self.progress.skip()
            custom_id = None
            try:
                given = self._object(line)
                custom_id = custom_id_of(given)
                is_new = custom_id is None or seen.add(custom_id)
                if finished:
                    continue
                if not is_new:
                    what = f"an earlier line has the custom_id {custom_id!r}"
                    raise BatchLineError("duplicate_custom_id", what)
                yield line, row_of(given, self.job.base_names)
            except BatchLineError as error:
                if not finished:
                    self._fail(line, custom_id, error)

    def _object(self, line: Line) -> Mapping[str, object]:
        if line.raw is None:
            limit = f"the line has {self.job.max_line_bytes} bytes or more (see --max-line-bytes)"
            raise BatchLineError("line_too_long", limit)
        return read_object(line.raw)

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
        if len(pending.samples) < pending.request.sampling.n:
            return
        del self.pending[completion.id]
        line, row = pending.line, pending.row
        samples = [sample for _, sample in sorted(pending.samples.items())]
        record = self.maker.done(line.number, line.digest, row, pending.request.tokens, samples)
        self.results.write(line, encoded(record), failed=False)
        self.progress.end(failed=False)

    def _fail(self, line: Line, custom_id: str | None, error: Exception) -> None:
        if not isinstance(error, BatchLineError):
            error = BatchLineError("invalid_request", str(error))
        if self.job.strict:
            where = f"{self.job.input}, line {line.number}: {error}"
            raise BatchLineError(error.code, where, error.status) from error
        record = self.maker.failed(line.number, line.digest, custom_id, error)
        self.results.write(line, encoded(record), failed=True)
        self.progress.end(failed=True)


def request_of(program: Program, job: BatchJob, request_id: str, row: Row) -> Request:
    """The request that a row asks for. What the row leaves open is as the checkpoint's
    generation_config.json has it. Raises BatchLineError."""
    _check_adapter(job, row)
    prompt = row.prompt
    if row.images:
        prompt = with_pictures(job.media or MediaRule(folder=job.input.parent), prompt)
        if not takes_images(program):
            raise BatchLineError("modality_not_supported", "this model takes no images")
    sampling = _sampling(program.defaults, job, row)
    if not isinstance(prompt, str) and not any(isinstance(m, Mapping) for m in prompt):
        return Request(
            id=request_id, tokens=prompt, adapter=row.adapter, salt=row.salt, sampling=sampling
        )
    try:
        return prepare(
            program,
            prompt,
            id=request_id,
            adapter=row.adapter,
            salt=row.salt,
            sampling=sampling,
            chat_template_kwargs=row.chat_template_kwargs,
        )
    except RequestError:
        raise
    except Exception as error:  # a chat template raises what it likes
        why = f"{type(error).__name__}: {error}"
        raise BatchLineError("invalid_request", f"the prompt cannot be prepared: {why}") from error


def takes_images(program: Program) -> bool:
    """Whether the program has an encoder of images."""
    return getattr(program, "vision", None) is not None


def with_pictures(
    rule: MediaRule, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with the bytes of each picture in its part. Raises BatchLineError."""

    def filled(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part["type"] != "image":
            return part
        return {"type": "image", "image": read_media(rule, part["url"])}

    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [filled(part) for part in message["content"]]}
        for message in messages
    ]


def _check_adapter(job: BatchJob, row: Row) -> None:
    name = row.adapter
    if name is None or name in job.adapters or (job.resolver and job.resolver(name)):
        return
    known = ", ".join(map(repr, sorted({*job.base_names, *job.adapters})))
    more = " and the folders of --adapter-dir" if job.resolver else ""
    raise BatchLineError(
        "model_not_found", f"no model or adapter is called {name!r}; known are {known}{more}", 404
    )


def _sampling(defaults: SamplingParams, job: BatchJob, row: Row) -> SamplingParams:
    given = {"max_tokens": job.max_tokens, **row.sampling}
    warmth = given.get("temperature", defaults.temperature)
    if isinstance(warmth, int | float) and warmth < GREEDY_BELOW:  # then these have no effect
        given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
    return replace(defaults, **given)


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
