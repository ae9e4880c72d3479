"""The towers on a GPU say what they say on a CPU."""

import pytest
import torch

from purestep.models.checkpoint import load_vision
from tests.models.tiny_vision import kinds, load, picture, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SIZES = [(60, 45), (1, 1), (112, 112), (60, 45), (200, 5)]


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str
)
def test_rows_of_a_gpu(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    model = load(kind)
    items = [model.item(picture(*size, seed=n)) for n, size in enumerate(SIZES)]
    vision, _ = load_vision(saved(kind)[0], dtype=dtype, device="cuda")
    with torch.inference_mode():
        rows = vision.family.encode(vision.params, vision.config, items)
    for got, want in zip(rows, model.encode(items), strict=True):
        assert got.is_cuda
        assert got.dtype == dtype
        assert got.untyped_storage().nbytes() == got.nbytes
        error = (got.float().cpu() - want).norm() / want.norm()
        assert error < tolerance
