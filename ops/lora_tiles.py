"""Which rows meet which adapter, in tiles of one adapter each: the metadata of `Deltas`. Pure.

T rows of a product, E entries of adapter rows in C blocks of 8, X tiles of I rows, S slots.
"""

from collections.abc import Sequence

import numpy as np

from purestep.ops.lora_linear import CHUNK
from purestep.state.adapters import ROW_BLOCK

PER_CHUNK = CHUNK // ROW_BLOCK


def num_chunks(row_blocks: Sequence[Sequence[int]]) -> int:
    """Chunks of entries that adapters with these row blocks take, each whole ones of its own."""
    return sum(-(-len(blocks) // PER_CHUNK) for blocks in row_blocks)


def tile_arrays(
    places: Sequence[tuple[int, Sequence[int]]],
    slot_T: np.ndarray,
    chunks: int,
    tiles: int,
    size: int,
) -> dict[str, np.ndarray]:
    """`row_E`, `span_X2` and `token_XI` of `Deltas`, int32, for adapters at `places` (slot, row
    blocks); `slot_T` is each row's slot, -1 where it has none. Tiles are of `size` rows; of
    `chunks` and `tiles` there must be enough: `num_chunks`, and `num_tiles` of ops/lora_linear.py.
    """
    # An adapter takes whole chunks; its slot leads to them.
    row_CB = np.full((chunks * PER_CHUNK, ROW_BLOCK), -1, np.int32)
    span_S2 = np.zeros((max((slot for slot, _ in places), default=-1) + 2, 2), np.int32)
    used = 0
    for slot, row_blocks in places:
        first, blocks = used * PER_CHUNK, np.array(row_blocks, np.int32)
        row_CB[first : first + len(blocks)] = blocks[:, None] * ROW_BLOCK + np.arange(ROW_BLOCK)
        span_S2[slot] = used, used + -(-len(blocks) // PER_CHUNK)
        used = span_S2[slot, 1]
    # Rows by slot, those without an adapter first; each group takes whole tiles.
    order_T = np.argsort(slot_T, kind="stable")
    group_G, first_G, count_G = np.unique(slot_T[order_T], return_index=True, return_counts=True)
    tiles_G = -(-count_G // size)
    start_G = (np.cumsum(tiles_G) - tiles_G) * size
    token_XI = np.full(tiles * size, -1, np.int32)
    token_XI[np.arange(len(slot_T)) + np.repeat(start_G - first_G, count_G)] = order_T
    span_X2 = np.zeros((1 + tiles, 2), np.int32)
    span_X2[0] = 0, used
    span_X2[1 : 1 + tiles_G.sum()] = np.repeat(span_S2[group_G], tiles_G, axis=0)
    return {
        "row_E": row_CB.reshape(-1),
        "span_X2": span_X2,
        "token_XI": token_XI.reshape(tiles, size),
    }
