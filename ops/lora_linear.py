"""lora_linear: a product with a linear's weights and every token's own low-rank delta.

T tokens, D input width, O output width, S slices of O (fused projections), P paged adapter rows, E
entries of the step's adapters in chunks of 16, X tiles of I tokens of one adapter, n addends.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.ops import kernels, native
from purestep.ops.linear import linear_on_cpu, linear_on_gpu
from purestep.ops.product import Product, fake_product, told

CHUNK = 16  # adapter rows that one step of a matrix unit takes
SKINNY = 64  # most tokens for which the product is memory's alone
# Most rows of A for which one product with them and the weights above them may be the faster way.
WIDE_ROWS = 512


class Deltas(NamedTuple):
    """Adapter rows of one linear, and whose they are. Metadata has sizes that depend on the batch
    descriptor and the pool alone."""

    a_SPD: Tensor
    b_PO: Tensor
    row_E: Tensor  # int32, the rows of each adapter of the step in whole chunks, -1 where it has
    # none; what lies behind the chunks in use is not read
    span_X2: Tensor  # int32, first and last + 1 of the chunks in use: by all tokens, then by each
    # tile of tokens of one adapter; none for tokens without an adapter
    token_XI: Tensor  # int32, the tokens of each tile, -1 where it has no more; each token in one


class Shrunk(NamedTuple):
    """What a product leaves to its reader: tokens times A, still to be multiplied by B."""

    # fp32 addends [n, T, S E]. n = 0 where they lie behind the product's outputs in its format, and
    # for all rows of A in their order: [T, O + S P].
    h: Tensor
    deltas: Deltas


def tile_size(num_tokens: int) -> int:
    """Tokens of a tile: few where adapters share few."""
    return 16 if num_tokens <= 512 else 64


def num_tiles(num_tokens: int, num_adapters: int) -> int:
    """The most tiles that tokens of so many adapters, and of none, can need."""
    return min(num_tokens, num_tokens // tile_size(num_tokens) + num_adapters + 1)


@kernels.named("lora_linear")
def lora_linear(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: Deltas | None,
    wide_WD: Tensor | None = None,
) -> Product:
    """x W^T + bias + each token's delta, for one slice: [T, O], or fp32 addends [n, T, O] of it, or
    what begins with it, [T, W].

    Which of these is a function of T, the widths and the format; whoever reads it sums addends in
    order and rounds once. Token t gets the sum over its adapter's rows r of (x . a[s, r]) * b[r]; a
    token without an adapter gets exactly none. Rows of A and B that are not its adapter's are not
    read for it, and its bits depend on its own row and its own adapter alone: chunks are summed in
    order. `wide_WD` is W with A beneath (models/room.py), if it lies so; W > O where that is used.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.lora_linear(x_TD, w_OD, bias_O, flat(deltas), wide_WD)
    if not x_TD.is_cuda:
        return _on_cpu(x_TD, w_OD, bias_O, deltas, w_OD.shape[:1])
    y, h = _product(x_TD, w_OD, bias_O, deltas, wide_WD, room=True)
    if h is not None:
        from purestep.ops.kernels.deltas import expand_

        expand_(y, Shrunk(h, deltas), x_TD.dtype)
    return y


@kernels.named("shrunk_linear")
def shrunk_linear(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: Deltas | None,
    out_sizes: Sequence[int],
    wide_WD: Tensor | None = None,
) -> tuple[Product, Shrunk | None]:
    """As `lora_linear` for slices of widths `out_sizes`, but on a GPU without the deltas' second
    half, which is for whoever reads the product: `rope_write_` and `gated_mul` take it. One launch
    less, and the product is not written and read once more."""
    if torch.compiler.is_dynamo_compiling():
        args = x_TD, w_OD, bias_O, flat(deltas), out_sizes, wide_WD
        found = torch.ops.purestep.shrunk_linear(*args)
        left = deltas is not None and len(found) > 1
        return (found[:-1], Shrunk(found[-1], deltas)) if left else (found, None)
    if not x_TD.is_cuda:
        return _on_cpu(x_TD, w_OD, bias_O, deltas, out_sizes), None
    y, h = _product(x_TD, w_OD, bias_O, deltas, wide_WD, room=False)
    return y, None if h is None else Shrunk(h, deltas)


def _product(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: Deltas | None,
    wide_WD: Tensor | None,
    room: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, h): x W^T + bias and x A^T; `room` leaves an addend of y free where it has addends."""
    from purestep.ops.kernels import deltas as kernels
    from purestep.ops.kernels import products

    if wide_WD is not None and deltas is not None and bias_O is None:
        (S, P, D), T = deltas.a_SPD.shape, len(x_TD)
        # A pool may be stepped with other weights than its rows lie beneath.
        if beneath(T, D, S, P) and wide_WD.data_ptr() == w_OD.data_ptr():
            none = x_TD.new_empty((0, T, kernels.h_shape(deltas)[1]), dtype=torch.float32)
            return linear_on_gpu(x_TD, wide_WD, None), none
    if is_skinny(x_TD):
        return products.skinny(x_TD, w_OD, bias_O, deltas, room=room and deltas is not None)
    if deltas is None:
        return linear_on_gpu(x_TD, w_OD, bias_O), None
    return linear_on_gpu(x_TD, w_OD, bias_O), kernels.shrink(x_TD, deltas)


def beneath(T: int, D: int, S: int, P: int) -> bool:
    """Whether one product with weights and all rows of A is faster than one with each, by what was
    seen on an H200.

    What adapters add to a product of Llama 8B and its reader, in microseconds, so and apart: at 64
    tokens, 32 adapters of rank 16: qkv 9.2 and 10.7, out 5.0 and 7.1, gate_up 17.8 and 23.3, down
    10.0 and 9.8; at 256 tokens, 8 adapters: 4.0 and 9.5, 3.8 and 9.4, 8.7 and 6.9, 3.5 and 18; at
    2048: 44 and 40, 19 and 28, 91 and 59, 31 and 77. At 32 tokens and less there is no difference.
    The 6.9 were on a stream of its own, with which whole steps took 5.4% over the base's and not
    4.4. At 8,192 the narrow ones were faster so alone, and prompts 2% slower. Whole steps were
    compared across cards, which differ by 4% themselves.
    """
    if T <= SKINNY:
        return T > 32 and D <= 8192
    return T * P <= 2**18 and (S == 1 or T <= 1024) and T <= 2048


def _on_cpu(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: Deltas | None,
    out_sizes: Sequence[int],
) -> Tensor:
    if not native.takes(x_TD, w_OD):
        return lora_linear_ref(x_TD, w_OD, bias_O, deltas, out_sizes)
    y_TO = linear_on_cpu(x_TD, w_OD, bias_O)
    if deltas is not None:
        native.add_deltas_(y_TO, x_TD, *deltas, out_sizes)
    return y_TO


def is_skinny(x_TD: Tensor) -> bool:
    """Whether our own product is the faster one: few tokens, 16 bits."""
    return x_TD.shape[0] <= SKINNY and x_TD.dtype != torch.float32


def lora_linear_ref(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: Deltas | None,
    out_sizes: Sequence[int],
) -> Tensor:
    """The specification, in plain torch; also what runs without a GPU or a compiler."""
    y_TO = F.linear(x_TD, w_OD, bias_O)
    if deltas is not None:
        _add_ref_(y_TO, x_TD, deltas, out_sizes)
    return y_TO


@kernels.named("lora_add_tiles_")
def lora_add_tiles_(y_TO: Tensor, x_TD: Tensor, deltas: Deltas, out_sizes: Sequence[int]) -> None:
    """Add each token's own delta to a product of slices `out_sizes`, in place, and nothing to those
    without an adapter: as `lora_linear` does, for products that are made elsewhere. Contiguous."""
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.lora_add_tiles_(y_TO, x_TD, flat(deltas), out_sizes)
    if x_TD.is_cuda:
        from purestep.ops.kernels.deltas import add_slices_

        add_slices_(y_TO, x_TD, deltas, out_sizes)
    elif native.takes(y_TO, x_TD):
        native.add_deltas_(y_TO, x_TD, *deltas, out_sizes)
    else:
        _add_ref_(y_TO, x_TD, deltas, out_sizes)


def _add_ref_(y_TO: Tensor, x_TD: Tensor, deltas: Deltas, out_sizes: Sequence[int]) -> None:
    tiles = zip(deltas.token_XI, deltas.span_X2[1:].tolist(), strict=True)
    for token_I, (low, high) in tiles:
        row_e, token_t = deltas.row_E[low * CHUNK : high * CHUNK], token_I[token_I >= 0]
        row_e = row_e[row_e >= 0]
        parts = [x_TD[token_t] @ a_PD[row_e].T for a_PD in deltas.a_SPD]
        slices = deltas.b_PO[row_e].split_with_sizes(list(out_sizes), 1)
        if len(row_e):
            y_TO[token_t] += torch.cat([h @ b for h, b in zip(parts, slices, strict=True)], 1)


@kernels.named("head_linear")
def head_linear(x_SD: Tensor, w_VD: Tensor, out_SV: Tensor | None = None) -> Tensor:
    """fp32 logits [S, V], into `out_SV` where it is given."""
    if out_SV is None:
        out_SV = torch.empty(
            (x_SD.shape[0], w_VD.shape[0]), dtype=torch.float32, device=x_SD.device
        )
    if torch.compiler.is_dynamo_compiling():
        torch.ops.purestep.head_linear_(out_SV, x_SD, w_VD)
        return out_SV
    if not (x_SD.is_cuda and is_skinny(x_SD)):
        if not x_SD.is_cuda or x_SD.dtype == torch.float32:
            return out_SV.copy_(F.linear(x_SD, w_VD))
        return torch.mm(x_SD, w_VD.T, out_dtype=torch.float32, out=out_SV)
    from purestep.ops.kernels import products

    shape = products.skinny_shape(len(x_SD), 1 << 20, x_SD.shape[1])  # one split
    return products.skinny(x_SD, w_VD, None, out=out_SV, shape=shape)[0]


def flat(given: Deltas | Shrunk | None) -> list[Tensor]:
    """Their tensors, as an argument of a traced op; none has none."""
    if isinstance(given, Shrunk):
        return [given.h, *given.deltas]
    return [] if given is None else [*given]


def deltas_of(tensors: list[Tensor]) -> Deltas | None:
    return Deltas(*tensors) if tensors else None


def shrunk_of(tensors: list[Tensor]) -> Shrunk | None:
    return Shrunk(tensors[0], Deltas(*tensors[1:])) if tensors else None


def _lora_linear_traced(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: list[Tensor],
    wide_WD: Tensor | None = None,
) -> list[Tensor]:
    y = lora_linear(x_TD, w_OD, bias_O, deltas_of(deltas), wide_WD)
    return told(y, x_TD, len(w_OD), wide_WD)


def _shrunk_linear_traced(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: list[Tensor],
    out_sizes: Sequence[int],
    wide_WD: Tensor | None = None,
) -> list[Tensor]:
    """The product, and behind it what is left to its reader, on a GPU, where there are deltas."""
    y, shrunk = shrunk_linear(x_TD, w_OD, bias_O, deltas_of(deltas), out_sizes, wide_WD)
    return told(y, x_TD, len(w_OD), wide_WD) + ([] if shrunk is None else [shrunk.h])


def _shrunk_linear_fake(
    x_TD: Tensor,
    w_OD: Tensor,
    bias_O: Tensor | None,
    deltas: list[Tensor],
    out_sizes: Sequence[int],
    wide_WD: Tensor | None = None,
) -> list[Tensor]:
    found = fake_product(x_TD, w_OD.shape[0], wide_WD)
    if deltas and x_TD.is_cuda:
        a_SPD, _, row_E = deltas[:3]
        sizes = x_TD.shape[0], a_SPD.shape[0] * row_E.shape[0]
        length = torch.library.get_ctx().new_dynamic_size()
        found.append(x_TD.new_empty(length, *sizes, dtype=torch.float32))
    return found


def _head_linear_traced_(out_SV: Tensor, x_SD: Tensor, w_VD: Tensor) -> None:
    head_linear(x_SD, w_VD, out_SV)


torch.library.define(
    "purestep::lora_linear",
    "(Tensor x_TD, Tensor w_OD, Tensor? bias_O, Tensor[] deltas, Tensor? wide_WD=None) -> Tensor[]",
)
torch.library.impl("purestep::lora_linear", ("cpu", "cuda"), _lora_linear_traced)
torch.library.register_fake(
    "purestep::lora_linear",
    lambda x_TD, w_OD, _bias, _deltas, wide_WD=None: fake_product(x_TD, w_OD.shape[0], wide_WD),
)
torch.library.define(
    "purestep::shrunk_linear",
    "(Tensor x_TD, Tensor w_OD, Tensor? bias_O, Tensor[] deltas, int[] out_sizes, "
    "Tensor? wide_WD=None) -> Tensor[]",
)
torch.library.impl("purestep::shrunk_linear", ("cpu", "cuda"), _shrunk_linear_traced)
torch.library.register_fake("purestep::shrunk_linear", _shrunk_linear_fake)
torch.library.define(
    "purestep::lora_add_tiles_",
    "(Tensor(a!) y_TO, Tensor x_TD, Tensor[] deltas, int[] out_sizes) -> ()",
)
torch.library.impl(
    "purestep::lora_add_tiles_",
    ("cpu", "cuda"),
    lambda y_TO, x_TD, deltas, sizes: lora_add_tiles_(y_TO, x_TD, Deltas(*deltas), sizes),
)
torch.library.register_fake("purestep::lora_add_tiles_", lambda *_: None)
torch.library.define(
    "purestep::head_linear_", "(Tensor(a!) out_SV, Tensor x_SD, Tensor w_VD) -> ()"
)
torch.library.impl("purestep::head_linear_", ("cpu", "cuda"), _head_linear_traced_)
torch.library.register_fake("purestep::head_linear_", lambda *_: None)
