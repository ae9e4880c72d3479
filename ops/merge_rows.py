"""merge_rows_: put rows that did not come from the embedding table into their places.

T token rows, E rows to place, D hidden size.
"""

import torch
from torch import Tensor


def merge_rows_(h_TD: Tensor, index_E: Tensor, rows_ED: Tensor) -> None:
    """`h_TD[index_E[e]] = rows_ED[e]`, in h's dtype. Waits for nothing on the device.

    `index_E` (int64) are places among the token rows, all different; each has a row and each row a
    place, so one row is never spread over several. Mutates `h_TD` only. Raises ValueError for other
    counts, shapes or dtypes.
    """
    torch.ops.purestep.merge_rows_(h_TD, index_E, rows_ED)


def merge_rows_ref_(h_TD: Tensor, index_E: Tensor, rows_ED: Tensor) -> None:
    """The specification, in plain torch; it runs on every device."""
    fits = h_TD.dim() == rows_ED.dim() == 2 and rows_ED.shape[1] == h_TD.shape[1]
    if not fits or index_E.shape != rows_ED.shape[:1] or len(index_E) > len(h_TD):
        raise ValueError(
            "merge_rows_ wants (T,D) (E,) (E,D) with E <= T, got "
            f"{tuple(h_TD.shape)} {tuple(index_E.shape)} {tuple(rows_ED.shape)}"
        )
    if index_E.dtype != torch.int64:
        raise ValueError(f"merge_rows_ wants int64 places, got {index_E.dtype}")
    h_TD.index_copy_(0, index_E, rows_ED.to(h_TD.dtype))


torch.library.define(
    "purestep::merge_rows_", "(Tensor(a!) h_TD, Tensor index_E, Tensor rows_ED) -> ()"
)
torch.library.impl("purestep::merge_rows_", "cpu", merge_rows_ref_)
torch.library.impl("purestep::merge_rows_", "cuda", merge_rows_ref_)
torch.library.register_fake("purestep::merge_rows_", lambda *_: None)
