"""The fused decoder's ops and the sampler's as torch.compile sees them: schemas, outputs of their
own, fakes that ask for no size.

T tokens, D width, N query heads, K key/value heads, H head size, F MLP width, n addends, S sampled
rows, V vocabulary.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from purestep.ops import (  # noqa: F401
    add_rms_norm,
    gated_linear,
    paged_attention,
    product,
    rope_write,
)
from purestep.ops.edit_logits import COLUMNS
from purestep.ops.lora_linear import Deltas, Shrunk, deltas_of, flat, shrunk_of
from purestep.ops.product import num_tokens, product_of, told
from purestep.ops.sample import draws_of
from tests.ops.forms import form
from tests.ops.test_native import deltas

OPS = torch.ops.purestep
T, D, N, K, H, F, BLOCK = 5, 32, 4, 2, 8, 24, 4
SIZES = (N * H, K * H, K * H)
SLOTS = [0, -1, 1, 1, 0]

WHERE = [
    ("cpu", "C"),
    ("cpu", "torch"),
    pytest.param(
        "cuda",
        "torch",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def adapters(sizes: tuple[int, ...], width: int) -> list[Tensor]:
    lora = deltas(SLOTS, width, sizes, [3, 20], 16)
    return [x.nan_to_num() if x.is_floating_point() else x for x in lora]


def places() -> list[Tensor]:
    """Row starts, context lengths and block tables; the last row is padding."""
    starts, lengths = torch.arange(T + 1).clamp(max=T - 1), torch.tensor([1, 4, 2, 3, 0])
    return [starts.int(), lengths.int(), torch.arange(T).int()[:, None]]


def draws() -> list[Tensor]:
    """Of T rows: a greedy one, warm ones, all three cuts."""
    columns = draws_of(
        np.array([0, 1, 0.7, 1.3, 1], np.float32),
        np.array([0, 0, 3, 0, 2], np.int32),
        np.array([1, 1, 1, 0.9, 1]),
        np.array([0, 0.1, 0, 0, 0], np.float32),
        np.arange(T, dtype=np.uint64),
        np.arange(T, dtype=np.int32),
    )
    return [torch.from_numpy(column) for column in columns]


def edits(*kinds: str) -> list[Tensor]:
    """An edit of each of these kinds, at place 1, and empty columns for others."""
    found = []
    for name, dtype in COLUMNS.items():
        length = int(name.partition("/")[0] in kinds)
        found.append(torch.full((length,), 1 if dtype == torch.int64 else 0.3).to(dtype))
    return found


def cases() -> dict[str, tuple[Any, list[Any]]]:
    """Arguments of each op, by a name for each form of it."""
    h, w = random(T, D), random(D)
    kv, qkv = random(2, T, BLOCK, K, H), random(T, sum(SIZES))
    turn = [random(T, H), random(T, H)]
    rope = [kv, [qkv], *turn, None, torch.tensor([0, 7, -1, 9, 14]), 1e-5, []]
    x, gate_up = random(T, D), random(2 * F, D)
    return {
        "first norm": (OPS.add_rms_norm, [h, [], w, 1e-5, None]),
        "norm": (OPS.add_rms_norm, [h, [random(T, D) + 1], w, 1e-5, None]),
        "two norms": (OPS.add_rms_norm, [h, [random(T, D) + 1], w, 1e-5, w + 1]),
        "rope": (OPS.rope_write_, rope),
        "rope and norm": (OPS.rope_write_, [*rope[:4], random(N + K, H), *rope[5:]]),
        "decode": (OPS.decode_attention, [random(T, N, H), kv, *places(), H**-0.5, 0]),
        "window": (OPS.decode_attention, [random(T, N, H), kv, *places(), H**-0.5, 2]),
        "silu": (OPS.gated_linear, [x, gate_up, random(2 * F), [], "silu"]),
        "gelu": (OPS.gated_linear, [x, gate_up, None, adapters((F, F), D), "gelu_pytorch_tanh"]),
        "product": (OPS.lora_linear, [x, gate_up, random(2 * F), []]),
        "one slice": (OPS.lora_linear, [x, gate_up, None, adapters((2 * F,), D)]),
        "bare slices": (OPS.shrunk_linear, [x, gate_up, None, [], [F, F]]),
        "slices": (OPS.shrunk_linear, [x, gate_up, None, adapters((F, F), D), [F, F]]),
        "tiles": (OPS.lora_add_tiles_, [random(T, 2 * F), x, adapters((F, F), D), [F, F]]),
        "head": (OPS.head_linear_, [torch.zeros(T, 2 * F), x, gate_up]),
        "greedy": (OPS.greedy, [x]),
        "draw": (OPS.draw, [None, x, draws(), 3]),
        "edited draw": (OPS.draw, [x + 1, x, draws(), 3]),
        "score": (OPS.score, [x, torch.tensor([0, D - 1, 7, 3, 3])]),
        "likeliest": (OPS.likeliest, [x, 3]),
        "no likeliest": (OPS.likeliest, [x, 0]),
        "edits": (OPS.edited, [x, edits("bias", "drawn", "allowed")]),
        "no edits": (OPS.edited, [x, edits()]),
    }


SAMPLER = OPS.greedy, OPS.draw, OPS.score, OPS.likeliest, OPS.edited  # of float32 alone


def on(device: str, dtype: torch.dtype, value: Any) -> Any:
    """Floating-point tensors in another format, all of them on another device."""
    if isinstance(value, list):
        return [on(device, dtype, item) for item in value]
    if not isinstance(value, Tensor):
        return dtype if value is torch.float32 else value
    return value.to(device, dtype if value.is_floating_point() else value.dtype)


@pytest.mark.parametrize(("device", "ops"), WHERE)
@pytest.mark.parametrize("name", cases())
def test_opcheck(name: str, device: str, ops: str) -> None:
    """float32, and bfloat16 on a GPU, where products have addends."""
    op, args = cases()[name]
    with form(ops):
        alone = device == "cpu" or op in SAMPLER
        for dtype in (torch.float32, torch.bfloat16)[: 1 if alone else 2]:
            given = on(device, dtype, args)
            if op is OPS.head_linear_:
                given[0] = given[0].float()
            torch.library.opcheck(op.default, given, test_utils=checks(op, given))


def checks(op: Any, args: list[Any]) -> tuple[str, ...]:
    """All that opcheck has; but what a token's products with rows of other adapters hold is
    unwritten, and so is not the same twice."""
    known = "test_schema", "test_autograd_registration", "test_faketensor"
    left = op is OPS.shrunk_linear and args[3] and args[0].is_cuda
    return known if left else (*known, "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", ["one slice", "slices"])
def test_opcheck_of_products_with_rows_beneath(name: str) -> None:
    op, args = cases()[name]
    w_OD, a_SPD = args[1], args[3][0]
    found = op(*args, torch.cat((w_OD, a_SPD.flatten(0, 1))))
    assert [len(y) for y in found] == [0, T, 0]
    torch.library.opcheck(op.default, [*args, torch.cat((w_OD, a_SPD.flatten(0, 1)))])


@pytest.mark.parametrize("name", ["product", "one slice", "bare slices", "slices"])
def test_opcheck_of_products_with_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As products of 16 bits on a GPU are told."""
    monkeypatch.setattr(product, "has_addends", lambda _: True)
    op, args = cases()[name]
    found = op(*args)
    assert [len(y) for y in found] == [T, 0]
    torch.library.opcheck(op.default, args)


def test_a_product_is_found_in_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    x, whole, addends = random(T, D), random(T, F), random(3, T, F)
    wide, wide_WD = random(T, F + 8), random(F + 8, D)
    assert [y is whole for y in told(whole, x, F, None)] == [True]
    for many in (False, True):
        monkeypatch.setattr(product, "has_addends", lambda _, many=many: many)
        assert product_of(told(whole, x, F, None)) is whole
        for y in (whole, addends, wide):
            assert product_of(told(y, x, F, wide_WD)) is y
            assert num_tokens(told(y, x, F, wide_WD)) == T
    assert product_of(told(addends, x, F, None)) is addends


def test_deltas_come_back_from_their_tensors() -> None:
    lora, h = deltas(SLOTS, D, (F,), [3, 20], 16), random(2, T, 48)
    assert flat(None) == []
    assert deltas_of([]) is shrunk_of([]) is None
    back = shrunk_of(flat(Shrunk(h, lora)))
    assert back.h is h
    for given in (back.deltas, deltas_of(flat(lora))):
        assert isinstance(given, Deltas)
        assert all(a is b for a, b in zip(given, lora, strict=True))


@pytest.mark.parametrize("few", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("with_lora", [False, True])
def test_fakes_of_a_gpu_know_no_lengths(few: torch.dtype, with_lora: bool) -> None:
    """Of a product in 16 bits there are two forms, of which T decides; of float32 one. What is left
    of deltas comes last."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        x, w = (torch.empty(n, D, dtype=few, device="cuda") for n in (T, 2 * F))
        wide, norm = (torch.empty(*n, dtype=few, device="cuda") for n in ((T, 2 * F), (2 * F,)))
        a, b = torch.empty(2, 40, D, device="cuda"), torch.empty(40, 2 * F, device="cuda")
        tiles = [torch.empty(n, dtype=torch.int32, device="cuda") for n in ((48,), (4, 2), (3, 16))]
        lora = [a, b, *tiles] if with_lora else []
        found = OPS.shrunk_linear(x, w, None, lora, [F, F])
        active = OPS.gated_linear(x, w, None, lora, "silu")
        lone = OPS.lora_linear(x, w, None, lora)
        *y, h = found if with_lora else [*found, None]
        total, normed = OPS.add_rms_norm(wide, lone, norm, 1e-5, None)
    if few == torch.float32:
        assert [z.shape for z in y] == [(T, 2 * F)]
    else:
        whole, addends = y
        assert (whole.dtype, addends.dtype) == (few, torch.float32)
        assert whole.shape[1:] == (2 * F,)
        assert addends.shape[1:] == (T, 2 * F)
        assert all(free_unbacked_symbols(z.shape[0]) for z in y)
    assert len(lone) == len(y)
    if with_lora:
        assert (h.dtype, h.shape[1:]) == (torch.float32, (T, 2 * 48))
        assert free_unbacked_symbols(h.shape[0])
    assert (active.shape, active.dtype) == ((T, F), few)
    assert total.shape == normed.shape == (T, 2 * F)


def test_fakes_of_the_sampler_take_any_number() -> None:
    """Rows, likeliest tokens and largest k of which nothing is known, on a GPU: no guard."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        S, K, E = (env.create_unbacked_symint() for _ in range(3))
        raw_SV = torch.empty(S, 40, device="cuda")
        ids_E, floats_E = (torch.empty(E, dtype=d, device="cuda") for d in (torch.int64, None))
        columns = [ids_E if d == torch.int64 else floats_E for d in COLUMNS.values()]
        edited_SV = OPS.edited(raw_SV, columns)
        tokens = OPS.greedy(raw_SV), OPS.draw(edited_SV, raw_SV, [ids_E] * 12, K)
        id_SK, logprob_SK = OPS.likeliest(raw_SV, K)
        score_S = OPS.score(raw_SV, torch.empty(S, dtype=torch.int64, device="cuda"))
        x_SD = torch.empty(S, D, dtype=torch.bfloat16, device="cuda")
        y_SV = OPS.linear(x_SD, torch.empty(40, D, dtype=torch.bfloat16, device="cuda"), None)
    assert edited_SV.shape == raw_SV.shape
    assert all((x.shape, x.dtype) == ((2, S), torch.int32) for x in tokens)
    assert (id_SK.shape, id_SK.dtype) == ((S, K), torch.int64)
    assert (logprob_SK.shape, logprob_SK.dtype) == ((S, K), torch.float32)
    assert (score_S.shape, y_SV.shape, y_SV.dtype) == ((S,), (S, 40), torch.bfloat16)
    assert all(x.is_cuda for x in (edited_SV, *tokens, id_SK, logprob_SK, score_S, y_SV))
    assert not env.guards
