"""gated_linear: the first product of an MLP and the gated activation behind it.

T token rows, D input width, F MLP width, n addends of a product.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.ops import kernels, native
from purestep.ops.add_rms_norm import joined
from purestep.ops.lora_linear import (
    Deltas,
    Shrunk,
    deltas_of,
    flat,
    shrunk_linear,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by transformers' names
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@kernels.named("gated_linear")
def gated_linear(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: Deltas | None,
    activation: str = "silu",
    wide_WD: Tensor | None = None,
) -> Tensor:
    """activation(gate) * up, [T, F] in the model's format, of gate and up side by side in the
    product with weights [2F, D] and each token's own delta; `activation` is one of ACTIVATIONS.

    On a GPU one launch for many tokens, if none of them has an adapter; else what `shrunk_linear`
    gives and `gated_mul` reads.
    """
    if torch.compiler.is_dynamo_compiling():
        args = x_TD, w_OD, bias_O, flat(deltas), activation, wide_WD
        return torch.ops.purestep.gated_linear(*args)
    if x_TD.is_cuda and deltas is None and bias_O is None:
        from purestep.ops.kernels import gated

        if gated.takes(x_TD, w_OD):
            return gated.gated(x_TD, w_OD, activation != "silu")
    sizes = (len(w_OD) // 2,) * 2
    y, shrunk = shrunk_linear(x_TD, w_OD, bias_O, deltas, sizes, wide_WD)
    return gated_mul(y, x_TD.dtype, activation, shrunk)


@kernels.named("gated_mul")
def gated_mul(
    y: Tensor, dtype: torch.dtype, activation: str = "silu", shrunk: Shrunk | None = None
) -> Tensor:
    """activation(gate) * up, [T, F] in `dtype`, of gate and up side by side in the last dimension
    of `y`; `activation` is one of ACTIVATIONS.

    `y` is [T, 2F], or fp32 addends [n, T, 2F], which are summed in order and rounded once.
    `shrunk` (on a GPU) is what `shrunk_linear` has left to add to it first.
    """
    gelu = activation != "silu"
    if not y.is_cuda:
        fits = y.dim() == 2 and dtype == torch.float32 and native.takes(y)
        return native.gated_mul(y, gelu) if fits else gated_mul_ref(y, dtype, activation)
    from purestep.ops.kernels import elementwise, folded

    if shrunk is None:
        return elementwise.gated_mul(y, dtype, gelu)
    return folded.gated_mul(y, dtype, gelu, shrunk)


def gated_mul_ref(y: Tensor, dtype: torch.dtype, activation: str = "silu") -> Tensor:
    """The specification, in plain torch; also what runs without a GPU or a compiler."""
    gate_TF, up_TF = joined(y, dtype).chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate_TF) * up_TF


def _traced(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: list[Tensor],
    activation: str,
    wide_WD: Tensor | None = None,
) -> Tensor:
    return gated_linear(x_TD, w_OD, bias_O, deltas_of(deltas), activation, wide_WD)


torch.library.define(
    "purestep::gated_linear",
    "(Tensor x_TD, Tensor w_OD, Tensor? bias_O, Tensor[] deltas, str activation, "
    "Tensor? wide_WD=None) -> Tensor",
)
torch.library.impl("purestep::gated_linear", ("cpu", "cuda"), _traced)
torch.library.register_fake(
    "purestep::gated_linear",
    lambda x_TD, w_OD, *_: x_TD.new_empty(x_TD.shape[0], w_OD.shape[0] // 2),
)
