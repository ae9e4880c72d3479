"""lora_add_tiles_ over tile_arrays: each row gets its own delta, whoever stands beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from purestep.engine.native import use_native
from purestep.ops import native
from purestep.ops.lora_linear import CHUNK, Deltas, lora_add_tiles_, num_tiles, tile_size
from purestep.ops.lora_tiles import num_chunks, tile_arrays
from purestep.state.adapters import ROW_BLOCK

PLACES = [(2, (5,)), (0, (7, 1, 4)), (3, (2, 3))]  # slot, row blocks
ROWS, WIDTH = 9 * ROW_BLOCK, 24


@pytest.fixture(params=["native", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "native" and not use_native():
        pytest.skip("no C compiler")
    if request.param == "torch":
        monkeypatch.setattr(native, "_library", None)


@settings(max_examples=40, deadline=None)
@given(
    slots=st.lists(st.sampled_from([-1, 0, 2, 3]), min_size=1, max_size=70),
    sizes=st.sampled_from([(40,), (32, 8, 16)]),
    seed=st.integers(0, 9),
)
def test_every_row_meets_its_own_rows_alone(
    slots: list[int], sizes: tuple[int, ...], seed: int
) -> None:
    source, T = torch.Generator().manual_seed(seed), len(slots)
    x_TD = torch.randn(T, WIDTH, generator=source)
    y_TO = torch.randn(T, sum(sizes), generator=source)
    a_SPD = torch.full((len(sizes), ROWS, WIDTH), torch.nan)
    b_PO = torch.full((ROWS, sum(sizes)), torch.nan)
    own: dict[int, torch.Tensor] = {}
    for slot, blocks in PLACES:
        own[slot] = torch.cat([torch.arange(8) + block * ROW_BLOCK for block in blocks])
        if slot in slots:  # the others' rows hold NaN
            a_SPD[:, own[slot]] = torch.randn(len(sizes), len(own[slot]), WIDTH, generator=source)
            b_PO[own[slot]] = torch.randn(len(own[slot]), sum(sizes), generator=source) / 20
    used = [place for place in PLACES if place[0] in slots]
    chunks, tiles = num_chunks([blocks for _, blocks in used]), num_tiles(T, len(used))
    arrays = tile_arrays(used, np.array(slots), chunks, tiles, tile_size(T))
    assert len(arrays["row_E"]) == chunks * CHUNK
    tokens = arrays["token_XI"]
    assert sorted(tokens[tokens >= 0].tolist()) == list(range(T)), "each row is in one tile"
    want_TO = y_TO.clone()
    for t, slot in enumerate(slots):
        if slot >= 0:
            shrunk_S = [x_TD[t] @ a_PD[own[slot]].T for a_PD in a_SPD]
            parts = b_PO[own[slot]].split(sizes, 1)
            want_TO[t] += torch.cat([h @ b for h, b in zip(shrunk_S, parts, strict=True)])
    before_TO = y_TO.clone()
    names = ("row_E", "span_X2", "token_XI")
    deltas = Deltas(a_SPD, b_PO, *(torch.from_numpy(arrays[name]) for name in names))
    lora_add_tiles_(y_TO, x_TD, deltas, sizes)
    torch.testing.assert_close(y_TO, want_TO, atol=1e-4, rtol=1e-4)
    bare = torch.tensor([slot < 0 for slot in slots])
    assert y_TO[bare].equal(before_TO[bare])
