"""Weights with rows beneath them for the adapters of one pool, so that one product gives both.

x times [W; A] is x W^T and, beside it, x A^T for all adapter rows there are. The rows fill a part
of the chip that would be idle: 128 of them cost an H200 1.6 us a layer of Llama 8B at 256 tokens,
where products of their own take 37; `ops/lora_linear.py: beneath` says when it pays. L layers, O
outputs and D inputs of a fused linear, S slices of it, P adapter rows, W = O + S P.
"""

from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor

from purestep.models.config import ModelConfig, fused_linears, has_bias
from purestep.models.decoder import Layer, Params
from purestep.ops.lora_linear import WIDE_ROWS

WEIGHTS = {"qkv": "qkv_OD", "out": "out_DO", "gate_up": "gate_up_OD", "down": "down_DF"}


@dataclass(slots=True, eq=False)
class Room:
    """The weights of linears in all layers, and the rows beneath, which one pool at a time has:
    mutable, as that is."""

    wide_LWD: dict[str, Tensor]  # by linear
    a_LSPD: dict[str, Tensor]  # the rows, views of these
    num_rows: int  # P
    owner: ReferenceType[Any] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no pool that is alive has the rows."""
        return self.owner is None or self.owner() is None

    def home(self, linear: str, layer: int) -> Tensor | None:
        """Where the weights of a linear lie, [O, D]; None where it has no place for them."""
        if linear not in self.wide_LWD:
            return None
        S = self.a_LSPD[linear].shape[1]
        return self.wide_LWD[linear][layer, : -S * self.num_rows]

    @property
    def nbytes(self) -> int:
        """Of the rows alone."""
        return sum(a_LSPD.nbytes for a_LSPD in self.a_LSPD.values())


def make_room(
    config: ModelConfig, num_rows: int, *, dtype: torch.dtype, device: torch.device | str
) -> Room | None:
    """Memory for the weights of the linears without a bias, and for `num_rows` rows for each of
    their slices; None for so many (or none) that they would always be multiplied apart. Raises
    torch.OutOfMemoryError."""
    if not 0 < num_rows <= WIDE_ROWS:
        return None
    wide, rows, L = {}, {}, config.num_layers
    for linear in fused_linears(config):
        if not has_bias(config, linear.name):
            S, O = len(linear.out_sizes), linear.out_features  # noqa: E741
            size = L, O + S * num_rows, linear.in_features
            wide[linear.name] = torch.empty(size, dtype=dtype, device=device)
            rows[linear.name] = wide[linear.name][:, O:].unflatten(1, (S, num_rows))
    return Room(wide_LWD=wide, a_LSPD=rows, num_rows=num_rows)


def moved_in(params: Params, room: Room | None) -> Params:
    """The same parameters with the weights that have a place in the room copied there."""
    if room is None:
        return params

    def moved(i: int, layer: Layer) -> Layer:
        homes = {WEIGHTS[name]: room.home(name, i) for name in room.wide_LWD}
        here = {w: home.copy_(getattr(layer, w).detach()) for w, home in homes.items()}
        return replace(layer, **here)

    layers = tuple(moved(i, layer) for i, layer in enumerate(params.layers))
    return replace(params, layers=layers)
