"""The product with a linear's weights, in the form that this machine runs fastest.

T token rows, D input width, O output width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.ops.block_linear import block_linear

BLOCK_WIDTHS = (96, 64, 128, 48, 32)  # the best first
HAS_MKL = torch.backends.mkl.is_available()


def product(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + bias, [T, O] contiguous, which may be written to."""
    width = block_width(w_OD)
    if not width:
        return F.linear(x_TD, w_OD, bias_O)
    y_TO = block_linear(x_TD, w_OD, width)
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def block_width(w_OD: Tensor) -> int:
    """Outputs in one block of `block_linear`; 0 where F.linear is as good, which is so without MKL,
    in other formats than float32 and off the CPU, or where the width cannot be divided."""
    if not HAS_MKL or w_OD.dtype != torch.float32 or w_OD.device.type != "cpu":
        return 0
    return next((w for w in BLOCK_WIDTHS if w_OD.shape[0] % w == 0), 0)
