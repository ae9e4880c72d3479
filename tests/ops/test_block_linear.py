"""block_linear against torch's own linear."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from purestep.models.linear import block_width, product
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


@given(st.integers(1, 20), st.sampled_from((7, 32, 96, 100, 576)), st.booleans())
def test_products_may_be_written_to(T: int, O: int, biased: bool) -> None:  # noqa: E741
    """A new tensor each time, whatever form the width chooses."""
    x_TD, w_OD, bias_O = random(T, 16), random(O, 16, seed=1), random(O, seed=2)
    y_TO = product(x_TD, w_OD, bias_O if biased else None)
    kept = y_TO.clone()
    product(x_TD, w_OD, None).zero_()
    assert torch.equal(y_TO, kept)
    want = F.linear(x_TD, w_OD, bias_O if biased else None)
    torch.testing.assert_close(y_TO, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("T", [1, 2, 16, 17])
def test_a_rows_bits_do_not_depend_on_the_other_rows(T: int) -> None:
    x_TD, w_OD = random(T, 64), random(192, 64, seed=1)
    y_TO = block_linear(x_TD, w_OD, 96)
    for row in range(T):
        other_TD = random(T, 64, seed=3) * 1e3
        other_TD[row] = x_TD[row]
        assert torch.equal(block_linear(other_TD, w_OD, 96)[row], y_TO[row])


def test_only_float32_with_mkl_is_computed_in_blocks() -> None:
    assert block_width(torch.zeros(96, 8, dtype=torch.bfloat16)) == 0
    assert block_width(torch.zeros(7, 8)) == 0


def test_op_registration() -> None:
    args = random(3, 8), random(64, 8), 32
    torch.library.opcheck(torch.ops.purestep.block_linear.default, args)
