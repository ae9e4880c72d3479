"""The only effect: what a plan says, done to the device. Takes no decisions.

T token rows with padding, R request rows with padding, M blocks of the longest row, S sampled rows.
"""

from collections.abc import Mapping, Sequence
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
from purestep.models.decoder import forward, logits
from purestep.ops.lora_add import chunk_spans
from purestep.ops.sample import sample
from purestep.state.adapters import ROW_BLOCK, Residence
from purestep.state.batch import Batch, LoraBatch
from purestep.state.engine import DeviceState
from purestep.state.plan import StepPlan, StepResult
from purestep.state.request import frozen


def execute(
    program: Program, device: DeviceState, plan: StepPlan, blobs: Mapping[str, Any]
) -> tuple[DeviceState, StepResult]:
    """Run a plan on the pool behind `device`, which is donated: only the returned handle is valid.

    Raises DonatedStateError for a spent handle. When it raises anything else the handle stays
    valid; if the plan overwrote content, the pool refuses further steps until `recover`.
    """
    pool = claim(device)
    if not plan.row_ids and not plan.copies:
        return device, _empty_result()
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
        return _empty_result()
    with torch.inference_mode():
        batch = pack(program.config, plan)
        hidden_TD = forward(
            program.params, pool.layers, pool.kv, batch, program.config.model, program.layer
        )
        if not plan.sampled_R.any():
            return _empty_result()
        return _draw(logits(program.params, hidden_TD, batch.logits_index_S), plan)


def _draw(logits_SV: torch.Tensor, plan: StepPlan) -> StepResult:
    rows = plan.sampling
    columns = (rows.temperature_S, rows.top_k_S, rows.top_p_S, rows.stream_S.view(np.int64))
    tensors = [torch.from_numpy(c.copy()).to(logits_SV.device) for c in (*columns, rows.position_S)]
    token_S, logprob_S = sample(logits_SV, *tensors)
    return StepResult(
        token_S=frozen(token_S.cpu().numpy()), logprob_S=frozen(logprob_S.cpu().numpy(), np.float32)
    )


def _empty_result() -> StepResult:
    return StepResult(token_S=frozen(()), logprob_S=frozen((), np.float32))


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
    ints = {"dtype": torch.int32, "device": config.device}
    longs = {"dtype": torch.int64, "device": config.device}
    return Batch(
        token_T=torch.tensor(_padded(plan.tokens_T, T, 0), **longs),
        position_T=torch.tensor(_padded(position_T, T, 0), **longs),
        kv_index_T=torch.tensor(_padded(kv_index_T, T, -1), **longs),
        query_start_R1=torch.tensor(query_start_R1, **ints),
        context_len_R=torch.tensor(context_len_R, **ints),
        block_table_RM=torch.tensor(table_RM, **ints),
        logits_index_S=torch.tensor((first_R + count_R - 1)[plan.sampled_R], **longs),
        lora=pack_lora(config, plan.residents, slot_T, T) if plan.residents else None,
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
    bare_B = np.flatnonzero(slot_T < 0)
    return LoraBatch(
        row_R=torch.tensor(row_R[order_R], device=config.device),
        foreign_TR=foreign_TR.to(config.device),
        span_C2=chunk_spans(foreign_TR),
        bare_B=torch.tensor(bare_B, device=config.device),
    )
