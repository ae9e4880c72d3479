"""`purestep plan`: where the memory of one card goes, and what it buys. All sizes in bytes."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purestep.engine.config import graph_size
from purestep.engine.image_processor import ImageProcessor, load_image_processor
from purestep.engine.memory import (
    check_tp,
    encoder_output_bytes,
    graph_bytes,
    itemsize_of,
    kv_token_bytes,
    slot_bytes,
    slot_table,
    step_bytes,
    tower_slot_bytes,
    vocab_slot_bytes,
    weight_bytes,
)
from purestep.engine.memory_encoder import computed_bytes, most_embeds, tower_bytes
from purestep.models.config import ModelConfig
from purestep.models.families import model_config_from_hf, vision_config_from_hf
from purestep.models.tower_linears import tower_linears
from purestep.models.vision import VisionFamily
from purestep.state.adapters import ROW_BLOCK
from purestep.state.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the memory is to hold. `rank` is of each of `max_adapters` adapters on all linears."""

    dtype: str = "bfloat16"
    tp: int = 1
    fully_sharded: bool = False
    max_adapters: int = 8
    rank: int = 16
    lora_vocab: bool = False
    lora_tower: bool = False
    block_size: int = 16
    request_tokens: int  # of a typical request, prompt and generated
    image_tokens: int = 576
    max_rows: int = 64
    max_batched_tokens: int = 1024
    max_encoder_tokens: int | None = None  # embeddings made in a step, and kept; None = as a
    # program has it
    graph_rows: int = 0  # the largest batch of which decode steps are graphs
    graph_tokens: int = 0  # the most tokens of a step with prompts that is one
    memory_bytes: int | None = None  # of the card; None = nothing is said about what fits
    memory_share: float = 0.9  # of it that may be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A multimodal model's encoder, as far as files say without its weights."""

    family: VisionFamily
    config: Any
    processor: ImageProcessor | None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The image processor's."""
        return {} if self.processor is None else self.processor.call.to_dict()


def read_model_config(path: str | os.PathLike) -> ModelConfig:
    """The geometry of a checkpoint folder, or of a config.json alone. Raises CheckpointError."""
    return model_config_from_hf(_read_config(path))


def read_tower(path: str | os.PathLike) -> Tower | None:
    """The same model's tower; None where it has none. Raises CheckpointError."""
    found = vision_config_from_hf(_read_config(path))
    if found is None:
        return None
    return Tower(family=found[0], config=found[1], processor=load_image_processor(Path(path)))


def _read_config(path: str | os.PathLike) -> dict[str, Any]:
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        given = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"{file} holds no object")
    return given


def memory_plan(model: ModelConfig, wishes: Wishes, tower: Tower | None = None) -> dict[str, Any]:
    """Bytes on one card, by name; plain data for JSON. Raises ConfigError naming the option."""
    w = wishes
    check_tp(model, w.tp)
    least = {"request_tokens": w.request_tokens, "rank": w.rank, "block_size": w.block_size}
    for name, value in (least | {"max_rows": w.max_rows}).items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if min(w.max_adapters, w.image_tokens, w.max_batched_tokens) < 0:
        raise ConfigError(
            f"max_adapters={w.max_adapters}, image_tokens={w.image_tokens} and "
            f"max_batched_tokens={w.max_batched_tokens} must be at least 0"
        )
    itemsize = itemsize_of(w.dtype)
    token = kv_token_bytes(model, itemsize, w.tp)
    request = token * w.request_tokens
    layers = model.num_layers
    projections = {
        child: {"a": a, "b": b, "bytes": itemsize * layers * (a + b)}
        for child, (a, b) in slot_table(model, w.rank, w.tp, w.fully_sharded).items()
    }
    slot = slot_bytes(model, w.rank, itemsize, w.tp, w.fully_sharded)
    vocab = vocab_slot_bytes(model, w.rank, itemsize) if w.lora_vocab else 0
    media = _tower_slot(wishes, tower)
    slot += vocab + media
    adapters = slot * w.max_adapters
    deepstack = 0 if tower is None else tower.family.deepstack(tower.config)
    image = encoder_output_bytes(model, w.image_tokens, itemsize, deepstack)
    plan: dict[str, Any] = {
        "model": model.architecture,
        "dtype": w.dtype,
        "tp": w.tp,
        "weights": weight_bytes(model, itemsize, w.tp),
        "kv": {"token": token, "block": token * w.block_size, "request": request},
        "adapters": {
            "projections": projections,
            "vocab": vocab,
            "tower": media,
            "slot": slot,
            "total": adapters,
            "host": slot_bytes(model, w.rank, itemsize) + vocab + media,
            "rows": w.max_adapters * -(-w.rank // ROW_BLOCK) * ROW_BLOCK,
            "as_kv_tokens": adapters / token,
            "as_kv_blocks": adapters / token / w.block_size,
            "as_requests": adapters / request,
        },
        "image": {"encoder_output": image, "kv": w.image_tokens * token,
                  "as_kv_tokens": image / token},
        "step": step_bytes(model, w.max_batched_tokens, w.max_rows, w.lora_vocab, w.tp),
        "graphs": graph_bytes(model, *_graph(w), w.lora_vocab, w.tp),
    }  # fmt: skip
    if tower is not None:
        plan["encoder"] = _encoder(model, wishes, tower)
    if w.memory_bytes is not None:
        plan["fits"] = _fits(plan, w)
    return plan


def _graph(wishes: Wishes) -> tuple[int, int]:
    """The most (tokens, rows) of any graph."""
    return graph_size(wishes.graph_tokens, wishes.graph_rows, wishes.max_rows)


def _tower_slot(wishes: Wishes, tower: Tower | None) -> int:
    """What one adapter takes on tower and projector, which every card holds whole."""
    if not wishes.lora_tower:
        return 0
    if tower is None:
        raise ConfigError("lora_tower=True, but this model has no vision tower")
    linears = tower_linears(tower.family, tower.config)
    return tower_slot_bytes(linears, wishes.rank, itemsize_of(wishes.dtype))


def _encoder(model: ModelConfig, wishes: Wishes, tower: Tower) -> dict[str, int]:
    """What images take beside; every card holds all of it."""
    family, geometry, itemsize = tower.family, tower.config, itemsize_of(wishes.dtype)
    limit = wishes.max_encoder_tokens
    if limit is None:
        limit = max(wishes.max_batched_tokens, most_embeds(family, geometry, tower.settings))
    items = family.heaviest(geometry, tower.settings, limit)
    return {
        "weights": tower_bytes(family, geometry, itemsize),
        "largest_step": computed_bytes(family, geometry, items, itemsize),
        "images": len(items),
        "cache": encoder_output_bytes(model, limit, itemsize, family.deepstack(geometry)),
        "embeddings": limit,
    }


def _fits(plan: Mapping[str, Any], wishes: Wishes) -> dict[str, Any]:
    """What the rest of the card's memory holds."""
    usable = int(wishes.memory_bytes * wishes.memory_share)
    taken = plan["weights"] + plan["adapters"]["total"] + plan["step"] + plan["graphs"]
    if encoder := plan.get("encoder"):
        taken += encoder["weights"] + encoder["largest_step"] + encoder["cache"]
    blocks = max(usable - taken, 0) // plan["kv"]["block"]
    tokens = blocks * wishes.block_size
    return {
        "usable": usable,
        "taken": taken,
        "kv": blocks * plan["kv"]["block"],
        "blocks": blocks,
        "tokens": tokens,
        "requests": tokens // wishes.request_tokens,
        "missing": max(taken - usable, 0),
    }


def plan_table(plan: Mapping[str, Any], wishes: Wishes) -> str:
    """The plan for people."""
    adapters, kv, image = plan["adapters"], plan["kv"], plan["image"]
    rows = [
        ("weights", plan["weights"], f"{plan['model']}, {plan['dtype']}, 1 of {plan['tp']} cards"),
        ("KV of a token", kv["token"], f"{kv['block']:,} a block of {wishes.block_size}"),
        ("KV of a request", kv["request"], f"{wishes.request_tokens:,} tokens"),
    ]
    shared = ", fully sharded" if wishes.fully_sharded else ""
    for name, part in adapters["projections"].items():
        rows.append((f"  adapter slot: {name}", part["bytes"], f"A {part['a']:,} B {part['b']:,}"))
    if adapters["vocab"]:
        rows.append(
            ("  adapter slot: embed_tokens, lm_head", adapters["vocab"], "whole vocabulary")
        )
    if adapters["tower"]:
        rows.append(("  adapter slot: tower, projector", adapters["tower"], "on every card"))
    rows += [
        ("adapter slot", adapters["slot"], f"rank {wishes.rank}{shared}"),
        (
            "adapter slots",
            adapters["total"],
            f"{wishes.max_adapters} = {adapters['as_kv_tokens']:,.0f} tokens of KV = "
            f"{adapters['as_requests']:.2f} requests",
        ),
        ("adapter on the host", adapters["host"], "each registered one"),
        (
            "encoder output of an image",
            image["encoder_output"],
            f"{wishes.image_tokens} tokens; their KV is {image['kv']:,}",
        ),
        (
            "a step, estimate",
            plan["step"],
            f"{wishes.max_batched_tokens} tokens, {wishes.max_rows} rows",
        ),
        (
            "CUDA graphs, estimate",
            plan["graphs"],
            "up to {} tokens, {} rows".format(*_graph(wishes)),
        ),
    ]
    if encoder := plan.get("encoder"):
        rows += [
            ("encoder weights", encoder["weights"], "on every card"),
            (
                "encoding in a step, estimate",
                encoder["largest_step"],
                f"of {encoder['images']} of the largest images",
            ),
            ("encoder outputs kept", encoder["cache"], f"{encoder['embeddings']:,} embeddings"),
        ]
    if fits := plan.get("fits"):
        rows.append(("usable", fits["usable"], f"{wishes.memory_share:.0%} of the card"))
        if fits["missing"]:
            rows.append(("missing", fits["missing"], "before the first KV block"))
        what = (
            f"{fits['blocks']:,} blocks = {fits['tokens']:,} tokens = {fits['requests']:,} requests"
        )
        rows.append(("left for KV", fits["kv"], what))
    for name, (computed, measured) in plan.get("measured", {}).items():
        ratio = f"{measured / computed:.3f} of the computed {computed:,}" if computed else ""
        rows.append((f"measured: {name}", measured, ratio))
    first = max(len(name) for name, _, _ in rows)
    second = max(len(f"{count:,}") for _, count, _ in rows)
    return "\n".join(
        f"{name:{first}}  {count:>{second},} B  {size_text(count):>9}  {note}".rstrip()
        for name, count, note in rows
    )


def size_text(count: int) -> str:
    """Bytes in the unit that leaves at most 4 digits before the point."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} B"
