"""`purestep plan --measure`: what the device really takes, beside what was computed.

On a GPU by the allocator's count. On a CPU by the resident memory of the process (Linux): unwritten
pages of the pool are not in it, and what libraries keep for themselves is.
"""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from purestep.engine.adapters import load_adapter_tensors
from purestep.engine.memory import itemsize_of, pool_bytes, reserve_bytes, weight_bytes
from purestep.engine.memory_encoder import (
    computed_bytes,
    largest_adapter,
    measured_bytes,
    tower_bytes,
)
from purestep.engine.program import Program, init, load_program
from purestep.engine.requests import submit
from purestep.engine.step import step
from purestep.models.config import fused_linears
from purestep.state.adapters import ROW_BLOCK
from purestep.state.engine import EngineState
from purestep.state.request import Request
from purestep.state.sampling import SamplingParams

Measured = dict[str, tuple[int, int]]  # by name: (computed, measured) bytes
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(path: str | os.PathLike, device: str, **options: Any) -> Measured:
    """Load a checkpoint, allocate its pool, and take the largest step that the options allow, with
    an adapter on every linear in every slot; `options` are those of `load_program`.

    (computed, measured) bytes by name: "weights", "step and graphs", on a GPU also "pool" and, with
    a tower, "encoding". Raises as `load_program` does, and torch.OutOfMemoryError.
    """
    before = _taken(device)
    program = load_program(path, device=device, **options)
    config = program.config
    loaded = _taken(device)
    itemsize, vision = itemsize_of(config.dtype), program.vision
    weights = weight_bytes(config.model, itemsize)
    if vision is not None:
        weights += tower_bytes(vision.family, vision.config, itemsize)
    beneath = 0 if program.room is None else program.room.nbytes  # rows of adapters
    found: Measured = {"weights": (weights + beneath, loaded - before)}
    if vision is not None and torch.device(device).type != "cpu":
        settings = program.image_processor.call.to_dict() if program.image_processor else {}
        items = vision.family.heaviest(vision.config, settings, config.max_encoder_tokens)
        adapters = largest_adapter(config, len(items))
        computed = computed_bytes(vision.family, vision.config, items, itemsize)
        found["encoding"] = (computed, measured_bytes(vision, items, device, adapters))
    state = init(program)
    if torch.device(device).type != "cpu":
        computed = pool_bytes(config, config.num_blocks) - beneath
        found["pool"] = (computed, _taken(device) - loaded)
    state = largest_batch(program, with_adapters(program, state))
    ready = _taken(device)
    _reset_peak(device)
    while not state.host.idle:
        state, _ = step(program, state)
    found["step and graphs"] = (reserve_bytes(config), max(_peak(device) - ready, 0))
    return found


def with_adapters(program: Program, state: EngineState) -> EngineState:
    """An adapter in every slot, all of one rank, together as large as the rows allow."""
    config = program.config
    rank = config.lora_rows // config.max_active_adapters // ROW_BLOCK * ROW_BLOCK or ROW_BLOCK
    rank = min(rank, config.max_lora_rank)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config.model.num_layers):
        for linear in fused_linears(config.model):
            for child, out in zip(linear.children, linear.out_sizes, strict=True):
                name = f"base_model.model.model.layers.{layer}.{linear.parent}.{child}"
                tensors[f"{name}.lora_A.weight"] = torch.zeros(rank, linear.in_features)
                tensors[f"{name}.lora_B.weight"] = torch.zeros(out, rank)
    children = [child for linear in fused_linears(config.model) for child in linear.children]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": children}
    for slot in range(min(config.max_active_adapters, config.lora_rows // ROW_BLOCK)):
        state = load_adapter_tensors(
            state, tensors, settings, name=f"{slot}", version=f"measured {slot}"
        )
    return state


def largest_batch(program: Program, state: EngineState) -> EngineState:
    """As many rows as may run, with every adapter; their prompts fill the first step, and are
    scored."""
    config, names = program.config, sorted(state.host.adapters.names)
    length = min(config.max_batched_tokens // config.max_rows, config.max_context - 2)
    prompts_RT = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (config.max_rows, max(length, 1))
    )
    sampling = SamplingParams(
        max_tokens=2, ignore_eos=True, top_k=50, top_p=0.9, logprobs=5, prompt_logprobs=5
    )
    for row, prompt in enumerate(prompts_RT.tolist()):
        adapter = names[row % len(names)] if names else None
        state = submit(
            state, Request(id=str(row), tokens=prompt, adapter=adapter, sampling=sampling)
        )
    return state


def _taken(device: str) -> int:
    gc.collect()
    if torch.device(device).type != "cpu":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def _reset_peak(device: str) -> None:
    if torch.device(device).type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR.write_text("5")


def _peak(device: str) -> int:
    if torch.device(device).type != "cpu":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024
