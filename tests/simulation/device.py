"""A toy device in pure Python (design, section 6): `execute` without a model.

Its KV stores which token, adapter and position was written where, and what had been read before;
its next token is a hash of the whole visible context, read through the block table. So a wrong
block, a stale prefix hit, a lost token or a mixed-up adapter changes the output. The device is a
value: old ones stay valid, which the real one's do not.

It judges nothing: what is missing or mixed up is read as it lies there, and shows in the tokens.

A block is one string of `CELL` bytes a token, so that a context is one join over a table. A row
reads its context once for all tokens it computes in a step, each then sees those before it; but
every draw reads everything again behind all writes. So a block that another row, a copy or the row
itself has overwritten changes the draw of every row whose table names it, in that very step.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from blake3 import blake3
from immutables import Map, MapMutation
from torch import Tensor

from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.extras import edits_after, edits_of
from purestep.engine.policy import Policy, fcfs
from purestep.engine.schedule import schedule
from purestep.engine.step import drop_blobs
from purestep.simulation.media import content, media_number, moved_number
from purestep.state.engine import EngineState
from purestep.state.hashing import framed
from purestep.state.plan import (
    EncodedItem,
    HiddenRow,
    LogitEdits,
    Outputs,
    ScoredRow,
    StepPlan,
    StepResult,
)
from purestep.state.pytree import tree
from purestep.state.request import RequestState, frozen
from purestep.state.scores import Scores

CELL = 8  # bytes of KV a token
TORN = b"torntorn"  # what a failed step leaves behind


@tree
class ToyDevice:
    """The cells of each block, which part of which adapter version a row block holds, encoder
    outputs, and what the last step drew."""

    blocks: Map[int, bytes]
    row_blocks: Map[int, tuple[str, int]]
    encoded: Map[str, bytes]  # by identifier
    drawn: tuple[int, ...] = ()


def empty_device() -> ToyDevice:
    return ToyDevice(blocks=Map(), row_blocks=Map(), encoded=Map())


def cell_after(context: bytes, weights: str, version: str | None, token: int) -> bytes:
    """The KV of a token behind `context`: it depends on the position and on all that is visible."""
    return _cell(context, _reader(weights, version), token)


def _reader(weights: str, version: str | None) -> bytes:
    return weights.encode() + adapter_reader(version)


def adapter_reader(version: str | None) -> bytes:
    """The adapter of this version, as what is read with it tells."""
    return b"/base" if version is None else b"/lora" + version.encode()


def _cell(context: bytes, who: bytes, token: int) -> bytes:
    place = struct.pack("<qq", len(context) // CELL, token)
    return blake3(b"".join((context, who, place))).digest(CELL)


def context_of(
    tokens: Sequence[int], weights: str, version: str | None, context: bytes = b""
) -> bytes:
    """The cells of `tokens` alone, behind `context`."""
    who = _reader(weights, version)
    for token in tokens:
        context += _cell(context, who, token)
    return context


def draw(
    context: bytes,
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
    number = int.from_bytes(blake3(context + key).digest(8), "little")
    banned = set() if edits is None else set(edits.banned_E.tolist())
    while number % vocab_size in banned:
        number += 1
    return number % vocab_size, -float(number % 997) / 128


def _edit_key(edits: LogitEdits | None) -> bytes:
    """The edits but for bans, which `draw` obeys."""
    if edits is None:
        return b""
    factors = (edits.repetition_penalty, edits.presence_penalty, edits.frequency_penalty)
    ids_E = (edits.bias_id_E, edits.bias_E, edits.seen_E, edits.drawn_E, edits.count_E)
    return framed("edits", struct.pack("<ddd", *factors), *(x_E.tobytes() for x_E in ids_E))


def next_token(config: Config, context: bytes, record: RequestState) -> tuple[int, float]:
    """The law's right side: what a context of its own, with infinite memory and no cache, goes on
    with.

    `record` says how it is drawn: its sampling parameters, stream and generated tokens.
    """
    s = record.request.sampling
    knobs = (s.temperature, s.top_k, s.top_p, s.min_p)
    edits = edits_of(config, s, early=len(record.generated) < s.min_tokens)
    if edits is not None:
        edits = edits_after(edits, record.request.tokens, [record.generated])
    vocab = config.model.vocab_size
    return draw(context, knobs, edits, record.stream, len(context) // CELL, vocab)


def scores_of(context: bytes, target: int, num_tops: int) -> tuple[float, list[int]]:
    """(logprob, likeliest ids) of the token behind a context."""
    digest = blake3(context).digest(8 + num_tops)
    logprob = -float((int.from_bytes(digest[:8], "little") + target) % 997) / 128
    return logprob, list(digest[8:])


def state_of(context: bytes, layer: int) -> float:
    """The one hidden value a layer has behind a context."""
    return float(int.from_bytes(blake3(context + struct.pack("<i", layer)).digest(3), "little"))


def execute(
    config: Config, device: ToyDevice, plan: StepPlan, blobs: Mapping[str, Any]
) -> tuple[ToyDevice, StepResult]:
    """What a plan says, done to the toy: uploads, copies, all writes, then all draws."""
    device = _prepared(device, plan, blobs)
    made = {
        item.identifier: content(
            config.weights, blobs[item.blob], _encoder_read(device, plan, item)
        )
        for item in plan.encodes
    }
    tokens_T = _tokens_read(plan, blobs, device.encoded.update(made), device.drawn)
    kept = {item.identifier: made[item.identifier] for item in plan.encodes if item.keep}
    device = replace(device, encoded=device.encoded.update(kept))
    with device.blocks.mutate() as blocks:
        for row, tokens in enumerate(_windows(plan, tokens_T)):
            table, start = plan.tables[row].tolist(), int(plan.start_R[row])
            context = _visible(config, blocks, table, start)
            who = config.weights.encode() + _adapter_read(device, plan, row)
            for token in tokens:
                context += _cell(context, who, token)
            _write_(config, blocks, table, start, context[start * CELL :])
        news = [_drawn(config, blocks, plan, row, s) for s, row in enumerate(_sampled(plan))]
        scored = [_scored(config, blocks, plan, row) for row in plan.scored]
        hidden = [_hidden(config, blocks, plan, row) for row in plan.hidden]
        written = blocks.finish()
    tops = np.flatnonzero(plan.sampling.num_tops_S >= 0).tolist()
    result = StepResult(
        token_S=frozen([token for token, _ in news]),
        logprob_S=frozen([logprob for _, logprob in news], np.float32),
        tops=tuple(_tops(news[s], int(plan.sampling.num_tops_S[s])) for s in tops),
        scored=tuple(scored),
        hidden=tuple(hidden),
    )
    return replace(device, blocks=written, drawn=tuple(token for token, _ in news)), result


def _tops(news: tuple[int, float], num_tops: int) -> Scores:
    """Ids that tell from which draw they come."""
    token, logprob = news
    return Scores(
        logprob_N=frozen([logprob], np.float32),
        top_id_NK=frozen([[token + k for k in range(num_tops)]]),
        top_logprob_NK=frozen([[logprob] * num_tops], np.float32),
    )


def _scored(config: Config, blocks: Mapping[int, bytes], plan: StepPlan, row: ScoredRow) -> Scores:
    first = int(plan.start_R[row.row]) + row.first + 1
    context = _context(config, blocks, plan, row.row)
    found = [
        scores_of(context[: (first + i) * CELL], target, row.num_tops)
        for i, target in enumerate(row.target_N.tolist())
    ]
    return Scores(
        logprob_N=frozen([logprob for logprob, _ in found], np.float32),
        top_id_NK=frozen([ids for _, ids in found]),
        top_logprob_NK=frozen(np.zeros((len(found), row.num_tops)), np.float32),
    )


def _hidden(
    config: Config, blocks: Mapping[int, bytes], plan: StepPlan, row: HiddenRow
) -> np.ndarray:
    context = _context(config, blocks, plan, row.row)
    first = int(plan.start_R[row.row]) + row.first + 1
    seen = [context[: end * CELL] for end in range(first, len(context) // CELL + 1)]
    return frozen([[[state_of(c, layer)] for c in seen] for layer in row.layers], np.float32)


def tear(config: Config, device: ToyDevice, plan: StepPlan, blobs: Mapping[str, Any]) -> ToyDevice:
    """The device after a step that failed at its worst: everything written, nothing right."""
    device = _prepared(device, plan, blobs)
    with device.blocks.mutate() as blocks:
        for row, tokens in enumerate(_windows(plan, plan.tokens_T)):
            table, start = plan.tables[row].tolist(), int(plan.start_R[row])
            _write_(config, blocks, table, start, TORN * len(tokens))
        return replace(device, blocks=blocks.finish())


def spoil(
    config: Config, device: ToyDevice, plan: StepPlan, result: StepResult, row: int
) -> tuple[ToyDevice, StepResult]:
    """A step of which one row's logits turn out not to be finite: what it wrote is worth nothing,
    and what it drew and scored says so."""
    start, count = int(plan.start_R[row]), int(plan.count_R[row])
    with device.blocks.mutate() as blocks:
        _write_(config, blocks, plan.tables[row].tolist(), start, TORN * count)
        device = replace(device, blocks=blocks.finish())
    logprob_S = result.logprob_S.copy()
    logprob_S[[s for s, r in enumerate(_sampled(plan)) if r == row]] = np.nan
    scored = tuple(
        replace(scores, logprob_N=frozen(np.full(len(scores.logprob_N), np.nan), np.float32))
        if probe.row == row
        else scores
        for probe, scores in zip(plan.scored, result.scored, strict=True)
    )
    return device, replace(result, logprob_S=frozen(logprob_S, np.float32), scored=scored)


def misfit(
    config: Config, device: ToyDevice, plan: StepPlan, result: StepResult, name: str
) -> tuple[ToyDevice, StepResult]:
    """A step of which one item's output turns out not to be as long as requests say: none of its
    rows were put in place, so from there on what rows wrote is worth nothing."""
    said = {item.identifier: item.num_embeds for item in plan.encodes}[name]
    placed = {place for m in plan.merges if m.identifier == name for place in m.index_E.tolist()}
    first = 0
    with device.blocks.mutate() as blocks:
        for row, count in enumerate(plan.count_R.tolist()):
            own = [place - first for place in placed if first <= place < first + count]
            first += count
            if own:
                table, start = plan.tables[row].tolist(), int(plan.start_R[row]) + min(own)
                _write_(config, blocks, table, start, TORN * (count - min(own)))
        written = blocks.finish()
    encoded = device.encoded.set(name, TORN) if name in device.encoded else device.encoded
    faults = ((name, said, f"{said} embeddings are said, its encoder gave {said + 1}"),)
    return replace(device, blocks=written, encoded=encoded), replace(result, faults=faults)


def toy_step(
    state: EngineState,
    sees: Callable[[StepPlan, StepResult], object] | None = None,
    policy: Policy = fcfs,
) -> tuple[EngineState, Outputs]:
    """`purestep.engine.step.step` on the toy; `sees` is called with the plan and its result."""
    host, plan = schedule(state.config, state.host, policy)
    device, result = execute(state.config, state.device, plan, state.blobs)
    host, outputs = commit(state.config, host, plan, result)
    if sees is not None:
        sees(plan, result)
    state = replace(state, host=host, device=device)
    return (drop_blobs(state) if outputs.finished else state), outputs


def _prepared(device: ToyDevice, plan: StepPlan, blobs: Mapping[str, Any]) -> ToyDevice:
    if not (plan.uploads or plan.copies or plan.drops):
        return device
    encoded = Map({name: x for name, x in device.encoded.items() if name not in plan.drops})
    row_blocks, blocks = device.row_blocks.mutate(), device.blocks.mutate()
    for place in plan.uploads:
        version = blobs[place.version].version
        row_blocks.update({block: (version, i) for i, block in enumerate(place.row_blocks)})
    for source, target in plan.copies:
        blocks[target] = blocks.get(source, b"")
    return replace(device, blocks=blocks.finish(), row_blocks=row_blocks.finish(), encoded=encoded)


def _adapter_read(device: ToyDevice, plan: StepPlan, row: int) -> bytes:
    """The adapter that a row meets, as its slot's row blocks tell it."""
    return _rows_read(device, plan, int(plan.slot_R[row]))


def _encoder_read(device: ToyDevice, plan: StepPlan, item: EncodedItem) -> bytes:
    """The adapter that an item's encoder meets."""
    slots = {place.version: place.slot for place in plan.residents}
    return _rows_read(device, plan, slots.get(item.version, -1))


def _rows_read(device: ToyDevice, plan: StepPlan, slot: int) -> bytes:
    if slot < 0:
        return b"/base"
    parts = [
        device.row_blocks.get(block)
        for place in plan.residents
        if place.slot == slot
        for block in place.row_blocks
    ]
    version = parts[0][0] if parts and parts[0] else ""
    whole = parts == [(version, part) for part in range(len(parts))]
    return b"/lora" + (version if whole else f"a mixture {parts}").encode()


def _tokens_read(
    plan: StepPlan,
    blobs: Mapping[str, Any],
    outputs: Mapping[str, bytes],
    drawn: tuple[int, ...],
) -> np.ndarray:
    """The plan's ids, those among them that the step before drew, and in place of an embedding a
    number that tells which it is."""
    gathered = np.flatnonzero(plan.gathered_T >= 0)
    moved = plan.position_3T is not None
    if not (plan.embedded or plan.merges or moved or len(gathered)):
        return plan.tokens_T
    tokens_T = plan.tokens_T.astype(np.int64)
    tokens_T[gathered] = [drawn[place] for place in plan.gathered_T[gathered].tolist()]
    for span in plan.merges:
        output = outputs.get(span.identifier, b"missing")
        rows = range(span.first_row, span.first_row + len(span.index_E))
        tokens_T[span.index_E] = [media_number(output, row) for row in rows]
    for span in plan.embedded:
        rows = blobs[span.blob][span.first_row : span.first_row + len(span.index_E)]
        tokens_T[span.index_E] = [embedding_number(row) for row in rows]
    if plan.position_3T is None:
        return tokens_T
    spans = zip(plan.start_R.tolist(), plan.count_R.tolist(), strict=True)
    places = [place for start, count in spans for place in range(start, start + count)]
    triples = map(tuple, plan.position_3T.T.tolist())
    return np.array(
        [moved_number(*x) for x in zip(tokens_T.tolist(), places, triples, strict=True)]
    )


def embedding_number(row_D: Tensor) -> int:
    """What the toy reads in place of an id; below -1."""
    return -2 - int.from_bytes(blake3(row_D.numpy().tobytes()).digest(4), "little")


def _windows(plan: StepPlan, tokens_T: np.ndarray) -> Iterator[list[int]]:
    """The tokens that each row computes in this step."""
    tokens, first = tokens_T.tolist(), 0
    for count in plan.count_R.tolist():
        yield tokens[first : first + count]
        first += count


def _write_(
    config: Config, blocks: MapMutation[int, bytes], table: list[int], start: int, cells: bytes
) -> None:
    """Put cells at the positions from `start` on; what lies behind them in the last block stays."""
    size = config.block_size * CELL
    at, end = start * CELL, start * CELL + len(cells)
    while at < end:
        block, offset = table[at // size], at % size
        count = min(size - offset, end - at)
        old = blocks.get(block, b"").ljust(size, b"\0")
        new = cells[at - start * CELL :][:count]
        blocks[block] = old[:offset] + new + old[offset + count :]
        at += count


def _visible(config: Config, blocks: Mapping[int, bytes], table: list[int], count: int) -> bytes:
    """The first `count` cells of a sequence, read through its block table."""
    used = table[: -(-count // config.block_size)]
    size = config.block_size * CELL
    return b"".join([blocks.get(block, b"").ljust(size, b"\0") for block in used])[: count * CELL]


def _context(config: Config, blocks: Mapping[int, bytes], plan: StepPlan, row: int) -> bytes:
    """All that is visible at the end of a row's step."""
    end = int(plan.start_R[row]) + int(plan.count_R[row])
    return _visible(config, blocks, plan.tables[row].tolist(), end)


def _sampled(plan: StepPlan) -> list[int]:
    return np.flatnonzero(plan.sampled_R).tolist()


def _drawn(
    config: Config, blocks: Mapping[int, bytes], plan: StepPlan, row: int, s: int
) -> tuple[int, float]:
    rows = plan.sampling
    columns = (rows.temperature_S, rows.top_k_S, rows.top_p_S, rows.min_p_S)
    edits = [e for place, e in rows.edits if place == s]
    return draw(
        _context(config, blocks, plan, row),
        tuple(column[s].item() for column in columns),
        edits[0] if edits else None,
        int(rows.stream_S[s]),
        int(rows.position_S[s]),
        config.model.vocab_size,
    )
