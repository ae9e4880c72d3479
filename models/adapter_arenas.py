"""The values of an adapter: one pass that hashes them, checks them and lays them out in arenas.

L layers (1 for the embedding, the head and a tower), S slices of a fused linear, R rows (the
adapter's rank, rounded up to 8), D inputs and O outputs of a linear; the embedding's inputs are
tokens.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from blake3 import blake3
from torch import Tensor

from purestep.models.adapter_names import AdaptedModule
from purestep.models.config import TOWER, ModelConfig, fused_linears, vocab_linears
from purestep.state.adapters import ROW_BLOCK
from purestep.state.hashing import framed
from purestep.state.pytree import tree

PIECE_BYTES = 1 << 20  # what is read at a time: it stays in a core's cache from step to step


@tree
class Arena:
    """The adapter's rows of one fused linear in all its layers, contiguous, in the engine's dtype.

    Slice s holds child s of the linear: the rows of its A, then zero rows up to R. Column block s
    of `b_LRO` holds scaling * B of child s, transposed; zeros where the adapter has nothing.
    """

    a_LSRD: Tensor
    b_LRO: Tensor


def empty_arenas(
    modules: Sequence[AdaptedModule],
    config: ModelConfig,
    dtype: torch.dtype,
    rank: int,
    pinned: bool = False,
) -> dict[str, Arena]:
    """Zeros for an adapter of this rank, for each linear that one of `modules` belongs to, but for
    those that a tower never runs. All lie in one piece of memory: `pinned`, a GPU reads it by
    itself, at the bus's full rate."""
    touched = {module.linear.name for module in modules}
    R = -(-rank // ROW_BLOCK) * ROW_BLOCK
    copies = dict.fromkeys(fused_linears(config), config.num_layers)
    copies |= dict.fromkeys(vocab_linears(config), 1)
    copies |= {m.linear: 1 for m in modules if m.linear.parent == TOWER}
    shapes = {
        linear.name: (
            (L, len(linear.children), R, linear.in_features),
            (L, R, linear.out_features),
        )
        for linear, L in copies.items()
        if linear.name in touched
    }
    sizes = [math.prod(shape) for pair in shapes.values() for shape in pair]
    parts = iter(torch.zeros(sum(sizes), dtype=dtype, pin_memory=pinned).split(sizes))
    return {
        name: Arena(a_LSRD=next(parts).view(a), b_LRO=next(parts).view(b))
        for name, (a, b) in shapes.items()
    }


def pieces(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(number of the first row, rows) of a matrix: contiguous, on the host, and ours, so that what
    is hashed is what is used, if training goes on."""
    count = max(1, PIECE_BYTES // (tensor.shape[1] * tensor.element_size()))
    for first in range(0, len(tensor), count):
        yield first, tensor[first : first + count].detach().to("cpu", copy=True).contiguous()


def write_a_(arena: Arena, module: AdaptedModule, first: int, a_RD: Tensor) -> None:
    """Put rows of one module's A, from the `first` on, at their place in the arena."""
    for s in module.slices:
        arena.a_LSRD[module.layer, s, first : first + len(a_RD)] = a_RD


def write_b_(arena: Arena, module: AdaptedModule, first: int, b_OR: Tensor, scaling: float) -> None:
    """The same of scaling * B, whose rows are outputs."""
    outputs_RO = arena.b_LRO[module.layer, : b_OR.shape[1], module.columns]
    outputs_RO[:, first : first + len(b_OR)] = _scaled(b_OR, scaling).T


def misfit(
    bounds: Sequence[tuple[Tensor, Tensor]], factor: float, dtype: torch.dtype
) -> str | None:
    """What is wrong with values, or with `factor` times them as `dtype`. Their `bounds` are those
    of each piece by `torch.aminmax`, which passes a NaN on and is 20 times faster than isfinite().
    """
    low = torch.stack([low for low, _ in bounds]).amin()
    high = torch.stack([high for _, high in bounds]).amax()
    peak = torch.maximum(low.abs(), high.abs())
    if not torch.isfinite(peak):
        return "holds NaN" if torch.isnan(peak) else f"holds infinity ({low:g} to {high:g})"
    # Rounding keeps order: if the largest magnitude survives these steps, all values do.
    if not torch.isfinite(_scaled(peak, factor).to(dtype)):
        value, limit = peak.item() * factor, torch.finfo(dtype).max
        return f"reaches {value:g} when scaled by {factor:g}, but {dtype} ends at {limit:g}"
    return None


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """In float32, whatever the adapter's dtype: 16 bits would round the product a second time."""
    return tensor.float() * factor


def version_hasher(name: str | None) -> blake3:
    """The start of an adapter's version: in a domain of its own for versions named by callers."""
    if name is None:
        return blake3(framed("purestep/adapter/1/tensors"))
    return blake3(framed("purestep/adapter/1/named", name.encode()))


def hash_fields_(hasher: blake3, module: str, role: str, tensor: Tensor, scaling: float) -> None:
    """Add what stands in front of a matrix's bytes: its name, and the scaling of its module. How
    many bytes follow is known from that."""
    fields = module, role, str(tensor.dtype), f"{tuple(tensor.shape)}", float(scaling).hex()
    hasher.update(framed("tensor", *(field.encode() for field in fields)))


def hash_piece_(hasher: blake3, rows: Tensor) -> None:
    """Add rows of the matrix, contiguous on the host."""
    hasher.update(rows.view(torch.uint8).flatten().numpy())
