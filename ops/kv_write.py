"""kv_write_: put this step's keys and values into their places in the pages.

T tokens, K key/value heads, H head size.
"""

import torch
from torch import Tensor

from purestep.ops import kernels


def kv_write_(kv: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_index_T: Tensor) -> None:
    """Write token t's key and value to place `kv_index_T[t]` of one layer's pages.

    `kv` is [2, num_blocks, block_size, K, H], contiguous: 0 keys, 1 values. `kv_index_T` (int64)
    is block * block_size + offset, all different; a token with -1 (padding) is written nowhere.
    Mutates `kv` only. Raises ValueError for shapes or dtypes that do not fit.
    """
    torch.ops.purestep.kv_write_(kv, k_TKH, v_TKH, kv_index_T)


def kv_write_ref_(kv: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_index_T: Tensor) -> None:
    """The specification, in plain torch; also what runs without a GPU."""
    check_kv_write(kv, k_TKH, v_TKH, kv_index_T)
    places = kv.view(2, -1, *kv.shape[3:])
    if kv_index_T.numel() and kv_index_T.min() < 0:
        live_L = (kv_index_T >= 0).nonzero().squeeze(1)
        k_TKH, v_TKH, kv_index_T = k_TKH[live_L], v_TKH[live_L], kv_index_T[live_L]
    places[0].index_copy_(0, kv_index_T, k_TKH)
    places[1].index_copy_(0, kv_index_T, v_TKH)


def check_kv_write(kv: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_index_T: Tensor) -> None:
    fits = kv.dim() == 5 and kv.shape[0] == 2 and k_TKH.shape == v_TKH.shape
    fits = fits and k_TKH.dim() == 3 and k_TKH.shape[1:] == kv.shape[3:]
    if not fits or kv_index_T.shape != k_TKH.shape[:1]:
        raise ValueError(
            "kv_write_ wants (2,blocks,block_size,K,H) (T,K,H) (T,K,H) (T,), got "
            f"{tuple(kv.shape)} {tuple(k_TKH.shape)} {tuple(v_TKH.shape)} {tuple(kv_index_T.shape)}"
        )
    if not kv.dtype == k_TKH.dtype == v_TKH.dtype or kv_index_T.dtype != torch.int64:
        raise ValueError(
            "kv_write_ wants one dtype for pages, keys and values and int64 places, got "
            f"{kv.dtype} {k_TKH.dtype} {v_TKH.dtype} {kv_index_T.dtype}"
        )


@kernels.named("kv_write_")
def _on_cuda_(kv: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_index_T: Tensor) -> None:
    if not kernels.usable():
        return kv_write_ref_(kv, k_TKH, v_TKH, kv_index_T)
    check_kv_write(kv, k_TKH, v_TKH, kv_index_T)
    from purestep.ops.kernels.elementwise import kv_write_ as launch

    return launch(kv, k_TKH, v_TKH, kv_index_T)


# define/impl, not custom_op: 4 us a call against 22 to 38 us, and a step makes 200 such calls.
torch.library.define(
    "purestep::kv_write_", "(Tensor(a!) kv, Tensor k_TKH, Tensor v_TKH, Tensor kv_index_T) -> ()"
)
torch.library.impl("purestep::kv_write_", "cpu", kv_write_ref_)
torch.library.impl("purestep::kv_write_", "cuda", _on_cuda_)
# The fake reads no size, so that a compiled graph fits every number of tokens.
torch.library.register_fake("purestep::kv_write_", lambda *_: None)
