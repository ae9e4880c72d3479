"""A toy device in pure Python (design, section 6): `execute` without a model.

Its KV stores which token, adapter and position was written where, and what had been read before;
its next token is a hash of the whole visible context, read through the block table. So a wrong
block, a stale prefix hit, a lost token or a mixed-up adapter changes the output. The device is a
value: old ones stay valid, which the real one's do not.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from blake3 import blake3
from immutables import Map
from torch import Tensor

from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.extras import edits_after, edits_of
from purestep.engine.policy import Policy, fcfs
from purestep.engine.schedule import schedule
from purestep.engine.step import drop_blobs
from purestep.state.adapters import Residence
from purestep.state.canonical import to_plain
from purestep.state.engine import EngineState
from purestep.state.plan import HiddenRow, LogitEdits, Outputs, ScoredRow, StepPlan, StepResult
from purestep.state.pytree import tree
from purestep.state.request import RequestState, frozen
from purestep.state.scores import Scores

Place = tuple[int, int]  # block, offset
TORN = b"torn"  # what a failed step leaves behind


@tree
class ToyDevice:
    """KV cells by (block, offset), and which part of which adapter version a row block holds."""

    cells: Map[Place, bytes]
    row_blocks: Map[int, tuple[str, int]]


def empty_device() -> ToyDevice:
    return ToyDevice(cells=Map(), row_blocks=Map())


def cell_after(context: Sequence[bytes], weights: str, version: str | None, token: int) -> bytes:
    """The KV of a token behind `context`: it depends on the position and on all that is visible."""
    who = weights.encode() + (b"/base" if version is None else b"/lora" + version.encode())
    return blake3(b"".join((*context, who, struct.pack("<qq", len(context), token)))).digest(8)


def draw(
    context: Sequence[bytes],
    knobs: tuple[float, int, float, float],
    edits: LogitEdits | None,
    stream: int,
    position: int,
    vocab_size: int,
) -> tuple[int, float]:
    """(token, logprob): a hash of the visible cells and of the row's edits; of the noise's key too
    unless greedy. `knobs` are temperature, top_k, top_p and min_p."""
    key = struct.pack("<fiff", *knobs) + _edit_key(edits)
    if knobs[0] > 0:
        key += struct.pack("<Qq", stream, position)
    number = int.from_bytes(blake3(b"".join((*context, key))).digest(8), "little")
    banned = set() if edits is None else set(edits.banned_E.tolist())
    while number % vocab_size in banned:
        number += 1
    return number % vocab_size, -float(number % 997) / 128


def _edit_key(edits: LogitEdits | None) -> bytes:
    """The edits but for bans, which `draw` obeys."""
    if edits is None:
        return b""
    plain = to_plain(replace(edits, banned_E=frozen(())))
    return json.dumps(plain, sort_keys=True).encode()


def next_token(
    config: Config,
    tokens: Sequence[int],
    version: str | None,
    record: RequestState,
) -> tuple[int, float]:
    """The law's right side: what `tokens` alone, with infinite memory and no cache, go on with.

    `record` says how they are drawn: its sampling parameters, stream and generated tokens.
    """
    context: list[bytes] = []
    for token in tokens:
        context.append(cell_after(context, config.weights, version, token))
    s = record.request.sampling
    knobs = (s.temperature, s.top_k, s.top_p, s.min_p)
    edits = edits_of(config, s, early=len(record.generated) < s.min_tokens)
    if edits is not None:
        edits = edits_after(edits, record.request.tokens, [record.generated])
    return draw(context, knobs, edits, record.stream, len(tokens), config.model.vocab_size)


def scores_of(context: Sequence[bytes], target: int, num_tops: int) -> tuple[float, list[int]]:
    """(logprob, likeliest ids) of the token behind a context."""
    digest = blake3(b"".join(context)).digest(8 + num_tops)
    logprob = -float((int.from_bytes(digest[:8], "little") + target) % 997) / 128
    return logprob, list(digest[8:])


def state_of(context: Sequence[bytes], layer: int) -> float:
    """The one hidden value a layer has behind a context."""
    key = struct.pack("<i", layer)
    return float(int.from_bytes(blake3(b"".join((*context, key))).digest(3), "little"))


def execute(
    config: Config, device: ToyDevice, plan: StepPlan, blobs: Mapping[str, Any]
) -> tuple[ToyDevice, StepResult]:
    """What a plan says, done to the toy: uploads, copies, all writes, then all draws."""
    device = _prepared(device, plan, blobs)
    versions = [_version_read(device, plan, row) for row in range(len(plan.row_ids))]
    with device.cells.mutate() as cells:
        tokens_T = _tokens_read(plan, blobs)
        for row, version in enumerate(versions):
            for place, token, position in _window(config, plan, row, tokens_T):
                context = _visible(config, cells, plan.tables[row], position)
                cells[place] = cell_after(context, config.weights, version, token)
        news = [_drawn(config, cells, plan, row, s) for s, row in enumerate(_sampled(plan))]
        scored = [_scored(config, cells, plan, row) for row in plan.scored]
        hidden = [_hidden(config, cells, plan, row) for row in plan.hidden]
        written = cells.finish()
    tops = np.flatnonzero(plan.sampling.num_tops_S >= 0).tolist()
    result = StepResult(
        token_S=frozen([token for token, _ in news]),
        logprob_S=frozen([logprob for _, logprob in news], np.float32),
        tops=tuple(_tops(news[s], int(plan.sampling.num_tops_S[s])) for s in tops),
        scored=tuple(scored),
        hidden=tuple(hidden),
    )
    return replace(device, cells=written), result


def _tops(news: tuple[int, float], num_tops: int) -> Scores:
    """Ids that tell from which draw they come."""
    token, logprob = news
    return Scores(
        logprob_N=frozen([logprob], np.float32),
        top_id_NK=frozen([[token + k for k in range(num_tops)]]),
        top_logprob_NK=frozen([[logprob] * num_tops], np.float32),
    )


def _scored(config: Config, cells: Mapping[Place, bytes], plan: StepPlan, row: ScoredRow) -> Scores:
    first = int(plan.start_R[row.row]) + row.first + 1
    found = []
    for i, target in enumerate(row.target_N.tolist()):
        context = _visible(config, cells, plan.tables[row.row], first + i)
        found.append(scores_of(context, target, row.num_tops))
    return Scores(
        logprob_N=frozen([logprob for logprob, _ in found], np.float32),
        top_id_NK=frozen([ids for _, ids in found]),
        top_logprob_NK=frozen(np.zeros((len(found), row.num_tops)), np.float32),
    )


def _hidden(
    config: Config, cells: Mapping[Place, bytes], plan: StepPlan, row: HiddenRow
) -> np.ndarray:
    start = int(plan.start_R[row.row])
    ends = range(start + row.first + 1, start + int(plan.count_R[row.row]) + 1)
    seen = [_visible(config, cells, plan.tables[row.row], end) for end in ends]
    return frozen([[[state_of(c, layer)] for c in seen] for layer in row.layers], np.float32)


def tear(config: Config, device: ToyDevice, plan: StepPlan, blobs: Mapping[str, Any]) -> ToyDevice:
    """The device after a step that failed at its worst: everything written, nothing right."""
    device = _prepared(device, plan, blobs)
    with device.cells.mutate() as cells:
        for row in range(len(plan.row_ids)):
            for place, _, _ in _window(config, plan, row, plan.tokens_T):
                cells[place] = TORN
        return replace(device, cells=cells.finish())


def toy_step(
    state: EngineState, sees: Any = None, policy: Policy = fcfs
) -> tuple[EngineState, Outputs]:
    """`purestep.engine.step.step` on the toy; `sees` is called with the plan."""
    host, plan = schedule(state.config, state.host, policy)
    if sees is not None:
        sees(plan)
    device, result = execute(state.config, state.device, plan, state.blobs)
    host, outputs = commit(state.config, host, plan, result)
    state = replace(state, host=host, device=device)
    return (drop_blobs(state) if outputs.finished else state), outputs


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


def _tokens_read(plan: StepPlan, blobs: Mapping[str, Any]) -> np.ndarray:
    """The plan's ids, and in place of an embedding a number that tells which it is."""
    tokens_T = plan.tokens_T.astype(np.int64)
    for span in plan.embedded:
        assert (tokens_T[span.index_E] == -1).all()
        rows = blobs[span.blob][span.first_row : span.first_row + len(span.index_E)]
        tokens_T[span.index_E] = [embedding_number(row) for row in rows]
    assert (tokens_T != -1).all(), "an embedding was forgotten"
    return tokens_T


def embedding_number(row_D: Tensor) -> int:
    """What the toy reads in place of an id; below -1."""
    return -2 - int.from_bytes(blake3(row_D.numpy().tobytes()).digest(4), "little")


def _window(
    config: Config, plan: StepPlan, row: int, tokens_T: np.ndarray
) -> Iterator[tuple[Place, int, int]]:
    """(place, token, position) of each token the row computes in this step."""
    first, start = int(plan.count_R[:row].sum()), int(plan.start_R[row])
    for i in range(int(plan.count_R[row])):
        position = start + i
        block = int(plan.tables[row][position // config.block_size])
        place = (block, position % config.block_size)
        yield place, int(tokens_T[first + i]), position


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
    columns = (rows.temperature_S, rows.top_k_S, rows.top_p_S, rows.min_p_S)
    edits = [e for place, e in rows.edits if place == s]
    return draw(
        _visible(config, cells, plan.tables[row], end),
        tuple(column[s].item() for column in columns),
        edits[0] if edits else None,
        int(rows.stream_S[s]),
        end,
        config.model.vocab_size,
    )
