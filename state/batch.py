"""What one step hands to the model: index tensors, packed from a plan.

T token rows (padding included), R request rows (or adapter rows), M blocks of the longest row,
S sampled rows. `-1` is padding.
"""

from torch import Tensor

from purestep.state.pytree import tree


@tree
class LoraBatch:
    """Which token rows meet which adapter rows; base rows and padding meet none."""

    row_R: Tensor  # int64, the adapter rows of the step's adapters, ascending, whole row blocks
    foreign_TR: Tensor  # bool, true where an adapter row is not the token's own
    span_C2: Tensor  # int64, which adapter rows a chunk of tokens needs: `chunk_spans` of the op


@tree
class LoraTiles:
    """The same for the fused decoder: sizes depend on T and the pool alone, ranks are data.

    E entries of adapter rows, whole chunks of 16 for each adapter, X tiles of up to I token rows of
    one adapter or of none.
    """

    row_E: Tensor  # int32, rows of the pool by adapter, -1 = none
    span_X2: Tensor  # int32, first and last + 1 of the chunks that all token rows need, then of
    # those that each tile needs
    token_XI: Tensor  # int32, the token rows of each tile, -1 where it has no more


@tree
class EmbedLora:
    """The token rows whose adapter has an embedding, and where each one's column of A lies.

    With x the column that `block_TC` finds, row p of the adapter is worth `x[column_P[p]] * b[p]`.
    """

    lora: LoraBatch
    block_TC: Tensor  # int64, row blocks of the token's adapter in order of rank; -1 = none
    column_P: Tensor  # int64, place of an adapter row among its adapter's own; -1 = not of these


@tree
class Batch:
    """One forward pass. Row r owns the tokens `query_start_R1[r]` to `query_start_R1[r+1]`."""

    token_T: Tensor  # int64, vocabulary ids
    position_T: Tensor  # int64, what the rotation takes: with M-RoPE, index + delta
    kv_index_T: Tensor  # int64, place in the pages: block * block_size + offset
    query_start_R1: Tensor  # int32
    context_len_R: Tensor  # int32, tokens visible to the row's last query, itself included
    block_table_RM: Tensor  # int32
    logits_index_S: Tensor  # int64, token rows whose logits are wanted
    lora: LoraBatch | LoraTiles | None
    embed_lora: EmbedLora | None = None  # None where no row's adapter has an embedding
    head_lora: LoraBatch | None = None  # of the rows `logits_index_S`, not of the token rows
    position_3T: Tensor | None = None  # int64, M-RoPE's time, height and width, in the place of
    # `position_T`; None where they are equal on every row, as they are for text
    end_T: Tensor | None = None  # int64, the position behind the last that a token sees, where that
    # is not its own (0 elsewhere); None where each token sees what is before it alone
