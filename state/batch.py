"""What one step hands to the model: index tensors, packed from a plan.

T token rows (padding included), R request rows (or adapter rows), M blocks of the longest row,
S sampled rows, B token rows without an adapter. `-1` is padding.
"""

from torch import Tensor

from purestep.state.pytree import tree


@tree
class LoraBatch:
    """Which token rows meet which adapter rows; base rows and padding meet none."""

    row_R: Tensor  # int64, the adapter rows of the step's adapters, ascending, whole row blocks
    foreign_TR: Tensor  # bool, true where an adapter row is not the token's own
    span_C2: Tensor  # int64, which adapter rows a chunk of tokens needs: `chunk_spans` of the op
    bare_B: Tensor  # int64, token rows without an adapter


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
