"""The form of a product on its way from the op that makes it to the one that reads it.

It is [T, O] in the model's format, or fp32 addends [n, T, O] of it, which are summed in order and
rounded once. On a GPU it depends on T which of the two, and a compiler that traces the ops must not
ask for T, or each answer would be a graph of its own. So between traced ops a product is a list: of
itself alone where it never has addends, else of both, one of which has a length of 0.

T token rows, O output width, n addends.
"""

import torch
from torch import Tensor

Product = Tensor | list[Tensor]


def listed(y: Product | None) -> list[Tensor]:
    """A product, or none, as an argument of a traced op."""
    if y is None:
        return []
    return [y] if isinstance(y, Tensor) else y


def product_of(parts: list[Tensor]) -> Tensor:
    """What a list stands for, when a traced op runs."""
    return parts[-1] if len(parts) == 1 or len(parts[-1]) else parts[0]


def told(y: Tensor, x_TD: Tensor) -> list[Tensor]:
    """The list of a product of `x_TD`."""
    if not has_addends(x_TD):
        return [y]
    if y.dim() == 3:
        return [x_TD.new_empty(0, y.shape[2]), y]
    return [y, y.new_empty((0, *y.shape), dtype=torch.float32)]


def fake_product(x_TD: Tensor, width: int) -> list[Tensor]:
    """The same for a compiler, who learns that there are lengths, and nothing about them."""
    T = x_TD.shape[0]
    if not has_addends(x_TD):
        return [x_TD.new_empty(T, width)]
    length = torch.library.get_ctx().new_dynamic_size
    return [
        x_TD.new_empty(length(), width),
        x_TD.new_empty(length(), T, width, dtype=torch.float32),
    ]


def num_tokens(parts: list[Tensor]) -> int:
    """T of a list, whatever its lengths are."""
    return parts[-1].shape[-2]


def has_addends(x_TD: Tensor) -> bool:
    """Whether a product of few such tokens has addends."""
    return x_TD.is_cuda and x_TD.dtype != torch.float32
