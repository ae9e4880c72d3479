"""gated_mul: the gated activation between the two products of an MLP.

T token rows, F MLP width, n addends of a product.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.ops import kernels, native
from purestep.ops.add_rms_norm import joined
from purestep.ops.lora_linear import Shrunk, flat, shrunk_of
from purestep.ops.product import Product, listed, num_tokens, product_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by transformers' names
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@kernels.named("gated_mul")
def gated_mul(
    y: Product, dtype: torch.dtype, activation: str = "silu", shrunk: Shrunk | None = None
) -> Tensor:
    """activation(gate) * up, [T, F] in `dtype`, of gate and up side by side in the last dimension
    of `y`; `activation` is one of ACTIVATIONS.

    `y` is [T, 2F], or fp32 addends [n, T, 2F], which are summed in order and rounded once.
    `shrunk` (on a GPU) is what `shrunk_linear` has left to add to it first.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.gated_mul(listed(y), dtype, activation, flat(shrunk))
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


def _traced(y: list[Tensor], dtype: torch.dtype, activation: str, shrunk: list[Tensor]) -> Tensor:
    return gated_mul(product_of(y), dtype, activation, shrunk_of(shrunk))


torch.library.define(
    "purestep::gated_mul",
    "(Tensor[] y, ScalarType dtype, str activation, Tensor[] shrunk) -> Tensor",
)
torch.library.impl("purestep::gated_mul", ("cpu", "cuda"), _traced)
torch.library.register_fake(
    "purestep::gated_mul",
    lambda y, dtype, *_: y[0].new_empty(num_tokens(y), y[-1].shape[-1] // 2, dtype=dtype),
)
