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
