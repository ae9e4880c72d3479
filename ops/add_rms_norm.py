"""add_rms_norm: close one residual branch and norm what the next one reads.

T token rows, D hidden, n addends of a product.
"""

import torch
from torch import Tensor

from purestep.ops import kernels, native
from purestep.ops.product import Product, listed, product_of


@kernels.named("add_rms_norm")
def add_rms_norm(
    h_TD: Tensor, y: Product | None, weight_D: Tensor, eps: float, inner_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(h + y, its RMS norm times the weight), both [T, D]; without `y` h itself and its norm.

    `y` is [T, D] in h's format or fp32 addends [n, T, D], which are summed in order and rounded
    once. Normed in fp32, cast back, then scaled: the order of transformers, which shows in bf16.
    With `inner_D`, the weight of a norm that Gemma has there, `y` is normed before it is added.
    """
    if torch.compiler.is_dynamo_compiling():
        found = torch.ops.purestep.add_rms_norm(h_TD, listed(y), weight_D, eps, inner_D)
        return (h_TD, *found) if y is None else tuple(found)
    if h_TD.is_cuda:
        from purestep.ops.kernels.elementwise import add_rms_norm as launch

        return launch(h_TD, y, weight_D, eps, inner_D)
    given = [x for x in (y, inner_D) if x is not None]
    if native.takes(h_TD, weight_D, *given) and (y is None or y.shape == h_TD.shape):
        if y is not None and inner_D is not None:
            _, y = native.add_rms_norm(y, None, inner_D, eps)
        return native.add_rms_norm(h_TD, y, weight_D, eps)
    return add_rms_norm_ref(h_TD, y, weight_D, eps, inner_D)


def add_rms_norm_ref(
    h_TD: Tensor, y: Tensor | None, weight_D: Tensor, eps: float, inner_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The specification, in plain torch; also what runs without a GPU or a compiler."""
    if y is not None:
        y_TD = joined(y, h_TD.dtype)
        h_TD = h_TD + (y_TD if inner_D is None else _normed(y_TD, inner_D, eps))
    return h_TD, _normed(h_TD, weight_D, eps)


def _normed(h_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x_TD = h_TD.float() if h_TD.dtype != torch.float64 else h_TD
    normed_TD = x_TD * torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(h_TD.dtype)


def joined(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A product from its addends, or the product itself."""
    return y.sum(0).to(dtype) if y.dim() == 3 else y


def _traced(
    h_TD: Tensor, y: list[Tensor], weight_D: Tensor, eps: float, inner_D: Tensor | None
) -> list[Tensor]:
    """The norm, behind the sum where there is one: no output may be an input."""
    if not y:
        return [add_rms_norm(h_TD, None, weight_D, eps)[1]]
    return list(add_rms_norm(h_TD, product_of(y), weight_D, eps, inner_D))


torch.library.define(
    "purestep::add_rms_norm",
    "(Tensor h_TD, Tensor[] y, Tensor weight_D, float eps, Tensor? inner_D) -> Tensor[]",
)
torch.library.impl("purestep::add_rms_norm", ("cpu", "cuda"), _traced)
torch.library.register_fake(
    "purestep::add_rms_norm",
    lambda h_TD, y, *_: [h_TD.new_empty(h_TD.shape) for _ in range(2 if y else 1)],
)
