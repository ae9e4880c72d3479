"""An op whose kernel cannot be compiled names itself and its arguments."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from purestep.ops import kernels
from purestep.ops.paged_attention import paged_attention
from purestep.state.errors import KernelError
from tests.ops.kernels.interpreter import DEVICE


@triton.jit
def _odd(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 1.0)


@kernels.named("fill_odd_")
def fill_odd_(x_N: torch.Tensor, pair: tuple = (), scale: float = 1.0) -> None:
    if scale == 0:
        raise ZeroDivisionError("mine")
    _odd[(1,)](x_N, N=len(x_N))


@pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.filterwarnings("default")
def test_a_kernel_that_does_not_compile_names_its_op_and_the_shapes() -> None:
    """Widths are powers of two."""
    fill_odd_(torch.zeros(4, device=DEVICE))
    with pytest.raises(KernelError, match=r"fill_odd_: no kernel for x_N=float32\[3\], pair=\(int"):
        fill_odd_(torch.zeros(3, device=DEVICE), (torch.zeros(1, 2, dtype=torch.int32),))


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        fill_odd_(torch.zeros(4), scale=0.0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_heads_that_fit_no_multiprocessor() -> None:
    H, where = 1024, {"device": "cuda", "dtype": torch.bfloat16}
    q, kv = torch.zeros(3, 1, H, **where), torch.zeros(2, 1, 16, 1, H, **where)
    index = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 3], [3], [[0]])]
    with pytest.raises(KernelError, match=r"paged_attention: no kernel for .*\[3, 1, 1024\]"):
        paged_attention(q, kv, *index, 1.0)
