"""merge_rows_ against a loop; counts are exact (W19)."""

import pytest
import torch

from purestep.ops.merge_rows import merge_rows_


@pytest.mark.parametrize(("T", "E", "D"), [(5, 3, 2), (4, 4, 7), (6, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_comes_to_its_own_place(T: int, E: int, D: int, dtype: torch.dtype) -> None:
    h_TD, rows_ED = torch.zeros(T, D, dtype=dtype), torch.randn(E, D)
    index_E = torch.randperm(T)[:E]
    want = h_TD.clone()
    for place, row in zip(index_E.tolist(), rows_ED, strict=True):
        want[place] = row.to(dtype)
    torch.library.opcheck(torch.ops.purestep.merge_rows_, (h_TD.clone(), index_E, rows_ED))
    merge_rows_(h_TD, index_E, rows_ED)
    assert torch.equal(h_TD, want)


def test_the_example_of_the_specification() -> None:
    """Section 8: three places for three rows; two rows, or one, are refused and never spread."""
    h_TD, index_E = torch.zeros(5, 2), torch.tensor([1, 2, 4])
    rows_ED = torch.tensor([[1.0, 1], [1, 1], [2, 2]])
    for count in (0, 1, 2):
        with pytest.raises(ValueError, match=rf"\(3,\) \({count}, 2\)"):
            merge_rows_(h_TD, index_E, rows_ED[:count])
    assert not h_TD.any()
    merge_rows_(h_TD, index_E, rows_ED)
    assert h_TD[:, 0].tolist() == [0, 1, 1, 0, 2]


def test_other_shapes_and_dtypes_are_refused() -> None:
    h_TD = torch.zeros(3, 2)
    for index_E, rows_ED in (
        (torch.tensor([0, 1]), torch.zeros(2, 3)),
        (torch.tensor([[0, 1]]), torch.zeros(2, 2)),
        (torch.tensor([0, 1, 2, 0]), torch.zeros(4, 2)),
        (torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, 2)),
    ):
        with pytest.raises(ValueError, match="merge_rows_ wants"):
            merge_rows_(h_TD, index_E, rows_ED)
