"""The command `purestep batch`."""

import argparse
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from purestep.engine.batch import run_batch
from purestep.engine.batch_files import count_lines
from purestep.engine.batch_job import BatchJob, check_job
from purestep.engine.batch_media import MediaRule
from purestep.engine.batch_progress import Progress
from purestep.engine.cli_values import (
    count,
    default_adapter,
    gpus,
    named_path,
    say,
    seconds,
    size,
)
from purestep.engine.dry_run import dry_program
from purestep.engine.loader import folder_resolver
from purestep.engine.memory import memory_summary
from purestep.engine.program import load_program
from purestep.engine.ray_batch import Workers, import_ray, run_batch_ray
from purestep.state.errors import BatchFileError, BatchLineError, PurestepError

EXIT_CODES = {
    0: "every line has a result",
    1: "the run is complete, and some lines are error records (their number is on stderr)",
    2: "nothing was run: an option, the model or the files are at fault",
    3: "stopped at a bad line, as --strict asks; what was finished is kept",
    4: "stopped by a failure (disk full, out of memory); what was finished is kept",
    130: "interrupted; what was finished is kept, and the same command goes on from there",
}


def add_batch(commands: Any) -> None:
    """Its options and what runs it."""
    codes = "\n".join(f"  {code:3}  {what}" for code, what in EXIT_CODES.items())
    batch = commands.add_parser(
        "batch",
        allow_abbrev=False,
        help="a JSONL file in, a JSONL file out",
        description="Run the requests of a JSONL file, in the OpenAI batch format or as "
        '{"prompt": ..., "adapter": ..., "images": [...]}. A bad line becomes an error record. '
        "Started again with the same files, it goes on where it ended.",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    batch.set_defaults(run=batch_command)
    batch.add_argument("model", type=Path, metavar="MODEL", help="checkpoint folder")
    batch.add_argument("input", type=Path, metavar="INPUT", help="JSONL file, read lazily")
    batch.add_argument(
        "output", type=Path, metavar="OUTPUT", help="JSONL file, in order of completion"
    )
    _add_run(batch.add_argument_group("run"))
    _add_adapters(batch.add_argument_group("adapters"))
    _add_media(batch.add_argument_group("images"))
    _add_ray(batch.add_argument_group("more than one GPU or machine"))
    _add_engine(batch.add_argument_group("engine"))


def _add_run(group: Any) -> None:
    group.add_argument("--strict", action="store_true", help="stop at the first bad line")
    group.add_argument(
        "--model-name",
        metavar="NAME",
        help="what `model` calls the base model, beside the folder's own name and path",
    )
    group.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="of a line that does not say"
    )
    group.add_argument(
        "--window", type=int, default=1024, metavar="LINES",
        help="lines that are reordered together, by adapter and beginning",
    )  # fmt: skip
    group.add_argument(
        "--window-bytes", type=size, default=64 << 20, metavar="BYTES",
        help="of those lines, held at a time; one longer line may exceed it",
    )  # fmt: skip
    group.add_argument(
        "--max-line-bytes", type=size, default=64 << 20, metavar="BYTES",
        help="longer lines are error records",
    )  # fmt: skip
    group.add_argument("--metrics", type=Path, metavar="FILE", help="append figures as JSON lines")
    group.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=None,
        help="show a bar on stderr; by default on a terminal",
    )  # fmt: skip
    group.add_argument(
        "--dry-run", action="store_true",
        help="check every line and adapter without the model; tokens are made up",
    )  # fmt: skip


def _add_adapters(group: Any) -> None:
    group.add_argument(
        "--adapter", type=named_path, action="append", default=[], metavar="NAME=PATH",
        help="a PEFT folder, read when a line first asks for it; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--adapter-dir", type=Path, metavar="DIR",
        help="every PEFT folder below it is an adapter, called by its path from there",
    )  # fmt: skip
    group.add_argument(
        "--max-active-adapters", type=int, default=8, metavar="N", help="on the device at a time"
    )
    group.add_argument(
        "--max-registered-adapters", type=int, default=64, metavar="N", help="kept on the host"
    )
    rows = group.add_mutually_exclusive_group()
    rows.add_argument(
        "--lora-rows", type=int, metavar="ROWS",
        help="device memory for adapters (128): the sum of their ranks, each rounded up to 8",
    )  # fmt: skip
    rows.add_argument("--adapter-bytes", type=size, metavar="BYTES", help="the same, in bytes")
    group.add_argument(
        "--lora-vocab", action=argparse.BooleanOptionalAction, default=None,
        help="admit adapters on embed_tokens and lm_head; by default on a CPU",
    )  # fmt: skip
    group.add_argument(
        "--lora-tower", action=argparse.BooleanOptionalAction, default=None,
        help="admit adapters on a vision tower and its projector; by default on a CPU",
    )  # fmt: skip
    group.add_argument(
        "--default-adapter", type=default_adapter, action="append", default=[],
        metavar="MODALITY=NAME",
        help="adapter of lines with media of this modality (image) that name none; may be repeated",
    )  # fmt: skip


def _add_media(group: Any) -> None:
    group.add_argument(
        "--media-root", type=Path, action="append", default=[], metavar="DIR",
        help="files below it may be read, beside those below the input's folder",
    )  # fmt: skip
    group.add_argument("--allow-remote", action="store_true", help="fetch http and https URLs")
    group.add_argument("--max-image-bytes", type=size, default=20 << 20, metavar="BYTES")
    group.add_argument(
        "--image-cache-bytes", type=size, default=256 << 20, metavar="BYTES",
        help="of processed pictures, so that one that many lines show is processed once",
    )  # fmt: skip
    group.add_argument(
        "--remote-seconds", type=seconds, default=10.0, metavar="S", help="for all of a fetch"
    )


def _add_ray(group: Any) -> None:
    group.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS",
        help="run on Ray (extra purestep[ray]): the cluster at ADDRESS, by default a local one",
    )  # fmt: skip
    group.add_argument(
        "--ray-actors", type=count, metavar="N",
        help="engines; by default as many as find room in the cluster",
    )  # fmt: skip
    group.add_argument("--ray-cpus", type=count, default=1, metavar="N", help="of each engine")
    group.add_argument(
        "--ray-gpus", type=gpus, metavar="X",
        help="of each engine; by default 1 where the cluster has any, unless --device is a CPU",
    )  # fmt: skip


def _add_engine(group: Any) -> None:
    group.add_argument("--device", default="auto")
    group.add_argument("--dtype", default="auto", metavar="NAME")
    group.add_argument("--max-rows", type=int, default=64, metavar="N", help="running requests")
    group.add_argument(
        "--max-batched-tokens", type=int, metavar="N",
        help="computed in one step (1024, or an image that goes in whole, if that takes more)",
    )  # fmt: skip
    group.add_argument("--max-context", type=int, metavar="TOKENS", help="by default the model's")
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    pool = group.add_mutually_exclusive_group()
    pool.add_argument("--num-blocks", type=int, metavar="N", help="of KV; by default automatic")
    pool.add_argument("--kv-bytes", type=size, metavar="BYTES", help="the same, in bytes")
    group.add_argument("--seed", type=int, default=0, help="of lines that bring none")
    group.add_argument("--no-prefix-caching", action="store_true")
    group.add_argument(
        "--compile", action="store_true", help="layer, embedding, head and sampler by torch.compile"
    )
    group.add_argument("--threads", type=count, metavar="N", help="of torch; by default its choice")


def batch_command(args: argparse.Namespace) -> int:
    """`purestep batch`; see EXIT_CODES."""
    try:
        job = batch_job(args)
        progress = make_progress(args)
        run = _on_ray(args, job, progress) if args.ray else _alone(args, job, progress)
    except KeyboardInterrupt:
        say("interrupted before anything was run")
        return 130
    except (PurestepError, OSError, ImportError) as error:
        say(f"purestep: {error}")
        return 2
    except Exception as error:  # of a checkpoint's files, whatever reads them raises what it likes
        say(f"purestep: {type(error).__name__}: {error}")
        return 2
    code = _stopped_by(run)
    if progress.counts.steps or code != 2:
        say(progress.summary())
    if code == 0 and (failed := progress.counts.all_failed):
        say(f"{failed} lines of {job.output} are error records")
        return 1
    return code


def _alone(args: argparse.Namespace, job: BatchJob, progress: Progress) -> Callable[[], object]:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    program = (dry_program if job.dry_run else load_program)(args.model, **engine_options(args))
    say(memory_summary(program.config))
    return lambda: run_batch(program, job, progress)


def _on_ray(args: argparse.Namespace, job: BatchJob, progress: Progress) -> Callable[[], object]:
    ray = import_ray()
    logging.getLogger("ray.data").setLevel(logging.WARNING)  # which tells of every execution
    ray.init(address=args.ray, ignore_reinit_error=True)
    workers = Workers(count=args.ray_actors, num_cpus=args.ray_cpus, num_gpus=args.ray_gpus)
    options, model = engine_options(args), str(args.model.resolve())
    return lambda: run_batch_ray(model, options, job, workers, progress)


def _stopped_by(run: Callable[[], object]) -> int:
    """0, or the exit code for what ended the run."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        say("interrupted: the same command goes on from here")
        return 130
    except BatchLineError as error:
        say(f"purestep: {error}")
        return 3
    except PurestepError as error:
        say(f"purestep: {error}")
        return 2
    except (OSError, MemoryError, RuntimeError) as error:
        say(f"purestep: stopped: {type(error).__name__}: {error}")
        return 4
    except Exception:  # never 1, which says that the run is complete
        traceback.print_exc()
        say("purestep: stopped by an error that should not be; what was finished is kept")
        return 4
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def batch_job(args: argparse.Namespace) -> BatchJob:
    """What the options ask for, checked. Raises BatchFileError or OSError."""
    folder = args.input.resolve(strict=True).parent
    names = {args.model_name, str(args.model), args.model.resolve().name} - {None}
    adapters = dict(args.adapter)
    if len(adapters) < len(args.adapter):
        given = [name for name, _ in args.adapter]
        twice = next(name for name in given if given.count(name) > 1)
        raise BatchFileError(f"--adapter names {twice!r} more than once")
    if args.adapter_dir is not None and not args.adapter_dir.is_dir():
        raise BatchFileError(f"--adapter-dir {args.adapter_dir} is no folder")
    job = BatchJob(
        input=args.input,
        output=args.output,
        base_names=tuple(sorted(names)),
        adapters=adapters,
        resolver=folder_resolver(args.adapter_dir) if args.adapter_dir else None,
        media=MediaRule(
            folder=folder,
            roots=tuple(args.media_root),
            allow_remote=args.allow_remote,
            max_bytes=args.max_image_bytes,
            timeout_s=args.remote_seconds,
        ),
        image_cache_bytes=args.image_cache_bytes,
        window=args.window,
        window_bytes=args.window_bytes,
        max_tokens=args.max_tokens,
        max_line_bytes=args.max_line_bytes,
        strict=args.strict,
        dry_run=args.dry_run,
    )
    check_job(job)  # before the model is loaded, which takes long
    return job


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `load_program` that the command line gives."""
    options = {
        name: getattr(args, name)
        for name in (
            "device", "dtype", "max_rows", "max_batched_tokens", "max_context", "block_size",
            "num_blocks", "kv_bytes", "seed", "compile", "max_active_adapters", "lora_rows",
            "adapter_bytes", "lora_vocab", "lora_tower",
        )
    }  # fmt: skip
    most = max(args.max_registered_adapters, args.max_active_adapters)
    return options | {
        "prefix_caching": not args.no_prefix_caching,
        "max_registered_adapters": most,
        "default_adapters": dict(args.default_adapter),
    }


def make_progress(args: argparse.Namespace) -> Progress:
    """Raises BatchFileError where the metrics would go into another file of the run, OSError where
    they cannot be written."""
    if args.metrics is not None:
        if args.metrics.resolve() in (args.input.resolve(), args.output.resolve()):
            raise BatchFileError(f"--metrics {args.metrics} is the input or the output of the run")
        args.metrics.open("a").close()
    bar = sys.stderr.isatty() if args.progress is None else args.progress
    total = count_lines(args.input) if bar else None
    return Progress(total=total, bar=bar, metrics=args.metrics)
