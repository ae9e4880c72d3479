"""linear: the product with a linear's weights, in the form that a CPU runs fastest; and cuBLAS's,
for `lora_linear`.

T token rows, D input width, O output width, n blocks of w outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from purestep.ops import native
from purestep.ops.gpu import num_multiprocessors

SKINNY = 64  # most tokens for which our own product is the faster one
BLOCK_WIDTHS = (96, 64, 128, 48, 32)  # the best first
HAS_MKL = torch.backends.mkl.is_available()


def linear(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + bias, [T, O] contiguous, which may be written to.

    On a CPU in float32 few tokens go to the C form, which reads every weight once: 1.7 times as
    fast as the blocks below at 16 rows of a 135M model, 1.2 times at 64, 0.93 times at 128. Raises
    RuntimeError for shapes that do not fit.
    """
    native_form = x_TD.dtype == torch.float32 and x_TD.device.type == "cpu"
    if native_form or torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.linear(x_TD, w_OD, bias_O)
    return F.linear(x_TD, w_OD, bias_O)


def linear_ref(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The specification, in plain torch; also what runs without a compiler.

    With MKL one batched product over blocks of outputs: it splits a batch over the threads by its
    items, where it splits one tall and narrow product badly. 1.35 times as fast as F.linear at 16
    rows of a 135M model on two AVX2 cores, its head 2.4 times, 1.1 times at 128 to 1024.
    """
    width = block_width(w_OD)
    if not width:
        return F.linear(x_TD, w_OD, bias_O)
    n = w_OD.shape[0] // width
    y_nTw = torch.bmm(x_TD.expand(n, -1, -1), w_OD.view(n, width, -1).mT)
    y_TO = y_nTw.transpose(0, 1).flatten(1).contiguous()  # one block is a view of the product
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def block_width(w_OD: Tensor) -> int:
    """Outputs in one block; 0 where F.linear is as good: without MKL, or for odd widths."""
    if not HAS_MKL or w_OD.dtype != torch.float32:
        return 0
    return next((w for w in BLOCK_WIDTHS if w_OD.shape[0] % w == 0), 0)


def linear_on_cpu(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear` without the way through the dispatcher."""
    fits = x_TD.dim() == w_OD.dim() == 2 and x_TD.shape[1] == w_OD.shape[1]
    if bias_O is not None:
        fits = fits and bias_O.shape == w_OD.shape[:1] and native.takes(bias_O)
    if fits and len(x_TD) <= SKINNY and native.takes(x_TD, w_OD):
        return native.linear(x_TD, w_OD, bias_O)
    return linear_ref(x_TD, w_OD, bias_O)


def linear_on_gpu(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + bias by cuBLAS, in two products where `cut` says so."""
    first = 0
    if bias_O is None and x_TD.dtype != torch.float32:
        first = cut(len(x_TD), len(w_OD), num_multiprocessors(x_TD.get_device()))
    return in_two(x_TD, w_OD, first) if first else F.linear(x_TD, w_OD, bias_O)


def in_two(x_TD: Tensor, w_OD: Tensor, first: int) -> Tensor:
    """x W^T, the first outputs by a product of their own."""
    y_TO = x_TD.new_empty(len(x_TD), len(w_OD))
    for part in (slice(0, first), slice(first, None)):
        torch.mm(x_TD, w_OD[part].T, out=y_TO[:, part])
    return y_TO


def cut(num_tokens: int, width: int, num_multiprocessors: int) -> int:
    """How many outputs a first product has, where two are faster than one; 0 where they are not.

    cuBLAS gives each multiprocessor of an H200 256 tokens x 128 outputs at a time. Of 28,672
    outputs (gate and up of Llama 8B) the second round has 92 for 132, and takes as long as the
    first; a product of its own has smaller tiles: 87 us for 94, with 256 rows of A beneath 89 for
    97. Fewer tokens, and widths that fill a last round less or more, mostly lose.
    """
    whole = 128 * num_multiprocessors
    return whole if 192 < num_tokens <= 256 and 1.6 * whole < width < 1.8 * whole else 0


# An op, since the compiler asks of a batched product whether a size it does not know is 1, and may
# pad the weights of others, which has other bits.
torch.library.define("purestep::linear", "(Tensor x_TD, Tensor w_OD, Tensor? bias_O) -> Tensor")
torch.library.impl("purestep::linear", "cpu", linear_on_cpu)
torch.library.impl("purestep::linear", "cuda", F.linear)
torch.library.register_fake(
    "purestep::linear", lambda x_TD, w_OD, _: x_TD.new_empty(x_TD.shape[0], w_OD.shape[0])
)
