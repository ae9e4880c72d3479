"""Adapters on towers and projectors: in one call of items with different adapters and none each
item gets what PEFT makes of it alone (W23, LF-23)."""

import pytest
import torch
from torch import Tensor

from purestep.models.config import TOWER
from purestep.models.tower_linears import tower_linears
from purestep.models.tower_rows import ItemAdapters, TowerRows
from purestep.state.adapters import ROW_BLOCK
from tests.models.tiny_vision import load, picture
from tests.models.tower_adapters import adapter, wanted_rows

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
)
PICTURES = picture(60, 45), picture(45, 60, seed=1), picture(112, 60, seed=2)
BATCH = (  # picture, adapter
    (0, "all"),
    (1, None),
    (0, "some"),
    (2, "all"),
    (0, None),
    (1, "some"),
    (2, None),
    (1, "all"),
)
PLACES = {"all": (1, (4,)), "some": (0, (3, 1))}  # slot, row blocks


def rows_of(kind: str) -> dict[str, TowerRows]:
    """Rows of both adapters at their places; elsewhere NaN."""
    model, found, P = load(kind), {}, 5 * ROW_BLOCK
    for linear in tower_linears(model.vision.family, model.vision.config):
        if linear.parent != TOWER:
            continue
        a_SPD = torch.full((len(linear.out_sizes), P, linear.in_features), torch.nan)
        b_PO = torch.full((P, linear.out_features), torch.nan)
        for name, (_, blocks) in PLACES.items():
            index = (torch.tensor(blocks)[:, None] * ROW_BLOCK + torch.arange(ROW_BLOCK)).flatten()
            a_SPD[:, index], b_PO[index] = 0, 0
            if (arena := adapter(kind, name).arenas.get(linear.name)) is not None:
                a_SPD[:, index], b_PO[index] = arena.a_LSRD[0], arena.b_LRO[0]
        found[linear.name] = TowerRows(a_SPD=a_SPD, b_PO=b_PO, out_sizes=linear.out_sizes)
    return found


@torch.inference_mode()
def encoded(kind: str, batch: tuple[tuple[int, str | None], ...]) -> list[Tensor]:
    vision, items = load(kind).vision, [load(kind).item(PICTURES[i]) for i, _ in batch]
    adapters = ItemAdapters(
        rows=rows_of(kind),
        places=tuple(PLACES.values()),
        slots=tuple(PLACES[name][0] if name else -1 for _, name in batch),
        device="cpu",
    )
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
