"""kv_write_: every live token lands in its place, and nothing else moves."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from purestep.ops.kv_write import kv_write_

NAN = float("nan")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def writes(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    K, H = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    places = draw(st.permutations(range(blocks * size)))[: draw(st.integers(0, blocks * size))]
    index = draw(st.permutations([*places, *[-1] * draw(st.integers(0, 3))]))
    T, seed = len(index), draw(st.integers(0, 99))
    kv = random(2, blocks, size, K, H, seed=seed)
    kv[:, draw(st.integers(0, blocks - 1))] = NAN  # what stands there does not matter
    k, v = random(2, T, K, H, seed=seed + 1)
    return kv, k, v, torch.tensor(index, dtype=torch.int64)


@given(writes())
def test_matches_one_token_at_a_time(case: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    kv, k, v, index = case
    want = kv.clone()
    for t, place in enumerate(index.tolist()):
        if place >= 0:
            block, offset = divmod(place, kv.shape[2])
            want[0, block, offset], want[1, block, offset] = k[t], v[t]
    kv_write_(kv, k, v, index)
    assert torch.equal(kv.view(torch.int32), want.view(torch.int32))  # bits: NaN equals itself


def test_reads_strided_values() -> None:
    """v is a slice of the fused projection, so its rows are far apart."""
    kv, fused = torch.zeros(2, 2, 4, 2, 3), random(5, 20)
    k, v = fused[:, :6].unflatten(1, (2, 3)), fused[:, 14:].unflatten(1, (2, 3))
    kv_write_(kv, k, v, torch.arange(5))
    assert torch.equal(kv[1].flatten(0, 1)[:5], v)


@pytest.mark.parametrize("index", [[0, 3, 5], [-1, 3, 5], [-1, -1, -1]], ids=str)
def test_opcheck(index: list[int]) -> None:
    k, v = random(2, 3, 2, 4)
    args = (torch.zeros(2, 2, 4, 2, 4), k, v, torch.tensor(index))
    torch.library.opcheck(torch.ops.purestep.kv_write_.default, args)


@pytest.mark.parametrize(
    ("k", "index"),
    [
        (torch.zeros(3, 2, 5), torch.arange(3)),
        (torch.zeros(3, 1, 4), torch.arange(3)),
        (torch.zeros(3, 2, 4), torch.arange(2)),
        (torch.zeros(3, 2, 4), torch.arange(3, dtype=torch.int32)),
        (torch.zeros(3, 2, 4, dtype=torch.bfloat16), torch.arange(3)),
    ],
    ids=["H", "K", "T", "index dtype", "dtype"],
)
def test_refuses_what_does_not_fit(k: Tensor, index: Tensor) -> None:
    kv = torch.zeros(2, 2, 4, 2, 4)
    with pytest.raises(ValueError, match="kv_write_ wants"):
        kv_write_(kv, k, k, index)
    assert not kv.any()
