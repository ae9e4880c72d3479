"""The only effect: what a plan says, done to the device. Takes no decisions.

T token rows with padding, R request rows with padding, M blocks of the longest row, S sampled rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from purestep.engine.config import Config
from purestep.engine.encode import encoded_outputs, merged_rows
from purestep.engine.graphs import can_replay, graphs_of, replay
from purestep.engine.pack import pack, pack_fused, pack_vocab
from purestep.engine.pool import Pool, advance_, claim, copy_blocks_, upload_adapter_
from purestep.engine.program import Program
from purestep.engine.sampling import Meanwhile, sampled, score_rows
from purestep.models.decoder import forward, logits
from purestep.models.fused import fused_forward
from purestep.state.batch import Batch
from purestep.state.engine import DeviceState
from purestep.state.plan import ScoredRow, StepPlan, StepResult
from purestep.state.request import frozen
from purestep.state.scores import Scores


def execute(
    program: Program,
    device: DeviceState,
    plan: StepPlan,
    blobs: Mapping[str, Any],
    meanwhile: Meanwhile | None = None,
) -> tuple[DeviceState, StepResult]:
    """Run a plan on the pool behind `device`, which is donated: only the returned handle is valid.

    `meanwhile` is called, where that helps, with the sampled tokens on the device, after all is
    queued and before anything is waited for.

    Raises DonatedStateError for a spent handle. When it raises anything else the handle stays
    valid; if the plan overwrote content, the pool refuses further steps until `recover`.
    """
    pool = claim(device)
    if not (plan.row_ids or plan.copies or plan.drops):
        return device, StepResult(token_S=frozen(()), logprob_S=frozen((), np.float32))
    try:
        result = _run(program, pool, plan, blobs, meanwhile)
    except BaseException:
        if not plan.overwrites.empty:
            pool.torn = plan.overwrites
        raise
    return advance_(pool, f"step {plan.step}"), result


def _run(
    program: Program,
    pool: Pool,
    plan: StepPlan,
    blobs: Mapping[str, Any],
    meanwhile: Meanwhile | None,
) -> StepResult:
    replayed = program.graphs and bool(plan.row_ids) and can_replay(pool.config, plan)
    if pool.graphs is not None and not replayed:
        pool.graphs.ahead = None  # it belongs to the step before
    for identifier in plan.drops:
        pool.encoded.pop(identifier, None)
    with torch.inference_mode():
        outputs = encoded_outputs(program, plan, blobs)
    for place in plan.uploads:
        upload_adapter_(pool, place, blobs[place.version])
    for source, target in plan.copies:  # one by one: a later copy may read what an earlier wrote
        copy_blocks_(pool, pool, [source], [target])
    if not plan.row_ids:
        return StepResult(token_S=frozen(()), logprob_S=frozen((), np.float32))
    with torch.inference_mode():
        if replayed:
            raw_RV = replay(program, pool, plan)
            return StepResult(**sampled(raw_RV, plan.sampling, program.processors, meanwhile))
        seen: list[list[torch.Tensor]] = [[] for _ in plan.hidden]
        embeds = _embeds(program, plan, blobs, pool.encoded | outputs)
        batch, hidden_TD = _forward(program, pool, plan, embeds, seen)
        result = StepResult(
            **_sampled(program, pool, plan, batch, hidden_TD, meanwhile),
            scored=tuple(_scored(program, pool, plan, row, hidden_TD) for row in plan.scored),
            hidden=_hidden_arrays(program.config, plan, seen),
        )
    # At the end, as the state before a step that fails knows nothing of them.
    pool.encoded.update({i.identifier: outputs[i.identifier] for i in plan.encodes if i.keep})
    return result


def _forward(
    program: Program,
    pool: Pool,
    plan: StepPlan,
    embeds: tuple[torch.Tensor, torch.Tensor] | None,
    seen: list[list[torch.Tensor]],
) -> tuple[Batch, torch.Tensor]:
    """The plan's batch and its hidden states; `seen` takes what `plan.hidden` asks for."""
    config, params = program.config, program.params
    extras = {
        "embeds": embeds,
        "observe": _observer(config, plan, seen) if plan.hidden else None,
    }
    if program.fused:
        batch = pack_fused(config, plan, graphs_of(pool).staging)
        return batch, fused_forward(
            params, pool.layers, pool.kv, batch, config.model, pool.embed, **extras
        )
    batch = pack(config, plan)
    return batch, forward(
        params, pool.layers, pool.kv, batch, config.model, program.layer, pool.embed, **extras
    )


def _sampled(
    program: Program,
    pool: Pool,
    plan: StepPlan,
    batch: Batch,
    hidden_TD: torch.Tensor,
    meanwhile: Meanwhile | None,
) -> dict[str, Any]:
    if not plan.sampled_R.any():
        return {"token_S": frozen(()), "logprob_S": frozen((), np.float32)}
    index_S, lora = batch.logits_index_S, batch.head_lora
    raw_SV = logits(program.params, hidden_TD, index_S, pool.head, lora)
    return sampled(raw_SV, plan.sampling, program.processors, meanwhile)


def _scored(
    program: Program, pool: Pool, plan: StepPlan, row: ScoredRow, hidden_TD: torch.Tensor
) -> Scores:
    first = int(plan.count_R[: row.row].sum()) + row.first

    def head(start: int, end: int) -> torch.Tensor:
        index_C = torch.arange(first + start, first + end, device=hidden_TD.device)
        slot_C = np.full(end - start, plan.slot_R[row.row])
        lora = pack_vocab(program.config, plan, "head", slot_C, len(slot_C))
        return logits(program.params, hidden_TD, index_C, pool.head, lora)

    return score_rows(head, row.target_N, row.num_tops)


def _observer(
    config: Config, plan: StepPlan, seen: list[list[torch.Tensor]]
) -> Callable[[int, torch.Tensor], None]:
    """Copies what `plan.hidden` asks for out of each layer, in ascending order of layers."""
    first_R = np.cumsum(plan.count_R) - plan.count_R
    windows = [
        (int(first_R[h.row]) + h.first, int(first_R[h.row] + plan.count_R[h.row]))
        for h in plan.hidden
    ]

    def observe(layer: int, h_TD: torch.Tensor) -> None:
        for row, (start, end), kept in zip(plan.hidden, windows, seen, strict=True):
            if layer in _layer_numbers(config, row.layers):
                kept.append(h_TD[start:end].float().cpu().clone())

    return observe


def _layer_numbers(config: Config, layers: tuple[int, ...]) -> list[int]:
    """Layers as asked for, counted from 0."""
    return [layer % (config.model.num_layers + 1) for layer in layers]


def _hidden_arrays(
    config: Config, plan: StepPlan, seen: list[list[torch.Tensor]]
) -> tuple[np.ndarray, ...]:
    """What was observed, in the order in which each row asked for layers."""
    arrays = []
    for row, kept in zip(plan.hidden, seen, strict=True):
        numbers = _layer_numbers(config, row.layers)
        by_layer = dict(zip(sorted(set(numbers)), kept, strict=True))
        arrays.append(frozen([by_layer[n].numpy() for n in numbers], np.float32))
    return tuple(arrays)


def _embeds(
    program: Program, plan: StepPlan, blobs: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(index_E, rows_ED): which token rows enter as embeddings, and those."""
    if not (plan.embedded or plan.merges):
        return None
    device = program.config.device
    spans = [
        (s.index_E, blobs[s.blob][s.first_row : s.first_row + len(s.index_E)].to(device))
        for s in plan.embedded
    ]
    spans += merged_rows(program, plan, blobs, outputs)
    index_E = np.concatenate([index for index, _ in spans])
    return torch.tensor(index_E, dtype=torch.int64, device=device), torch.cat(
        [rows for _, rows in spans]
    )
