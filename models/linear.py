"""The product with a linear's weights, in the form that this machine runs fastest.

T token rows, D input width, O output width, n blocks of w outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_WIDTHS = (96, 64, 128, 48, 32)  # the best first
HAS_MKL = torch.backends.mkl.is_available()


def product(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + bias, [T, O] contiguous, which may be written to.

    In float32 on a CPU with MKL the outputs are computed in blocks, as one batched product: 1.35
    times as fast as F.linear at 16 rows of a 135M model on two AVX2 cores, its head 2.4 times, 1.5
    to 2 times at 1 to 4 rows, 1.1 times at 128 to 1024. MKL splits a batch over the threads by its
    items, where it splits one tall and narrow product badly.
    """
    width = block_width(w_OD)
    if not width:
        return F.linear(x_TD, w_OD, bias_O)
    n = w_OD.shape[0] // width
    y_nTw = torch.bmm(x_TD.expand(n, -1, -1), w_OD.view(n, width, -1).mT)
    y_TO = y_nTw.transpose(0, 1).flatten(1)
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def block_width(w_OD: Tensor) -> int:
    """Outputs in one block; 0 where F.linear is as good or the width cannot be divided."""
    if not HAS_MKL or w_OD.dtype != torch.float32 or w_OD.device.type != "cpu":
        return 0
    return next((w for w in BLOCK_WIDTHS if w_OD.shape[0] % w == 0), 0)
