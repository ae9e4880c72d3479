"""The CPU's products against float64, and the law that rows do not see each other.

T token rows, D input width, O output width.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from purestep.ops.gated_linear import ACTIVATIONS, gated_linear, gated_mul_ref
from purestep.ops.linear import (
    BLOCK_WIDTHS,
    HAS_MKL,
    SKINNY,
    block_width,
    cut,
    in_two,
    linear,
    linear_on_gpu,
)
from tests.ops.forms import both_forms  # noqa: F401

WIDTHS = [1, 7, 32, 48, 64, 96, 128, 160, 192, 257, 288, 384]
TOKENS = st.one_of(st.integers(1, 40), st.sampled_from([SKINNY, SKINNY + 1]))


def inputs(T: int, D: int, O: int) -> tuple[Tensor, Tensor, Tensor]:  # noqa: E741
    source = torch.Generator().manual_seed(T + 100 * D + 7 * O)
    w_OD = torch.randn(O, D, generator=source) * D**-0.5
    return torch.randn(T, D, generator=source), w_OD, torch.randn(O, generator=source)


@given(TOKENS, st.integers(1, 70), st.sampled_from(WIDTHS), st.booleans())
def test_equals_the_definition(T: int, D: int, O: int, has_bias: bool) -> None:  # noqa: E741
    x_TD, w_OD, bias_O = inputs(T, D, O)
    y_TO = linear(x_TD, w_OD, bias_O if has_bias else None)
    want = x_TD.double() @ w_OD.double().T + (bias_O.double() if has_bias else 0)
    torch.testing.assert_close(y_TO.double(), want, rtol=1e-5, atol=1e-5)
    assert y_TO.is_contiguous()
    before = w_OD.clone(), bias_O.clone(), x_TD.clone()
    y_TO.fill_(3.0)  # it shares memory with nothing
    assert all(map(torch.equal, before, (w_OD, bias_O, x_TD)))


@given(TOKENS, st.sampled_from(WIDTHS), st.data())
def test_other_rows_change_no_bit(T: int, O: int, data: st.DataObject) -> None:  # noqa: E741
    x_TD, w_OD, bias_O = inputs(T, 48, O)
    kept = data.draw(st.integers(0, T - 1))
    want = linear(x_TD, w_OD, bias_O)[kept]
    others = torch.full_like(x_TD, float("nan"))
    others[kept] = x_TD[kept]
    assert torch.equal(linear(others, w_OD, bias_O)[kept], want)


@pytest.mark.parametrize("shape", [(3, 7), (40, 7)], ids=["few", "many"])
def test_refuses_what_does_not_fit(shape: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError):
        linear(torch.zeros(shape), torch.zeros(96, 8))
    with pytest.raises(RuntimeError):
        linear(torch.zeros(shape), torch.zeros(96, 7), torch.zeros(95))


def test_op_registration() -> None:
    x_TD, w_OD, bias_O = inputs(3, 8, 64)
    for bias in (None, bias_O):
        torch.library.opcheck(torch.ops.purestep.linear.default, (x_TD, w_OD, bias))


@pytest.mark.skipif(not HAS_MKL, reason="blocks are for MKL")
def test_blocks_divide_the_widths_of_real_models() -> None:
    for width in (576, 960, 3072, 49152, 151936, 128256, 32000):
        block = block_width(torch.empty(width, 0))
        assert block in BLOCK_WIDTHS
        assert width % block == 0
    assert block_width(torch.empty(257, 0)) == 0
    assert block_width(torch.empty(96, 0, dtype=torch.bfloat16)) == 0


@given(TOKENS, st.sampled_from(WIDTHS), st.data())
def test_two_products_are_one(T: int, O: int, data: st.DataObject) -> None:  # noqa: E741
    x_TD, w_OD, _ = inputs(T, 48, O)
    y_TO = in_two(x_TD, w_OD, data.draw(st.integers(0, O)))
    want = x_TD.double() @ w_OD.double().T
    torch.testing.assert_close(y_TO.double(), want, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 9000), st.integers(1, 40_000), st.integers(1, 200))
def test_a_cut_lies_inside_and_between_rounds(T: int, O: int, num: int) -> None:  # noqa: E741
    first = cut(T, O, num)
    assert 0 <= first < O
    assert first % (128 * num) == 0
    assert not first or T > SKINNY


def test_gate_and_up_of_256_rows_are_cut() -> None:
    """Llama 8B's on an H200, with rows of A beneath and without; nothing else of it is."""
    for T, width, first in (
        (256, 28672, 16896),
        (256, 28672 + 256, 16896),
        (192, 28672, 0),
        (257, 28672, 0),
        (256, 6144, 0),
        (256, 128256, 0),
    ):
        assert cut(T, width, 132) == first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("T", [192, 193, 256, 257])
def test_wide_products_on_a_gpu(T: int) -> None:
    """Llama 8B's gate and up, with rows of A beneath and without."""
    torch.manual_seed(0)
    x_TD = torch.randn(T, 512, device="cuda").to(torch.bfloat16)
    for width in (28672, 28672 + 256):
        w_OD = torch.randn(width, 512, device="cuda").to(torch.bfloat16)
        got, want = linear_on_gpu(x_TD, w_OD), x_TD.double() @ w_OD.double().T
        assert (got.double() - want).norm() <= 5e-3 * want.norm()
        assert got.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("T", [4095, 4096, 5001])
def test_gate_and_up_of_many_tokens_on_a_gpu(T: int, activation: str) -> None:
    """As one launch and as two, which fewer tokens take."""
    torch.manual_seed(0)
    x_TD = torch.randn(T, 512, device="cuda").to(torch.bfloat16)
    w_OD = (torch.randn(2 * 1152, 512, device="cuda") * 512**-0.5).to(torch.bfloat16)
    want = gated_mul_ref(x_TD.double() @ w_OD.double().T, torch.float64, activation)
    got = gated_linear(x_TD, w_OD, None, None, activation)
    assert (got.double() - want).norm() <= 5e-3 * want.norm()
    assert torch.equal(gated_linear(x_TD, w_OD, None, None, activation), got)
