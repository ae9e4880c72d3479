"""block_linear: the product with a linear's weights on a CPU, in blocks of outputs.

T token rows, D input width, O output width, n blocks of w outputs.
"""

import torch
from torch import Tensor


def block_linear(x_TD: Tensor, w_OD: Tensor, width: int) -> Tensor:
    """x W^T, [T, O] contiguous; `width` divides O.

    One batched product over the blocks: MKL splits a batch over the threads by its items, where it
    splits one tall and narrow product badly. 1.35 times as fast as F.linear in float32 at 16 rows
    of a 135M model on two AVX2 cores, its head 2.4 times, 1.5 to 2 times at 1 to 4 rows, 1.1 times
    at 128 to 1024. Raises RuntimeError for shapes that do not fit.
    """
    return torch.ops.purestep.block_linear(x_TD, w_OD, width)


def block_linear_ref(x_TD: Tensor, w_OD: Tensor, width: int) -> Tensor:
    n = w_OD.shape[0] // width
    y_nTw = torch.bmm(x_TD.expand(n, -1, -1), w_OD.view(n, width, -1).mT)
    return y_nTw.transpose(0, 1).flatten(1).contiguous()  # one block is a view of the product


# An op, since the compiler asks of a batched product whether a size it does not know is 1.
torch.library.define("purestep::block_linear", "(Tensor x_TD, Tensor w_OD, int width) -> Tensor")
torch.library.impl("purestep::block_linear", "cpu", block_linear_ref)
torch.library.register_fake(
    "purestep::block_linear", lambda x_TD, w_OD, _: x_TD.new_empty(x_TD.shape[0], w_OD.shape[0])
)
