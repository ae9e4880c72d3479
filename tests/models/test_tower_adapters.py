"""Adapters on towers and projectors: in one call of items with different adapters and none each
item gets what PEFT makes of it alone (W23, LF-23)."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from purestep.models.checkpoint import load_vision
from purestep.models.config import TOWER
from purestep.models.tower_linears import tower_linears
from tests.models.tiny_vision import load, saved
from tests.models.tower_adapters import BATCH, PICTURES, adapter, item_adapters, wanted_rows

KINDS = (
    "llava",
    "llava-layers",
    "llava-siglip",
    "llava_next",
    "gemma3",
    "idefics3",
    "pixtral",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
)


@torch.inference_mode()
def encoded(kind: str, batch: Sequence[tuple[int, str | None]]) -> list[Tensor]:
    vision, items = load(kind).vision, [load(kind).item(PICTURES[i]) for i, _ in batch]
    adapters = item_adapters(kind, [name for _, name in batch])
    return vision.family.encode(vision.params, vision.config, items, adapters)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_call_is_one_call_for_each_adapter(kind: str) -> None:
    rows = encoded(kind, BATCH)
    base = load(kind).encode([load(kind).item(PICTURES[i]) for i, _ in BATCH])
    for (number, name), got, bare in zip(BATCH, rows, base, strict=True):
        want = wanted_rows(kind, name, PICTURES[number])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        if name is None:
            assert got.equal(bare), "an item without an adapter gets exactly no delta"
        else:
            assert (got - bare).abs().max() > 0.01
        assert got.untyped_storage().nbytes() == got.nbytes, "the rows own their memory"
    for turned, got in zip(encoded(kind, BATCH[::-1])[::-1], rows, strict=True):
        torch.testing.assert_close(turned, got, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_whole_models_are_read_whole(kind: str) -> None:
    """Every linear that `all-linear` means is known, those that are never run too: these have no
    rows."""
    model = load(kind)
    linears = tower_linears(model.vision.family, model.vision.config)
    children = {child for linear in linears for child in linear.children}
    found, names = adapter(kind, "all"), {linear.name for linear in linears}
    assert children == {name for name in found.modules if name in children}
    run = {linear.name for linear in linears if linear.parent == TOWER}
    assert run == found.arenas.keys() & names
    assert (run < names) == (kind in ("llava", "llava-layers", "llava_next"))
    assert found.linears == ("down", "gate_up", "out", "qkv", "tower")
    assert found.version != adapter(kind, "some").version


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str
)
def test_a_mixed_call_on_a_gpu(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    items = [load(kind).item(PICTURES[i]) for i, _ in BATCH]
    vision, _ = load_vision(saved(kind)[0], dtype=dtype, device="cuda")
    adapters = item_adapters(kind, [name for _, name in BATCH], dtype=dtype, device="cuda")
    with torch.inference_mode():
        rows = vision.family.encode(vision.params, vision.config, items, adapters)
        base = vision.family.encode(vision.params, vision.config, items)
    for (_, name), got, bare, want in zip(BATCH, rows, base, encoded(kind, BATCH), strict=True):
        assert (got.float().cpu() - want).norm() < tolerance * want.norm()
        assert name is not None or got.equal(bare)
