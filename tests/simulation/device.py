"""A toy device in pure Python (design, section 6): `execute` without a model.

Its KV stores which token, adapter and position was written where, and what had been read before;
its next token is a hash of the whole visible context, read through the block table. So a wrong
block, a stale prefix hit, a lost token or a mixed-up adapter changes the output. The device is a
value: old ones stay valid, which the real one's do not.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from blake3 import blake3
from immutables import Map

from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.schedule import schedule
from purestep.engine.step import drop_blobs
from purestep.state.adapters import Residence
from purestep.state.engine import EngineState
from purestep.state.plan import Outputs, StepPlan, StepResult
from purestep.state.pytree import tree
from purestep.state.request import SamplingParams, frozen

Place = tuple[int, int]  # block, offset
TORN = b"torn"  # what a failed step leaves behind


@tree
class ToyDevice:
    """KV cells by (block, offset), and which part of which adapter version a row block holds."""

    cells: Map[Place, bytes]
    row_blocks: Map[int, tuple[str, int]]


def empty_device() -> ToyDevice:
    return ToyDevice(cells=Map(), row_blocks=Map())


def cell_after(context: Sequence[bytes], version: str | None, token: int) -> bytes:
    """The KV of a token behind `context`: it depends on the position and on all that is visible."""
    who = b"base" if version is None else b"lora" + version.encode()
    return blake3(b"".join((*context, who, struct.pack("<qq", len(context), token)))).digest(8)


def draw(
    context: Sequence[bytes],
    temperature: float,
    top_k: int,
    top_p: float,
    stream: int,
    position: int,
    vocab_size: int,
) -> tuple[int, float]:
    """(token, logprob): a hash of the visible cells; of the noise's key too unless greedy."""
    key = struct.pack("<fif", temperature, top_k, top_p)
    if temperature > 0:
        key += struct.pack("<Qq", stream, position)
    number = int.from_bytes(blake3(b"".join((*context, key))).digest(8), "little")
    return number % vocab_size, -float(number % 997) / 128


def next_token(
    tokens: Sequence[int], version: str | None, sampling: SamplingParams, stream: int, vocab: int
) -> tuple[int, float]:
    """The law's right side: what `tokens` alone, with infinite memory and no cache, go on with."""
    context: list[bytes] = []
    for token in tokens:
        context.append(cell_after(context, version, token))
    knobs = (sampling.temperature, sampling.top_k, sampling.top_p)
    return draw(context, *knobs, stream, len(tokens), vocab)


def execute(
    config: Config, device: ToyDevice, plan: StepPlan, blobs: Mapping[str, Any]
) -> tuple[ToyDevice, StepResult]:
    """What a plan says, done to the toy: uploads, copies, all writes, then all draws."""
    device = _prepared(device, plan, blobs)
    versions = [_version_read(device, plan, row) for row in range(len(plan.row_ids))]
    with device.cells.mutate() as cells:
        for row, version in enumerate(versions):
            for place, token, position in _window(config, plan, row):
                context = _visible(config, cells, plan.tables[row], position)
                cells[place] = cell_after(context, version, token)
        news = [_drawn(config, cells, plan, row, s) for s, row in enumerate(_sampled(plan))]
        written = cells.finish()
    result = StepResult(
        token_S=frozen([token for token, _ in news]),
        logprob_S=frozen([logprob for _, logprob in news], np.float32),
    )
    return replace(device, cells=written), result


def tear(config: Config, device: ToyDevice, plan: StepPlan, blobs: Mapping[str, Any]) -> ToyDevice:
    """The device after a step that failed at its worst: everything written, nothing right."""
    device = _prepared(device, plan, blobs)
    with device.cells.mutate() as cells:
        for row in range(len(plan.row_ids)):
            for place, _, _ in _window(config, plan, row):
                cells[place] = TORN
        return replace(device, cells=cells.finish())


def toy_step(state: EngineState, sees: Any = None) -> tuple[EngineState, Outputs]:
    """`purestep.engine.step.step` on the toy; `sees` is called with the plan."""
    host, plan = schedule(state.config, state.host)
    if sees is not None:
        sees(plan)
    device, result = execute(state.config, state.device, plan, state.blobs)
    host, outputs = commit(state.config, host, plan, result)
    return drop_blobs(replace(state, host=host, device=device)), outputs


def _prepared(device: ToyDevice, plan: StepPlan, blobs: Mapping[str, Any]) -> ToyDevice:
    row_blocks, cells = device.row_blocks.mutate(), device.cells.mutate()
    for place in plan.uploads:
        assert blobs[place.version].version == place.version
        for part, block in enumerate(place.row_blocks):
            row_blocks[block] = (place.version, part)
    for source, target in plan.copies:
        for (block, offset), cell in device.cells.items():
            if block == source:
                cells[target, offset] = cell
        device = replace(device, cells=cells.finish())
        cells = device.cells.mutate()
    return replace(device, row_blocks=row_blocks.finish())


def _version_read(device: ToyDevice, plan: StepPlan, row: int) -> str | None:
    """The adapter that a row meets, as its slot's row blocks tell it."""
    slot = int(plan.slot_R[row])
    if slot < 0:
        return None
    (place,) = (p for p in plan.residents if p.slot == slot)
    return _version_at(device, place)


def _version_at(device: ToyDevice, place: Residence) -> str:
    parts = [device.row_blocks[block] for block in place.row_blocks]
    assert parts == [(parts[0][0], i) for i in range(len(parts))], f"a mixture of adapters: {parts}"
    return parts[0][0]


def _window(config: Config, plan: StepPlan, row: int) -> Iterator[tuple[Place, int, int]]:
    """(place, token, position) of each token the row computes in this step."""
    first, start = int(plan.count_R[:row].sum()), int(plan.start_R[row])
    for i in range(int(plan.count_R[row])):
        position = start + i
        block = int(plan.tables[row][position // config.block_size])
        place = (block, position % config.block_size)
        yield place, int(plan.tokens_T[first + i]), position


def _visible(
    config: Config, cells: Mapping[Place, bytes], table: np.ndarray, count: int
) -> list[bytes]:
    """The first `count` cells of a sequence, read through its block table."""
    B = config.block_size
    return [cells[int(table[p // B]), p % B] for p in range(count)]


def _sampled(plan: StepPlan) -> list[int]:
    return np.flatnonzero(plan.sampled_R).tolist()


def _drawn(
    config: Config, cells: Mapping[Place, bytes], plan: StepPlan, row: int, s: int
) -> tuple[int, float]:
    end = int(plan.start_R[row]) + int(plan.count_R[row])
    rows = plan.sampling
    assert int(rows.position_S[s]) == end
    return draw(
        _visible(config, cells, plan.tables[row], end),
        float(rows.temperature_S[s]),
        int(rows.top_k_S[s]),
        float(rows.top_p_S[s]),
        int(rows.stream_S[s]),
        end,
        config.model.vocab_size,
    )
