"""The command line: `purestep batch` and `purestep plan`, or `python -m purestep.engine`."""

import argparse
import json
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from purestep.engine.batch import BatchJob, check_job, run_batch
from purestep.engine.batch_files import count_lines
from purestep.engine.batch_media import MediaRule
from purestep.engine.batch_progress import Progress
from purestep.engine.dry_run import dry_program
from purestep.engine.loader import folder_resolver
from purestep.engine.memory import memory_summary
from purestep.engine.memory_measure import Measured, measure
from purestep.engine.memory_plan import (
    Wishes,
    memory_plan,
    plan_table,
    read_model_config,
    read_tower,
)
from purestep.engine.platform import resolve_device, resolve_dtype
from purestep.engine.program import load_program
from purestep.state.adapters import ROW_BLOCK
from purestep.state.errors import BatchFileError, BatchLineError, PurestepError

EXIT_CODES = {
    0: "every line has a result",
    1: "the run is complete, and some lines are error records (their number is on stderr)",
    2: "nothing was run: an option, the model or the files are at fault",
    3: "stopped at a bad line, as --strict asks; what was finished is kept",
    4: "stopped by a failure (disk full, out of memory); what was finished is kept",
    130: "interrupted; what was finished is kept, and the same command goes on from there",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    args = make_parser().parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    return args.run(args)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="purestep", description="Run batch files, and plan memory.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_batch(commands)
    _add_plan(commands)
    return parser


def _add_batch(commands: Any) -> None:
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
    group.add_argument("--remote-seconds", type=seconds, default=10.0, metavar="S")


def _add_ray(group: Any) -> None:
    group.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS",
        help="run on Ray (extra purestep[ray]): the cluster at ADDRESS, by default a local one",
    )  # fmt: skip
    group.add_argument("--ray-actors", type=count, default=1, metavar="N", help="engines")
    group.add_argument("--ray-cpus", type=count, default=1, metavar="N", help="of each engine")
    group.add_argument("--ray-gpus", type=float, default=0, metavar="X", help="of each engine")


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
    group.add_argument("--compile", action="store_true", help="torch.compile, on a CPU")
    group.add_argument("--threads", type=count, metavar="N", help="of torch; by default its choice")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="where memory goes, and what it buys",
        description="Bytes on one card: weights, KV, adapter slots by projection, encoder outputs, "
        "a step, graphs; with --memory also what fits. Nothing is loaded but config.json, unless "
        "--measure asks for it.",
    )
    plan.set_defaults(run=plan_command)
    plan.add_argument("model", type=Path, metavar="MODEL", help="checkpoint folder or config.json")
    plan.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    plan.add_argument("--dtype", default="bfloat16", metavar="NAME")
    plan.add_argument("--memory", type=size, metavar="BYTES", help="of the card; says what fits")
    plan.add_argument("--memory-share", type=float, default=0.9, metavar="X", help="of it, to use")
    cards = plan.add_argument_group("cards")
    cards.add_argument("--tp", type=int, default=1, metavar="N", help="cards that share the model")
    cards.add_argument(
        "--fully-sharded", action="store_true", help="split both factors of the adapters, too"
    )
    adapters = plan.add_argument_group("adapters")
    adapters.add_argument("--max-adapters", type=int, default=8, metavar="N", help="slots")
    adapters.add_argument("--rank", type=int, default=16, metavar="R", help="of each")
    adapters.add_argument(
        "--lora-vocab", action="store_true", help="also on embed_tokens and lm_head"
    )
    adapters.add_argument(
        "--lora-tower", action="store_true", help="also on a vision tower and its projector"
    )
    batch = plan.add_argument_group("batch")
    batch.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    batch.add_argument(
        "--request-tokens", type=int, metavar="N",
        help="of a typical request, prompt and generated; by default the model's context",
    )  # fmt: skip
    batch.add_argument("--image-tokens", type=int, default=576, metavar="N", help="of one image")
    batch.add_argument(
        "--max-encoder-tokens", type=int, metavar="N",
        help="embeddings made in one step, and kept; by default as in a program",
    )  # fmt: skip
    batch.add_argument("--max-rows", type=int, default=64, metavar="N", help="running requests")
    batch.add_argument(
        "--max-batched-tokens", type=int, default=1024, metavar="N", help="computed in one step"
    )
    batch.add_argument(
        "--graph-rows", type=int, default=0, metavar="N", help="of the largest decode graph"
    )
    device = plan.add_argument_group("measuring")
    device.add_argument(
        "--measure", action="store_true",
        help="load the model, take the largest step, and say measured beside computed",
    )  # fmt: skip
    device.add_argument("--device", default="auto")
    device.add_argument("--num-blocks", type=int, metavar="N", help="of KV; by default automatic")


def size(text: str) -> int:
    """Bytes, also as 64KiB, 20MiB or 1.5GiB."""
    units = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
    number, unit = (text[:-3], text[-3:]) if text[-3:] in units else (text, "")
    try:
        found = float(number) * 2 ** units[unit] if unit else int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 1000, 20MiB, 1.5GiB") from None
    if not 1 <= found < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 2**63 - 1 bytes")
    return int(found)


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A time that a socket can wait for."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0, and at most 86400 seconds")
    return found


def named_path(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    return _pair(text, "NAME=PATH")


def default_adapter(text: str) -> tuple[str, str]:
    """MODALITY=NAME."""
    return _pair(text, "MODALITY=NAME")


def _pair(text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} must be {form}")
    return name, value


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
    import ray  # here, since nothing else needs it

    from purestep.engine.ray_batch import Workers, run_batch_ray

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


def plan_command(args: argparse.Namespace) -> int:
    """`purestep plan`: 0, or 2 where it cannot be done."""
    try:
        model = read_model_config(args.model)
        wishes = Wishes(
            dtype=resolve_dtype(args.dtype, "cpu", "float32"),
            tp=args.tp,
            fully_sharded=args.fully_sharded,
            max_adapters=args.max_adapters,
            rank=args.rank,
            lora_vocab=args.lora_vocab,
            lora_tower=args.lora_tower,
            block_size=args.block_size,
            request_tokens=args.request_tokens or model.max_position,
            image_tokens=args.image_tokens,
            max_rows=args.max_rows,
            max_batched_tokens=args.max_batched_tokens,
            max_encoder_tokens=args.max_encoder_tokens,
            graph_rows=args.graph_rows,
            memory_bytes=args.memory,
            memory_share=args.memory_share,
        )
        plan = memory_plan(model, wishes, read_tower(args.model))
        if args.measure:
            plan["measured"] = measured(args, wishes)
    except (PurestepError, OSError) as error:
        say(f"purestep: {error}")
        return 2
    print(json.dumps(plan) if args.json else plan_table(plan, wishes))
    return 0


def measured(args: argparse.Namespace, wishes: Wishes) -> Measured:
    """What the device says, by the same wishes."""
    return measure(
        args.model,
        resolve_device(args.device),
        dtype=wishes.dtype,
        block_size=wishes.block_size,
        num_blocks=args.num_blocks,
        max_rows=wishes.max_rows,
        max_batched_tokens=wishes.max_batched_tokens,
        max_active_adapters=max(wishes.max_adapters, 1),
        lora_rows=max(wishes.max_adapters, 1) * -(-wishes.rank // ROW_BLOCK) * ROW_BLOCK,
        lora_vocab=wishes.lora_vocab,
        lora_tower=wishes.lora_tower,
        max_encoder_tokens=wishes.max_encoder_tokens,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
