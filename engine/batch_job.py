"""What a batch run is told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from purestep.engine.batch_media import MediaRule
from purestep.engine.loader import Resolver
from purestep.state.errors import BatchFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """What a run is told. `adapters` maps names to PEFT folders, `resolver` finds others."""

    input: Path
    output: Path
    base_names: tuple[str, ...]  # what `model` may call the base model
    adapters: Mapping[str, str] = field(default_factory=dict)
    resolver: Resolver | None = None
    media: MediaRule | None = None  # by default files below the input's folder
    image_cache_bytes: int = 256 << 20  # of pictures that lines have in common, processed once
    window: int = 1024  # lines that are brought into an order
    window_bytes: int = 64 << 20  # of them; a window ends with the line that exceeds it
    max_tokens: int = 256  # of a line that does not say
    max_line_bytes: int = 64 << 20
    strict: bool = False  # raise BatchLineError at the first bad line
    dry_run: bool = False


def check_job(job: BatchJob) -> None:
    """Raises BatchFileError for a job that contradicts itself or whose files and folders are none,
    OSError without an input."""
    if taken := sorted({*job.base_names} & {*job.adapters}):
        raise BatchFileError(f"adapter {taken[0]!r} has a name of the base model")
    if min(job.window, job.window_bytes) < 1:
        raise BatchFileError(
            f"window={job.window} and window_bytes={job.window_bytes} must be at least 1"
        )
    if job.max_tokens < 0:
        raise BatchFileError(f"max_tokens={job.max_tokens} must be at least 0")
    if job.input.resolve(strict=True) == job.output.resolve():
        raise BatchFileError(f"input and output are the same file, {job.input}")
    if not job.input.is_file():
        raise BatchFileError(f"{job.input} is no regular file: a run reads it more than once")
    if not job.output.absolute().parent.is_dir():
        raise BatchFileError(f"{job.output} cannot be written: there is no such folder")
    if job.output.exists() and not job.output.is_file():
        raise BatchFileError(f"{job.output} is no regular file: a run reads it when it goes on")
    for root in job.media.roots if job.media else ():
        if not root.is_dir():
            raise BatchFileError(f"media root {root} is no folder")
