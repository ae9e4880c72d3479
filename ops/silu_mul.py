"""silu_mul: the gated activation between the two products of an MLP.

T token rows, F MLP width, n addends of a product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.ops import native
from purestep.ops.add_rms_norm import joined
from purestep.ops.lora_linear import Shrunk


def silu_mul(y: Tensor, dtype: torch.dtype, shrunk: Shrunk | None = None) -> Tensor:
    """silu(gate) * up, [T, F] in `dtype`, of gate and up side by side in the last dimension of `y`.

    `y` is [T, 2F], or fp32 addends [n, T, 2F], which are summed in order and rounded once.
    `shrunk` (on a GPU) is what `shrunk_linear` has left to add to it first.
    """
    if not y.is_cuda:
        fits = y.dim() == 2 and dtype == torch.float32 and native.takes(y)
        return native.silu_mul(y) if fits else silu_mul_ref(y, dtype)
    from purestep.ops.kernels import elementwise, folded

    return elementwise.silu_mul(y, dtype) if shrunk is None else folded.silu_mul(y, dtype, shrunk)


def silu_mul_ref(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The specification, in plain torch; also what runs without a GPU or a compiler."""
    gate_TF, up_TF = joined(y, dtype).chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF
