"""The only effect: what a plan says, done to the device. Takes no decisions.

T token rows with padding, R request rows with padding, M blocks of the longest row, S sampled rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from purestep.engine.config import Config, has_graph
from purestep.engine.encode import Faults, encoded_outputs, merged_rows
from purestep.engine.graphs import can_replay, graphs_of, replay
from purestep.engine.pack import gather_, pack, pack_fused, pack_vocab
from purestep.engine.pending import Pending, fetched, landed
from purestep.engine.pool import Pool, advance_, claim, copy_blocks_, upload_adapter_
from purestep.engine.program import Program
from purestep.engine.sampling import sampled, score_rows
from purestep.engine.upload import sent, sent_tensor
from purestep.models.decoder import add_deltas_, forward
from purestep.models.fused import fused_forward, padded_logits
from purestep.state.batch import Batch
from purestep.state.engine import DeviceState
from purestep.state.errors import StepError
from purestep.state.plan import ScoredRow, StepPlan, StepResult
from purestep.state.request import frozen
from purestep.state.scores import Scores

NOTHING = StepResult(token_S=frozen(()), logprob_S=frozen((), np.float32))

Drawn = tuple[int, torch.Tensor] | None
"""The last step that drew tokens, and these, on the device."""

Seen = list[list[Callable[[], tuple[np.ndarray, ...]]]]
"""For each row whose hidden states are asked for what waits for those of its layers, in ascending
order."""

Meanwhile = Callable[[torch.Tensor], StepPlan | None]
"""What the host does between queueing a step and waiting for it; takes token_S on the device. Tells
the decode step that it has queued in turn, for the same rows, if any."""


def execute(
    program: Program,
    device: DeviceState,
    plan: StepPlan,
    blobs: Mapping[str, Any],
    meanwhile: Meanwhile | None = None,
) -> tuple[DeviceState, StepResult]:
    """Run a plan on the pool behind `device`, which is donated: only the returned handle is valid.
    `launch` and `wait` in one.

    `meanwhile` is called, where that helps, with the sampled tokens on the device, after all is
    queued and before anything is waited for.

    Raises DonatedStateError for a spent handle, StepError where the plan wants tokens of a step
    that was not the last. When it raises anything else the handle stays valid; if the plan
    overwrote content, the pool refuses further steps until `recover`.
    """
    pool = claim(device)
    if not (plan.row_ids or plan.copies or plan.drops):
        return device, NOTHING
    with _torn_if_it_fails(pool, plan):
        (drawn, read), ahead = _queued(program, device, plan, blobs), None
        if meanwhile is not None and plan.sampled_R.any():
            with torch.inference_mode():
                ahead = meanwhile(drawn[1])
        result = read()
    if ahead is not None:  # to be taken over by a plan of just these tokens
        graphs_of(pool).ahead = program, replace(ahead, tokens_T=result.token_S)
    return advance_(replace(device, drawn=drawn), f"step {plan.step}"), result


def launch(
    program: Program, device: DeviceState, plan: StepPlan, blobs: Mapping[str, Any]
) -> DeviceState:
    """Queue a plan on the pool behind `device`, which is donated, without waiting for its results
    where the device allows that. They are the returned handle's, for `wait`. Raises as `execute`.
    """
    pool = claim(device)
    with _torn_if_it_fails(pool, plan):
        drawn, read = _queued(program, device, plan, blobs)
    launched = (*device.launched, Pending(step=plan.step, read=read))
    return advance_(replace(device, launched=launched, drawn=drawn), f"step {plan.step}")


def wait(device: DeviceState) -> tuple[DeviceState, StepResult]:
    """The result of the oldest plan that was launched, and the handle without it.

    Raises StepError where there is none. When it raises anything else, that plan's work is lost,
    and the handle refuses further steps until `recover`.
    """
    result = landed(device.launched)
    return replace(device, launched=device.launched[1:]), result


@contextmanager
def _torn_if_it_fails(pool: Pool, plan: StepPlan) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if not plan.overwrites.empty:
            pool.torn = plan.overwrites
        raise


def _queued(
    program: Program, device: DeviceState, plan: StepPlan, blobs: Mapping[str, Any]
) -> tuple[Drawn, Callable[[], StepResult]]:
    """Everything that the plan says, begun: the last draws from then on, and what waits for the
    result."""
    pool, drawn_S = device.pool, _drawn_before(device, plan)
    replayed = program.graphs and bool(plan.row_ids) and can_replay(pool.config, plan)
    if pool.graphs is not None and not replayed:
        pool.graphs.ahead = None  # it belongs to the step before
    for identifier in plan.drops:
        pool.encoded.pop(identifier, None)
    for place in plan.uploads:
        upload_adapter_(pool, place, blobs[place.version])
    with torch.inference_mode():
        outputs = encoded_outputs(program, pool, plan, blobs)
    for source, target in plan.copies:  # one by one: a later copy may read what an earlier wrote
        copy_blocks_(pool, pool, [source], [target])
    if not plan.row_ids:
        return device.drawn, lambda: NOTHING
    with torch.inference_mode():
        if replayed:
            raw_SV = replay(program, pool, plan, drawn_S)
            return _sampled(program, device, plan, raw_SV if len(raw_SV) else None, [], [], ())
        seen: Seen = [[] for _ in plan.hidden]
        embeds, faults = _embeds(program, pool, plan, blobs, pool.encoded | outputs)
        batch, hidden_TD = _forward(program, pool, plan, embeds, seen, drawn_S)
        raw_SV = None
        if plan.sampled_R.any():
            raw_SV = _logits(program, pool, plan, batch, hidden_TD)
        scores = [_scored(program, pool, plan, row, hidden_TD) for row in plan.scored]
        found = _sampled(program, device, plan, raw_SV, scores, seen, faults)
    # At the end, as the state before a step that fails knows nothing of them.
    kept = [i for i in plan.encodes if i.keep and len(outputs[i.identifier]) == i.num_embeds]
    pool.encoded.update({item.identifier: outputs[item.identifier] for item in kept})
    return found


def _drawn_before(device: DeviceState, plan: StepPlan) -> torch.Tensor | None:
    """The tokens of the step before, on the device, where the plan wants some of them."""
    if (plan.gathered_T < 0).all():
        return None
    step, drawn_S = device.drawn or (None, None)
    if step != plan.step - 1:
        raise StepError(
            f"step {plan.step} takes tokens that step {plan.step - 1} draws, but the last step "
            f"that this device ran and that drew any is {step}"
        )
    return drawn_S


def _sampled(
    program: Program,
    device: DeviceState,
    plan: StepPlan,
    raw_SV: torch.Tensor | None,
    scores: Sequence[Callable[[], Scores]],
    seen: Seen,
    faults: Faults,
) -> tuple[Drawn, Callable[[], StepResult]]:
    drawn, fields = device.drawn, None
    if raw_SV is not None:
        ring, processors = device.pool.ring, program.processors
        args = raw_SV, plan.sampling, processors, ring, plan.step
        token_S, fields = sampled(*args, program.ends)
        drawn = plan.step, token_S

    def read() -> StepResult:
        result = NOTHING if fields is None else StepResult(**fields())
        if not (scores or seen or faults):
            return result
        hidden = _hidden_arrays(program.config, plan, seen)
        scored = tuple(score() for score in scores)
        return replace(result, scored=scored, hidden=hidden, faults=faults)

    return drawn, read


def _forward(
    program: Program,
    pool: Pool,
    plan: StepPlan,
    embeds: tuple[torch.Tensor, torch.Tensor] | None,
    seen: Seen,
    drawn_S: torch.Tensor | None,
) -> tuple[Batch, torch.Tensor]:
    """The plan's batch and its hidden states; `seen` takes what `plan.hidden` asks for."""
    config, params = program.config, program.params
    extras = {
        "embed_fn": program.ends.embed,
        "embeds": embeds,
        "observe": _observer(config, plan, seen) if plan.hidden else None,
    }
    fused = program.fused
    batch = pack_fused(config, plan, graphs_of(pool).staging) if fused else pack(config, plan)
    if drawn_S is not None:
        gather_(batch.token_T, plan, drawn_S)
    if fused:
        args = batch, config.model, program.fused_layer, pool.embed
        uniform = _like_a_graph(program, plan) and plan.descriptor.uniform_decode
        extras["uniform"] = uniform and batch.end_T is None
        return batch, fused_forward(params, pool.layers, pool.kv, *args, **extras)
    args = batch, config.model, program.layer, pool.embed
    return batch, forward(params, pool.layers, pool.kv, *args, **extras)


def _like_a_graph(program: Program, plan: StepPlan) -> bool:
    """Whether a step is computed as the graph of its shape has it, though it is not replayed: what
    one row asks for must not change the bits of others."""
    return program.graphs and has_graph(program.config, plan.descriptor)


def _logits(
    program: Program, pool: Pool, plan: StepPlan, batch: Batch, hidden_TD: torch.Tensor
) -> torch.Tensor:
    """fp32 logits [S, V] of the rows that are sampled."""
    params, ends, index_S = program.params, program.ends, batch.logits_index_S
    if not _like_a_graph(program, plan):
        return ends.logits(params, hidden_TD, index_S, pool.head, batch.head_lora)
    R, S, (V, _) = plan.descriptor.num_rows, len(index_S), params.head_VD.shape
    out_RV = torch.empty((R, V), dtype=torch.float32, device=hidden_TD.device)
    if plan.descriptor.uniform_decode:
        padded_logits(params, hidden_TD, None, out_RV, ends)
        raw_SV = out_RV.index_select(0, index_S)
    else:
        padded_logits(params, hidden_TD, F.pad(index_S, (0, R - S)), out_RV, ends)
        raw_SV = out_RV[:S]
    if batch.head_lora is not None:
        x_SD = hidden_TD.index_select(0, index_S)
        add_deltas_(raw_SV, x_SD, pool.head, batch.head_lora, raw_SV.shape[1:])
    return raw_SV


def _scored(
    program: Program, pool: Pool, plan: StepPlan, row: ScoredRow, hidden_TD: torch.Tensor
) -> Callable[[], Scores]:
    first = int(plan.count_R[: row.row].sum()) + row.first

    def head(start: int, end: int) -> torch.Tensor:
        index_C = torch.arange(first + start, first + end, device=hidden_TD.device)
        slot_C = np.full(end - start, plan.slot_R[row.row])
        lora = pack_vocab(program.config, plan, "head", slot_C, len(slot_C))
        return program.ends.logits(program.params, hidden_TD, index_C, pool.head, lora)

    return score_rows(head, row.target_N, row.num_tops, program.ends)


def _observer(config: Config, plan: StepPlan, seen: Seen) -> Callable[[int, torch.Tensor], None]:
    """Copies what `plan.hidden` asks for out of each layer, in ascending order of layers."""
    first_R = np.cumsum(plan.count_R) - plan.count_R
    windows = [
        (int(first_R[h.row]) + h.first, int(first_R[h.row] + plan.count_R[h.row]))
        for h in plan.hidden
    ]

    def observe(layer: int, h_TD: torch.Tensor) -> None:
        for row, (start, end), kept in zip(plan.hidden, windows, seen, strict=True):
            if layer in _layer_numbers(config, row.layers):
                kept.append(fetched(h_TD[start:end].float().clone()))

    return observe


def _layer_numbers(config: Config, layers: tuple[int, ...]) -> list[int]:
    """Layers as asked for, counted from 0."""
    return [layer % (config.model.num_layers + 1) for layer in layers]


def _hidden_arrays(config: Config, plan: StepPlan, seen: Seen) -> tuple[np.ndarray, ...]:
    """What was observed, in the order in which each row asked for layers."""
    arrays = []
    for row, kept in zip(plan.hidden, seen, strict=True):
        numbers = _layer_numbers(config, row.layers)
        by_layer = dict(zip(sorted(set(numbers)), kept, strict=True))
        arrays.append(frozen([by_layer[n]()[0] for n in numbers], np.float32))
    return tuple(arrays)


def _embeds(
    program: Program,
    pool: Pool,
    plan: StepPlan,
    blobs: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, Faults]:
    """((index_E, rows): which token rows enter as embeddings, and those, if any; items that are not
    what was said of them). A prompt's own embeddings have nothing for deeper layers."""
    device = program.config.device
    rows = [
        sent_tensor(blobs[s.blob][s.first_row : s.first_row + len(s.index_E)], device)
        for s in plan.embedded
    ]
    merged, faults = merged_rows(program, pool, plan, blobs, outputs)
    rows += [own for _, own in merged]
    if not rows:
        return None, faults
    index_E = np.concatenate([s.index_E for s in plan.embedded] + [index for index, _ in merged])
    index = sent({"E": index_E.astype(np.int64)}, device)
    width = max(own.shape[1] for own in rows)
    rows = [F.pad(r, (0, width - r.shape[1])) if r.shape[1] < width else r for r in rows]
    return (index["E"], torch.cat(rows)), faults
