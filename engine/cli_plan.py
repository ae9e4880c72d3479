"""The command `purestep plan`."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from purestep.engine.cli_values import say, size
from purestep.engine.memory_measure import Measured, measure
from purestep.engine.memory_plan import (
    Wishes,
    memory_plan,
    plan_table,
    read_model_config,
    read_tower,
)
from purestep.engine.platform import resolve_device, resolve_dtype
from purestep.state.adapters import ROW_BLOCK
from purestep.state.errors import PurestepError


def add_plan(commands: Any) -> None:
    """Its options and what runs it."""
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
    batch.add_argument(
        "--graph-tokens", type=int, default=0, metavar="N", help="of the largest graph with prompts"
    )
    device = plan.add_argument_group("measuring")
    device.add_argument(
        "--measure", action="store_true",
        help="load the model, take the largest step, and say measured beside computed",
    )  # fmt: skip
    device.add_argument("--device", default="auto")
    device.add_argument("--num-blocks", type=int, metavar="N", help="of KV; by default automatic")


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
            graph_tokens=args.graph_tokens,
            memory_bytes=args.memory,
            memory_share=args.memory_share,
        )
        plan = memory_plan(model, wishes, read_tower(args.model))
        if args.measure:
            plan["measured"] = measured(args, wishes)
    except (PurestepError, OSError) as error:
        say(f"purestep: {error}")
        return 2
    except torch.OutOfMemoryError as error:
        say(f"purestep: the largest step does not fit {args.device} beside the pool: {error}")
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
