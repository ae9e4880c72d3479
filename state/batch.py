"""What one step hands to the model: index tensors, packed from a plan.

T token rows (padding included), R request rows, M blocks of the longest row, S sampled rows,
G adapter groups the pool can hold, P paged adapter rows. `-1` is padding or no adapter.
"""

from torch import Tensor

from purestep.state.pytree import tree


@tree
class LoraBatch:
    """Which token rows meet which adapter rows. Group g is the g-th active adapter, never base.

    `token_T[group_start_G1[g]:group_start_G1[g+1]]` are the token rows of group g, and
    `row_P[rank_start_G1[g]:rank_start_G1[g+1]]` the adapter rows that belong to it. Entries past
    the last group repeat the total in both start tables, so unused groups are empty ranges.
    """

    token_T: Tensor  # int32
    group_start_G1: Tensor  # int32
    row_P: Tensor  # int32
    rank_start_G1: Tensor  # int32


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
    position_T: Tensor  # int64
    kv_index_T: Tensor  # int64, place in the pages: block * block_size + offset
    query_start_R1: Tensor  # int32
    context_len_R: Tensor  # int32, tokens visible to the row's last query, itself included
    block_table_RM: Tensor  # int32
    logits_index_S: Tensor  # int64, token rows whose logits are wanted
    lora: LoraBatch | None
    embed_lora: EmbedLora | None = None  # None where no row's adapter has an embedding
    head_lora: LoraBatch | None = None  # of the rows `logits_index_S`, not of the token rows
