"""block_linear against torch's own linear."""

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from hypothesis import given

from purestep.ops.block_linear import block_linear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 4), st.sampled_from((1, 8, 32)))
def test_blocks_give_what_linear_gives(T: int, D: int, n: int, width: int) -> None:
    x_TD, w_OD = random(T, D), random(n * width, D, seed=1)
    y_TO = block_linear(x_TD, w_OD, width)
    assert y_TO.is_contiguous()
    want = F.linear(x_TD.double(), w_OD.double())
    torch.testing.assert_close(y_TO.double(), want, atol=1e-4, rtol=1e-4)


def test_op_registration() -> None:
    args = random(3, 8), random(64, 8), 32
    torch.library.opcheck(torch.ops.purestep.block_linear.default, args)
