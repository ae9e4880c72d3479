"""The only effect: what a plan says, done to the device. Takes no decisions.

T token rows with padding, R request rows with padding, M blocks of the longest row, S sampled rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from purestep.engine.config import Config
from purestep.engine.pool import (
    Pool,
    advance_,
    claim,
    copy_blocks_,
    row_index,
    upload_adapter_,
)
from purestep.engine.program import Program
from purestep.engine.sampling import sampled, score_rows
from purestep.models.decoder import forward, logits
from purestep.ops.lora_add import chunk_spans
from purestep.state.adapters import ROW_BLOCK, Residence
from purestep.state.batch import Batch, EmbedLora, LoraBatch
from purestep.state.engine import DeviceState
from purestep.state.plan import ScoredRow, StepPlan, StepResult
from purestep.state.request import frozen
from purestep.state.scores import Scores


def execute(
    program: Program, device: DeviceState, plan: StepPlan, blobs: Mapping[str, Any]
) -> tuple[DeviceState, StepResult]:
    """Run a plan on the pool behind `device`, which is donated: only the returned handle is valid.

    Raises DonatedStateError for a spent handle. When it raises anything else the handle stays
    valid; if the plan overwrote content, the pool refuses further steps until `recover`.
    """
    pool = claim(device)
    if not plan.row_ids and not plan.copies:
        return device, StepResult(token_S=frozen(()), logprob_S=frozen((), np.float32))
    try:
        result = _run(program, pool, plan, blobs)
    except BaseException:
        if not plan.overwrites.empty:
            pool.torn = plan.overwrites
        raise
    return advance_(pool, f"step {plan.step}"), result


def _run(program: Program, pool: Pool, plan: StepPlan, blobs: Mapping[str, Any]) -> StepResult:
    for place in plan.uploads:
        upload_adapter_(pool, place, blobs[place.version])
    for source, target in plan.copies:  # one by one: a later copy may read what an earlier wrote
        copy_blocks_(pool, pool, [source], [target])
    if not plan.row_ids:
        return StepResult(token_S=frozen(()), logprob_S=frozen((), np.float32))
    with torch.inference_mode():
        batch = pack(program.config, plan)
        seen: list[list[torch.Tensor]] = [[] for _ in plan.hidden]
        hidden_TD = forward(
            program.params,
            pool.layers,
            pool.kv,
            batch,
            program.config.model,
            program.layer,
            pool.embed,
            embeds=_embeds(program.config, plan, blobs),
            observe=_observer(program.config, plan, seen) if plan.hidden else None,
        )
        return StepResult(
            **_sampled(program, pool, plan, batch, hidden_TD),
            scored=tuple(_scored(program, pool, plan, row, hidden_TD) for row in plan.scored),
            hidden=_hidden_arrays(program.config, plan, seen),
        )


def _sampled(
    program: Program, pool: Pool, plan: StepPlan, batch: Batch, hidden_TD: torch.Tensor
) -> dict[str, Any]:
    if not plan.sampled_R.any():
        return {"token_S": frozen(()), "logprob_S": frozen((), np.float32)}
    index_S, lora = batch.logits_index_S, batch.head_lora
    raw_SV = logits(program.params, hidden_TD, index_S, pool.head, lora)
    return sampled(raw_SV, plan.sampling, program.processors)


def _scored(
    program: Program, pool: Pool, plan: StepPlan, row: ScoredRow, hidden_TD: torch.Tensor
) -> Scores:
    first = int(plan.count_R[: row.row].sum()) + row.first

    def head(start: int, end: int) -> torch.Tensor:
        index_C = torch.arange(first + start, first + end, device=hidden_TD.device)
        slot_C = np.full(end - start, plan.slot_R[row.row])
        lora = _pack_vocab(program.config, plan, "head", slot_C, len(slot_C))
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
    config: Config, plan: StepPlan, blobs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(index_E, rows_ED): which token rows enter as embeddings, and those."""
    if not plan.embedded:
        return None
    index_E = np.concatenate([span.index_E for span in plan.embedded])
    rows = [blobs[s.blob][s.first_row : s.first_row + len(s.index_E)] for s in plan.embedded]
    device = config.device
    return torch.tensor(index_E, dtype=torch.int64, device=device), torch.cat(rows).to(device)


def pack(config: Config, plan: StepPlan) -> Batch:
    """A plan's index tensors, padded to its descriptor. Padding writes no KV and has no adapter."""
    B, shape = config.block_size, plan.descriptor
    count_R, T = plan.count_R, shape.num_tokens
    row_T = np.repeat(np.arange(len(count_R)), count_R)
    slot_T = plan.slot_R[row_T]
    first_R = np.cumsum(count_R) - count_R
    position_T = plan.start_R[row_T] + np.arange(len(row_T)) - first_R[row_T]
    table_RM = _block_table(plan, shape.num_rows)
    kv_index_T = table_RM[row_T, position_T // B] * B + position_T % B
    query_start_R1 = np.full(shape.num_rows + 1, len(row_T))
    query_start_R1[: len(count_R)] = first_R
    context_len_R = np.zeros(shape.num_rows, np.int64)
    context_len_R[: len(count_R)] = plan.start_R + count_R
    index_S = (first_R + count_R - 1)[plan.sampled_R]
    ints = {"dtype": torch.int32, "device": config.device}
    longs = {"dtype": torch.int64, "device": config.device}
    return Batch(
        # An embedding's place holds -1; any valid id will do there.
        token_T=torch.tensor(_padded(plan.tokens_T.clip(min=0), T, 0), **longs),
        position_T=torch.tensor(_padded(position_T, T, 0), **longs),
        kv_index_T=torch.tensor(_padded(kv_index_T, T, -1), **longs),
        query_start_R1=torch.tensor(query_start_R1, **ints),
        context_len_R=torch.tensor(context_len_R, **ints),
        block_table_RM=torch.tensor(table_RM, **ints),
        logits_index_S=torch.tensor(index_S, **longs),
        lora=pack_lora(config, plan.residents, slot_T, T) if plan.residents else None,
        embed_lora=_pack_embed(config, plan, slot_T, T),
        head_lora=_pack_vocab(config, plan, "head", slot_T[index_S], len(index_S)),
    )


def _block_table(plan: StepPlan, num_rows: int) -> np.ndarray:
    table_RM = np.zeros((num_rows, max(map(len, plan.tables))), np.int64)
    for row, table in enumerate(plan.tables):
        table_RM[row, : len(table)] = table
    return table_RM


def _padded(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)), constant_values=filler)


def pack_lora(
    config: Config, residents: Sequence[Residence], slot_T: np.ndarray, num_rows: int
) -> LoraBatch:
    """Whose adapter row is whose, for the rows of a product; made once for all layers.

    `slot_T` is each row's slot, -1 for base rows; `num_rows` counts padding.
    """
    row_R = np.concatenate([row_index(place).numpy() for place in residents])
    owner_R = np.repeat(
        [place.slot for place in residents],
        [len(place.row_blocks) * ROW_BLOCK for place in residents],
    )
    order_R = np.argsort(row_R)
    slot_T = _padded(slot_T, num_rows, -1)
    foreign_TR = torch.from_numpy(slot_T[:, None] != owner_R[order_R])
    return LoraBatch(
        row_R=torch.tensor(row_R[order_R], device=config.device),
        foreign_TR=foreign_TR.to(config.device),
        span_C2=chunk_spans(foreign_TR),
    )


def _pack_vocab(
    config: Config, plan: StepPlan, linear: str, slot_X: np.ndarray, num_rows: int
) -> LoraBatch | None:
    """`pack_lora` for the embedding or the head: None where none of these rows adapts it."""
    mine = [place for place in plan.residents if linear in place.linears]
    slot_X = np.where(np.isin(slot_X, [place.slot for place in mine]), slot_X, -1)
    return pack_lora(config, mine, slot_X, num_rows) if (slot_X >= 0).any() else None


def _pack_embed(
    config: Config, plan: StepPlan, slot_T: np.ndarray, num_rows: int
) -> EmbedLora | None:
    lora = _pack_vocab(config, plan, "embed", slot_T, num_rows)
    if lora is None:
        return None
    mine = [place for place in plan.residents if "embed" in place.linears]
    block_TC = np.full((num_rows, max(len(p.row_blocks) for p in mine)), -1)
    column_P = torch.full((config.lora_rows,), -1)
    for place in mine:
        tokens, num_blocks = np.flatnonzero(slot_T == place.slot), len(place.row_blocks)
        block_TC[tokens, :num_blocks] = place.row_blocks
        column_P[row_index(place)] = torch.arange(num_blocks * ROW_BLOCK)
    block_TC = torch.tensor(block_TC, dtype=torch.int64, device=config.device)
    return EmbedLora(lora=lora, block_TC=block_TC, column_P=column_P.to(config.device))
