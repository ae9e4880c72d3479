"""The form of a product on its way from the op that makes it to the one that reads it.

It is [T, O] in the model's format, or fp32 addends [n, T, O] of it, which are summed in order and
rounded once, or the beginning of [T, W], behind which stand products with adapter rows. On a GPU it
depends on T which of these, and a compiler that traces the ops must not ask for T, or each answer
would be a graph of its own. So between traced ops a product is a list of all forms that it can
have, all but one with a length of 0; addends are the last.

T token rows, O output width, W > O, n addends.
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
    return next((part for part in parts if len(part)), parts[0])


def told(y: Tensor, x_TD: Tensor, width: int, wide_WD: Tensor | None) -> list[Tensor]:
    """The list of a product of `x_TD` with weights of `width` outputs, of which `wide_WD` are the
    beginning, if anything is."""
    widths = [width] if wide_WD is None else [wide_WD.shape[0], width]
    plain = [y if y.shape == (len(x_TD), w) else x_TD.new_empty(0, w) for w in widths]
    if len(plain) == 1 and not has_addends(x_TD):
        return plain
    if y.dim() == 3:
        return [*plain, y]
    return [*plain, x_TD.new_empty((0, len(x_TD), width), dtype=torch.float32)]


def fake_product(x_TD: Tensor, width: int, wide_WD: Tensor | None) -> list[Tensor]:
    """The same for a compiler, who learns that there are lengths, and nothing about them."""
    T = x_TD.shape[0]
    if not has_addends(x_TD) and wide_WD is None:
        return [x_TD.new_empty(T, width)]
    length = torch.library.get_ctx().new_dynamic_size
    widths = [width] if wide_WD is None else [wide_WD.shape[0], width]
    plain = [x_TD.new_empty(length(), w) for w in widths]
    return [*plain, x_TD.new_empty(length(), T, width, dtype=torch.float32)]


def num_tokens(parts: list[Tensor]) -> int:
    """T of a list, whatever its lengths are."""
    return parts[-1].shape[-2]


def has_addends(x_TD: Tensor) -> bool:
    """Whether a product of few such tokens has addends."""
    return x_TD.is_cuda and x_TD.dtype != torch.float32
