"""A plan's index tensors. Part of `execute`.

T token rows with padding, R request rows with padding, M blocks of the longest row, S sampled rows,
E entries of adapter rows in C blocks of 8, X tiles of I token rows of one slot, G slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.engine.config import Config
from purestep.engine.pool import row_index
from purestep.engine.upload import Arrays, Fields, Spots, fill_, layout, sent
from purestep.ops.lora_add import chunk_spans
from purestep.ops.lora_linear import CHUNK, num_tiles, tile_size
from purestep.ops.lora_tiles import tile_arrays
from purestep.state.adapters import ROW_BLOCK, Residence
from purestep.state.batch import Batch, EmbedLora, LoraBatch, LoraTiles
from purestep.state.plan import BatchDescriptor, StepPlan
from purestep.state.tables import block_matrix


def pack(config: Config, plan: StepPlan) -> Batch:
    """A plan's tensors, padded to its descriptor. Padding writes no KV and has no adapter."""
    arrays = pack_arrays(config, plan)
    slot_T = slots(plan)
    return Batch(
        **sent(arrays, config.device),
        lora=pack_lora(config, plan.residents, slot_T, plan.descriptor.num_tokens)
        if plan.residents
        else None,
        **_vocab_batches(config, plan, slot_T, arrays["logits_index_S"]),
    )


def pack_arrays(config: Config, plan: StepPlan, table_rows: int | None = None) -> Arrays:
    """The index fields of a Batch; of block tables there are `table_rows`, by default with those of
    padding."""
    B, shape = config.block_size, plan.descriptor
    count_R, T = plan.count_R, shape.num_tokens
    row_T = np.repeat(np.arange(len(count_R)), count_R)
    first_R = np.cumsum(count_R) - count_R
    position_T = plan.start_R[row_T] + np.arange(len(row_T)) - first_R[row_T]
    num_tables = shape.num_rows if table_rows is None else table_rows
    table_RM = block_matrix(plan.tables, num_tables, int(plan.tables.length_R.max()))
    kv_index_T = table_RM[row_T, position_T // B].astype(np.int64) * B + position_T % B
    query_start_R1 = np.full(shape.num_rows + 1, len(row_T), np.int32)
    query_start_R1[: len(count_R)] = first_R
    context_len_R = np.zeros(shape.num_rows, np.int32)
    context_len_R[: len(count_R)] = plan.start_R + count_R
    return {
        # An embedding's place may hold -1; any valid id will do there.
        "token_T": _padded(plan.tokens_T.clip(min=0).astype(np.int64), T, 0),
        **_positions(plan, position_T, T),
        **({} if plan.end_T is None else {"end_T": _padded(plan.end_T.astype(np.int64), T, 0)}),
        "kv_index_T": _padded(kv_index_T, T, -1),
        "query_start_R1": query_start_R1,
        "context_len_R": context_len_R,
        "block_table_RM": table_RM,
        "logits_index_S": (first_R + count_R - 1)[plan.sampled_R].astype(np.int64),
    }


def gather_(token_T: Tensor, plan: StepPlan, drawn_S: Tensor) -> None:
    """Put the ids that the step before drew where the plan wants them, on the device; does not
    wait."""
    place_N = np.flatnonzero(plan.gathered_T >= 0)
    from_N, N = plan.gathered_T[place_N], len(place_N)
    if place_N[-1] == N - 1 and (np.diff(from_N) == 1).all():  # as in most decode steps
        token_T[:N].copy_(drawn_S[int(from_N[0]) :][:N])
        return
    index = sent({"to": place_N.astype(np.int64), "from": from_N.astype(np.int64)}, token_T.device)
    ids_N = drawn_S.index_select(0, index["from"]).to(token_T.dtype)
    token_T.index_copy_(0, index["to"], ids_N)


def _positions(plan: StepPlan, place_T: np.ndarray, length: int) -> Arrays:
    """`position_T`, and `position_3T` where a token's three positions differ."""
    moved_3T = plan.position_3T
    if moved_3T is None:
        return {"position_T": _padded(place_T.astype(np.int64), length, 0)}
    found = {"position_T": _padded(moved_3T[0].astype(np.int64), length, 0)}
    if positions_differ(plan):
        padding = ((0, 0), (0, length - len(place_T)))
        found["position_3T"] = np.pad(moved_3T.astype(np.int64), padding)
    return found


def positions_differ(plan: StepPlan) -> bool:
    """Whether a token's time, height and width are not the same."""
    moved_3T = plan.position_3T
    return moved_3T is not None and bool((moved_3T != moved_3T[0]).any())


def slots(plan: StepPlan) -> np.ndarray:
    """The adapter slot of every token row, padding left out; -1 = base."""
    return np.repeat(plan.slot_R, plan.count_R)


def _vocab_batches(
    config: Config, plan: StepPlan, slot_T: np.ndarray, index_S: np.ndarray
) -> dict[str, Any]:
    return {
        "embed_lora": _pack_embed(config, plan, slot_T, plan.descriptor.num_tokens),
        "head_lora": pack_vocab(config, plan, "head", slot_T[index_S], len(index_S)),
    }


def _padded(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)), constant_values=filler)


def pack_lora(
    config: Config, residents: Sequence[Residence], slot_T: np.ndarray, num_rows: int
) -> LoraBatch:
    """Whose adapter row is whose, for the rows of a product; made once for all layers.

    `slot_T` is each row's slot, -1 for base rows; `num_rows` counts padding.
    """
    row_R = np.concatenate([row_index(place) for place in residents])
    owner_R = np.repeat(
        [place.slot for place in residents],
        [len(place.row_blocks) * ROW_BLOCK for place in residents],
    )
    order_R = np.argsort(row_R)
    slot_T = _padded(slot_T, num_rows, -1)
    foreign_TR = slot_T[:, None] != owner_R[order_R]
    return LoraBatch(
        **sent({"row_R": row_R[order_R], "foreign_TR": foreign_TR}, config.device),
        span_C2=chunk_spans(torch.from_numpy(foreign_TR)),
    )


def pack_vocab(
    config: Config, plan: StepPlan, linear: str, slot_X: np.ndarray, num_rows: int
) -> LoraBatch | None:
    """`pack_lora` for the embedding or the head: None where none of these rows adapts it."""
    mine = [place for place in plan.residents if linear in place.linears]
    slot_X = np.where(np.isin(slot_X, [place.slot for place in mine]), slot_X, -1)
    return pack_lora(config, mine, slot_X, num_rows) if (slot_X >= 0).any() else None


def _pack_embed(
    config: Config, plan: StepPlan, slot_T: np.ndarray, num_rows: int
) -> EmbedLora | None:
    lora = pack_vocab(config, plan, "embed", slot_T, num_rows)
    if lora is None:
        return None
    mine = [place for place in plan.residents if "embed" in place.linears]
    block_TC = np.full((num_rows, max(len(p.row_blocks) for p in mine)), -1)
    column_P = np.full(config.lora_rows, -1)
    for place in mine:
        tokens, num_blocks = np.flatnonzero(slot_T == place.slot), len(place.row_blocks)
        block_TC[tokens, :num_blocks] = place.row_blocks
        column_P[row_index(place)] = np.arange(num_blocks * ROW_BLOCK)
    places = sent({"block_TC": block_TC, "column_P": column_P}, config.device)
    return EmbedLora(lora=lora, **places)


def lora_tile_arrays(config: Config, plan: StepPlan) -> Arrays:
    """The fields of a LoraTiles; sizes depend on the descriptor and on the pool alone."""
    fields = lora_tile_fields(config, plan.descriptor)
    (entries,), (X, size) = fields["row_E"][0], fields["token_XI"][0]
    places = [(place.slot, place.row_blocks) for place in plan.residents]
    slot_T = _padded(slots(plan), plan.descriptor.num_tokens, -1)
    return tile_arrays(places, slot_T, entries // CHUNK, X, size)


def lora_tile_fields(config: Config, shape: BatchDescriptor) -> Fields:
    """Shapes and dtypes of a LoraTiles."""
    T, num_adapters = shape.num_tokens, shape.num_active_loras
    X, blocks = num_tiles(T, num_adapters), config.lora_rows // ROW_BLOCK
    chunks = -(-(blocks + num_adapters * (CHUNK // ROW_BLOCK - 1)) // (CHUNK // ROW_BLOCK))
    return {
        "row_E": ((chunks * CHUNK,), np.int32),
        "span_X2": ((1 + X, 2), np.int32),
        "token_XI": ((X, tile_size(T)), np.int32),
    }


@dataclass(slots=True, eq=False)
class Staging:
    """Two pinned buffers, used in turn, through which a step's arrays reach a GPU in one copy."""

    buffers: list[Tensor] = field(default_factory=lambda: [torch.empty(0, dtype=torch.uint8)] * 2)
    copied: list[Any] = field(default_factory=lambda: [None, None])  # events
    turn: int = 0

    def send(self, arrays: Arrays, device: str) -> Tensor:
        """The arrays' bytes in new memory on the device; does not wait."""
        spots, size = layout({name: (a.shape, a.dtype) for name, a in arrays.items()})
        self.turn ^= 1
        if self.copied[self.turn] is not None:
            self.copied[self.turn].synchronize()
        if self.buffers[self.turn].numel() < size:
            pin = torch.device(device).type == "cuda"
            self.buffers[self.turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=pin)
        pinned = self.buffers[self.turn][:size]
        fill_(pinned, arrays, spots)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        target.copy_(pinned, non_blocking=True)
        if target.is_cuda:
            self.copied[self.turn] = torch.cuda.Event()
            self.copied[self.turn].record()
        return target


def views(buffer: Tensor, spots: Spots, **others: Tensor) -> Batch:
    """A Batch over the bytes of a buffer, and over `others`."""
    tensors = others
    for name, (start, shape, dtype) in spots.items():
        nbytes = int(np.prod(shape)) * dtype.itemsize
        kind = torch.int64 if dtype == np.int64 else torch.int32
        tensors[name] = buffer[start : start + nbytes].view(kind).view(shape)
    names = ("row_E", "span_X2", "token_XI")
    lora = {name: tensors.pop(name) for name in names if name in tensors}
    return Batch(**tensors, lora=LoraTiles(**lora) if lora else None)


def pack_fused(config: Config, plan: StepPlan, staging: Staging) -> Batch:
    """`pack` for the fused decoder, in one copy."""
    arrays = pack_arrays(config, plan)
    index_S = arrays["logits_index_S"]
    if plan.residents:
        arrays |= lora_tile_arrays(config, plan)
    spots, _ = layout({name: (a.shape, a.dtype) for name, a in arrays.items()})
    batch = views(staging.send(arrays, config.device), spots)
    return replace(batch, **_vocab_batches(config, plan, slots(plan), index_S))


def bucket_fields(config: Config, shape: BatchDescriptor) -> Fields:
    """Shapes and dtypes of what a graph of this shape reads beside block tables, in the order of
    `bucket_arrays`."""
    T, R = shape.num_tokens, shape.num_rows
    fields = {
        "token_T": ((T,), np.int64),
        "position_T": ((T,), np.int64),
        "kv_index_T": ((T,), np.int64),
        "query_start_R1": ((R + 1,), np.int32),
        "context_len_R": ((R,), np.int32),
        "logits_index_S": ((R,), np.int64),
    }
    return fields | (lora_tile_fields(config, shape) if shape.has_lora else {})


def bucket_arrays(config: Config, plan: StepPlan) -> Arrays:
    """What a graph reads: `logits_index_S` has an entry for every row of the bucket, those of rows
    that sample first. Last come block tables, of the rows and columns in use alone: all of 256
    rows' at a context of 131,072 would be 8 MB to write and to send."""
    arrays = pack_arrays(config, plan, len(plan.row_ids))
    table_rm = arrays.pop("block_table_RM")
    arrays["logits_index_S"] = _padded(arrays["logits_index_S"], plan.descriptor.num_rows, 0)
    arrays |= lora_tile_arrays(config, plan) if plan.descriptor.has_lora else {}
    return arrays | {"block_table_RM": table_rm}
