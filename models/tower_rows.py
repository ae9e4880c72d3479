"""Whose adapter each row of a tower's products has, in one call of an encoder.

The decoder's mapping says nothing of it: a call has items of its own, in an order of its own, and
each item has other numbers of rows in the tower and in the projector. So every call brings the
items' slots, and a tower spreads them over its rows as it lays these out.

T rows of a product, D inputs and O outputs of a linear, P paged adapter rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from purestep.ops.lora_linear import Deltas, lora_add_tiles_, num_tiles, tile_size
from purestep.ops.lora_tiles import num_chunks, tile_arrays
from purestep.state.pytree import static, tree


@tree
class TowerRows:
    """Device rows of the resident adapters of one linear of a tower; as the decoder's."""

    a_SPD: Tensor
    b_PO: Tensor
    out_sizes: tuple[int, ...] = static()


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAdapters:
    """The adapters of one call's items. Some item has one: a call without any gets None."""

    rows: Mapping[str, TowerRows]  # by `FusedLinear.name`
    places: tuple[tuple[int, tuple[int, ...]], ...]  # (slot, row blocks) of each adapter
    slots: tuple[int, ...]  # of each item, in the order of the call; -1 = no adapter
    send: Callable[[dict[str, np.ndarray]], Mapping[str, Tensor]]  # to the tower's device


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdapters:
    """The same for the T rows of a product."""

    rows: Mapping[str, TowerRows]
    tiles: tuple[Tensor, Tensor, Tensor]  # as the fields of `Deltas`: row_E, span_X2, token_XI


def tower_name(names: Sequence[str]) -> str:
    """What stands for the linear of these children, as a checkpoint calls them, among adapters."""
    return f"tower.{names[0]}"


def in_order(adapters: ItemAdapters | None, order: Sequence[int]) -> ItemAdapters | None:
    """The same for the items in another order."""
    if adapters is None:
        return None
    return replace(adapters, slots=tuple(adapters.slots[i] for i in order))


def of_parts(adapters: ItemAdapters | None, counts: Sequence[int]) -> ItemAdapters | None:
    """The same for the parts of items, of which each has so many."""
    return in_order(adapters, np.repeat(np.arange(len(counts)), counts).tolist())


def spread(
    adapters: ItemAdapters | None, counts: Sequence[int], order_T: np.ndarray | None = None
) -> RowAdapters | None:
    """For products that have `counts` rows of each item, one item behind the other, or these rows
    in the order that `order_T` says."""
    if adapters is None:
        return None
    slot_T = np.repeat(adapters.slots, counts)
    slot_T, T = slot_T if order_T is None else slot_T[order_T], len(slot_T)
    chunks = num_chunks([blocks for _, blocks in adapters.places])
    most = num_tiles(T, len(adapters.places))
    arrays = tile_arrays(adapters.places, slot_T, chunks, most, tile_size(T))
    sent = adapters.send(arrays)
    tiles = sent["row_E"], sent["span_X2"], sent["token_XI"]
    return RowAdapters(rows=adapters.rows, tiles=tiles)


def add_adapters_(y: Tensor, x: Tensor, names: Sequence[str], adapters: RowAdapters) -> None:
    """Add to a product of the linear of these children each row's own delta, in place: y [..., O],
    x [..., D]."""
    own = adapters.rows[tower_name(names)]
    deltas = Deltas(own.a_SPD, own.b_PO, *adapters.tiles)
    x_TD = x.reshape(-1, x.shape[-1]).contiguous()
    lora_add_tiles_(y.view(-1, y.shape[-1]), x_TD, deltas, own.out_sizes)
