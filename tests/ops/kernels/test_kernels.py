"""Every Triton kernel against float64: on a GPU, else by triton's interpreter.

The interpreter multiplies no bfloat16, so float16 stands for it there.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from purestep.models.config import RopeConfig
from purestep.models.rope import rope_table
from purestep.ops.add_rms_norm import add_rms_norm_ref
from purestep.ops.gated_linear import gated_mul_ref
from purestep.ops.kernels import attention, draw, elementwise, folded, gated, greedy, products
from purestep.ops.kernels.deltas import add_slices_, expand_, shrink
from purestep.ops.kv_write import kv_write_ref_
from purestep.ops.lora_linear import (
    Deltas,
    Shrunk,
    lora_linear_ref,
    num_tiles,
    tile_size,
)
from purestep.ops.paged_attention import paged_attention_ref
from purestep.ops.rope_write import rope_write_ref_
from purestep.ops.sample import Draws, _cut, draws_of, gumbel_noise, score
from purestep.ops.sample import draw as sample_draw
from tests.ops.kernels.interpreter import DEVICE

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = [(torch.float32, 1e-5), (HALF, 1e-2)]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    """By the norm of the difference; zeros never pass."""
    want = want.double().cpu()
    return bool((got.double().cpu() - want).norm() <= tolerance * want.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("counts", "contexts", "N", "K", "H", "window"),
    [
        ([5, 1, 0, 33], [9, 17, 3, 33], 4, 2, 16, 0),
        ([1, 20, 2], [70, 40, 50], 6, 2, 24, 7),
        ([3, 1], [20, 70], 8, 2, 64, 0),
        ([2, 9], [40, 9], 3, 1, 80, 16),
    ],
)
def test_attention(counts, contexts, N, K, H, window, dtype, tolerance) -> None:
    """Chunks and decodes, grouped heads, windows, padding; NaN wherever a row does not see."""
    torch.manual_seed(0)
    R, B, M, T = len(counts), 16, 6, sum(counts) + 3
    kv, q = random(2, R * M, B, K, H, dtype=dtype), random(T, N, H, dtype=dtype)
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    context = torch.tensor(contexts, dtype=torch.int32)
    table = torch.randperm(R * M).view(R, M).int()
    for row, length in enumerate(contexts):
        kv[:, table[row, length // B].long(), length % B :] = torch.nan
        kv[:, table[row, length // B + 1 :].long()] = torch.nan

    def want(start, context, q):
        args = (start, context, table, H**-0.5, window)
        return paged_attention_ref(q.cpu().double(), kv.cpu().double(), *args)

    def have(start, context, q, **options):
        args = (start.to(DEVICE), context.to(DEVICE), table.to(DEVICE), H**-0.5, window)
        return attention.launch(q, kv, *args, **options)

    BLOCK_H = triton.next_power_of_2(H)
    for tokens in (T, attention.LONG * R):
        shape = attention.tile_shape(False, False, tokens, R, BLOCK_H, dtype == torch.float32)
        got = have(start, context, q, shape=shape)
        assert close(got, want(start, context, q), tolerance)
    assert not got[-3:].any()
    one = torch.arange(R + 1, dtype=torch.int32)
    one[-1], context[-1] = R - 1, 0  # the last row is padding
    for splits in (1, 4):
        got = have(one, context, q[:R], uniform=True, splits=splits)
        assert close(got, want(one, context, q[:R]), tolerance)
        assert not got[-1].any()


@pytest.mark.parametrize(("dtype", "_tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("counts", [[5, 1, 33], [1, 1, 20], [70, 2]], ids=str)
def test_padded_rows_and_tokens_change_no_bit_of_attention(counts, dtype, _tolerance) -> None:
    """As a graph has them: without context and queries, their block tables anything."""
    torch.manual_seed(0)
    R, B, M, T = len(counts), 16, 6, sum(counts)
    more_rows, more_tokens = 9, 21
    kv = random(2, R * M, B, 2, 32, dtype=dtype)
    q = random(T + more_tokens, 8, 32, dtype=dtype)
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    context, table = torch.tensor(counts).int() + 7, torch.randperm(R * M).view(R, M).int()

    def have(q, start, context, table):
        args = (start.to(DEVICE), context.to(DEVICE), table.to(DEVICE), 32**-0.5)
        return attention.launch(q, kv, *args)

    want = have(q[:T], start, context, table)
    start = torch.cat([start, torch.full((more_rows,), T).int()])
    context = torch.cat([context, torch.zeros(more_rows).int()])
    table = torch.cat([table, torch.full((more_rows, M), 2**30).int()])
    table = torch.cat([table, torch.full((R + more_rows, 3), 2**30).int()], 1)
    got = have(q, start, context, table)
    assert torch.equal(got[:T], want)
    assert not got[T:].any()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "N", "K", "H", "window"),
    [
        ([(17, [4, -7, 2, -4]), (33, [-33])], 4, 2, 16, 0),
        ([(70, [3, -20, 9]), (40, [1]), (0, [])], 6, 2, 24, 7),
        ([(70, [-50, 5]), (20, [-6, -3])], 8, 2, 64, 0),
        ([(80, [-77, 3])], 3, 1, 80, 30),
        ([(5, [5]), (90, [1]), (60, [-40, 1])], 2, 1, 256, 0),
    ],
)
def test_attention_in_both_directions(rows, N, K, H, window, dtype, tolerance) -> None:
    """CI-07. Rows as (context, runs of queries), a negative run sees all of itself."""
    torch.manual_seed(0)
    counts, contexts = [sum(map(abs, runs)) for _, runs in rows], [c for c, _ in rows]
    R, B, M, T = len(counts), 16, 6, sum(counts) + 3
    kv, q = random(2, R * M, B, K, H, dtype=dtype), random(T, N, H, dtype=dtype)
    ends = []
    for length, runs in rows:
        at = length - sum(map(abs, runs))
        for run in runs:
            at += abs(run)
            ends += [at if run < 0 else 0] * abs(run)
    end = torch.tensor([*ends, 0, 0, 0])
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    context = torch.tensor(contexts, dtype=torch.int32)
    table = torch.randperm(R * M).view(R, M).int()
    for row, length in enumerate(contexts):
        kv[:, table[row, length // B].long(), length % B :] = torch.nan
        kv[:, table[row, length // B + 1 :].long()] = torch.nan
    here = (start, context, table, H**-0.5, window)
    want = paged_attention_ref(q.cpu().double(), kv.cpu().double(), *here, end)
    there = (start.to(DEVICE), context.to(DEVICE), table.to(DEVICE), H**-0.5, window)
    got = attention.launch(q, kv, *there, end.to(DEVICE))
    assert close(got, want, tolerance)
    assert not got[-3:].any()
    causal = attention.launch(q, kv, *there)
    assert torch.equal(attention.launch(q, kv, *there, torch.zeros_like(end).to(DEVICE)), causal)
    assert not close(got, causal, tolerance)


def deltas(T: int, width: int, sizes: tuple[int, ...], P: int, dtype: torch.dtype) -> Deltas:
    """Two adapters and none in turn, of 8 and of 24 rows; rows of nobody are NaN."""
    chunks = torch.full((4, 16), -1)
    chunks[0, :8] = torch.arange(16, 24)
    chunks[1, :8], chunks[1, 8:], chunks[2, :8] = (torch.arange(i, i + 8) for i in (0, 24, 8))
    a = random(len(sizes), P, width, dtype=dtype) / width**0.5
    b = random(P, sum(sizes), dtype=dtype)
    a[:, 32:], b[32:] = torch.nan, torch.nan
    tiles = tiles_of(T, tile_size(T))
    assert len(tiles[1]) <= num_tiles(T, 2) + 1
    return Deltas(a, b, chunks.flatten().int().to(DEVICE), *tiles)


def tiles_of(T: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Spans and tokens of the tiles of such adapters, and of one that is not needed."""
    spans, tokens = [(0, 3)], []
    for turn, span in ((1, (0, 0)), (0, (0, 1)), (2, (1, 3))):
        for part in torch.arange(turn, T, 3).split(size) if turn < T else ():
            spans.append(span)
            tokens.append(torch.nn.functional.pad(part, (0, size - len(part)), value=-1))
    spans.append((0, 0))
    tokens.append(torch.full((size,), -1))
    return torch.tensor(spans).int().to(DEVICE), torch.stack(tokens).int().to(DEVICE)


def in_large_tiles(lora: Deltas, T: int) -> Deltas:
    """The same, of whose tiles a program takes a piece."""
    return Deltas(*lora[:3], *tiles_of(T, 64))


def wide(lora: Deltas) -> Deltas:
    rows = (torch.nan_to_num(lora.a_SPD), torch.nan_to_num(lora.b_PO))
    return Deltas(*(x.cpu().double() for x in rows), *(x.cpu() for x in lora[2:]))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(48,), (64, 32, 80)], ids=str)
def test_deltas_of_a_product_of_slices(sizes, dtype, tolerance) -> None:
    """Added to a product that was made elsewhere, to each slice its own."""
    torch.manual_seed(0)
    x, lora = random(41, 80, dtype=dtype), deltas(41, 80, sizes, 40, dtype)
    y, zeros = random(41, sum(sizes), dtype=dtype), torch.zeros(sum(sizes), 80).double()
    want = y.cpu().double() + lora_linear_ref(x.cpu().double(), zeros, None, wide(lora), sizes)
    bare = y.clone()
    add_slices_(y, x, lora, sizes)
    assert close(y, want, tolerance)
    assert not close(bare, want, tolerance)
    assert y[1::3].equal(bare[1::3]), "a token without an adapter gets exactly no delta"


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "width", "O", "P"),
    [(1, 64, 48, 32), (5, 80, 112, 40), (17, 256, 64, 32), (70, 64, 192, 40)],
)
def test_products(T, width, O, P, dtype, tolerance) -> None:  # noqa: E741
    """A product, its addends, and deltas in one addend or added to the product."""
    torch.manual_seed(0)
    x, w = random(T, width, dtype=dtype), random(O, width, dtype=dtype) / width**0.5
    bias, lora = random(O, dtype=dtype), deltas(T, width, (O,), P, dtype)
    plain = [t.cpu().double() for t in (x, w, bias)]
    base = lora_linear_ref(*plain, None, (O,))
    want = lora_linear_ref(*plain, wide(lora), (O,))
    bare = torch.arange(T) % 3 == 1
    if T <= 64:
        got, _ = products.skinny(x, w, bias)
        assert close(got.double().sum(0) if got.dim() == 3 else got, base, tolerance)
        got, h = products.skinny(x, w, bias, lora, room=True)
        expand_(got, Shrunk(h, lora), dtype)
        assert close(got.double().sum(0), want, tolerance)
        delta = got[-1].cpu()[bare]
        assert not delta.any()
        assert torch.signbit(delta).all(), "minus zero is what changes no bit"
    y = base.to(dtype).to(DEVICE)
    kept, h = y.clone(), shrink(x, lora)
    expand_(y, Shrunk(h, lora), dtype)
    assert close(y, want, tolerance)
    assert torch.equal(y.cpu()[bare], kept.cpu()[bare])
    other = kept.clone()
    expand_(other, Shrunk(in_three(h), lora), dtype)
    assert close(other, want, tolerance)
    y, none = beneath(x, w, lora)
    y[:, :O] = kept
    expand_(y, Shrunk(none, lora), dtype)
    assert close(y[:, :O], want, tolerance)
    assert torch.equal(y[:, :O].cpu()[bare], kept.cpu()[bare])
    h = random(T, O, dtype=dtype)
    whole = elementwise.add_rms_norm(h, y, h[0], 1e-5)
    for got, own in zip(
        whole, elementwise.add_rms_norm(h, y[:, :O].clone(), h[0], 1e-5), strict=True
    ):
        assert torch.equal(got, own), "what lies behind a product is not read"


def test_the_activation_is_in_the_product_of_many_tokens_on_a_hopper_gpu() -> None:
    llama, hopper = (4096, 14336), (9, 0)
    assert gated.fits(4096, *llama, torch.bfloat16, hopper)
    for T, D, F, dtype, capability in (
        (4095, *llama, torch.bfloat16, hopper),
        (4096, 4096 + 32, 14336, torch.bfloat16, hopper),
        (4096, 4096, 14336 + 64, torch.bfloat16, hopper),
        (4096, *llama, torch.float32, hopper),
        (4096, *llama, torch.bfloat16, (8, 0)),
        (4096, *llama, torch.bfloat16, (0, 0)),
    ):
        assert not gated.fits(T, D, F, dtype, capability)


def test_deltas_of_many_tokens() -> None:
    """Programs take pieces of tiles, and several blocks of outputs."""
    torch.manual_seed(0)
    T, O = 514, 304  # noqa: E741
    x, y, lora = random(T, 16, dtype=HALF), random(T, O, dtype=HALF), deltas(T, 16, (O,), 32, HALF)
    zeros, bare = torch.zeros(O, 16).double(), y.clone()
    want = y.cpu().double() + lora_linear_ref(x.cpu().double(), zeros, None, wide(lora), (O,))
    expand_(y, Shrunk(shrink(x, lora), lora), HALF)
    assert close(y, want, 1e-2)
    assert not close(bare, want, 1e-2)
    assert torch.equal(y[1::3], bare[1::3])


@pytest.mark.parametrize(
    ("T", "width", "F", "activation"),
    [(150, 192, 256, "silu"), (128, 64, 384, "gelu_pytorch_tanh"), (9, 128, 128, "silu")],
)
def test_activation_in_a_product(T, width, F, activation) -> None:
    torch.manual_seed(0)
    x, w = random(T, width, dtype=HALF), random(2 * F, width, dtype=HALF) / width**0.5
    flat = lora_linear_ref(*(t.cpu().double() for t in (x, w)), None, None, (F, F))
    got = gated.gated(x, w, activation != "silu")
    assert close(got, gated_mul_ref(flat, torch.float64, activation), 1e-2)
    y = flat.to(HALF).to(DEVICE)
    assert close(got, elementwise.gated_mul(y, HALF, activation != "silu"), 1e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "width", "F", "P", "activation"),
    [
        (5, 80, 24, 40, "silu"),
        (50, 64, 256, 32, "gelu_pytorch_tanh"),
        (70, 64, 352, 40, "silu"),
        (514, 32, 32, 32, "gelu_pytorch_tanh"),
    ],
)
def test_activation_with_deltas(T, width, F, P, activation, dtype, tolerance) -> None:
    """Both forms of a product and of what was shrunk; base tokens keep their bits."""
    torch.manual_seed(0)
    x, w = random(T, width, dtype=dtype), random(2 * F, width, dtype=dtype) / width**0.5
    lora = deltas(T, width, (F, F), P, dtype)
    plain = [t.cpu().double() for t in (x, w)]
    flat = lora_linear_ref(*plain, None, wide(lora), (F, F))
    want, gelu = gated_mul_ref(flat, torch.float64, activation), activation != "silu"
    bare, (y, h) = torch.arange(T) % 3 == 1, shrunk_parts(x, w, lora)
    got = folded.gated_mul(y, dtype, gelu, Shrunk(h, lora))
    assert close(got, want, tolerance)
    three = folded.gated_mul(y, dtype, gelu, Shrunk(in_three(h), lora))
    assert close(three, want, tolerance)
    large = folded.gated_mul(y, dtype, gelu, Shrunk(h, in_large_tiles(lora, T)))
    assert torch.equal(large, got)
    whole, none = beneath(x, w, lora)
    assert close(folded.gated_mul(whole, dtype, gelu, Shrunk(none, lora)), want, tolerance)
    assert torch.equal(got.cpu()[bare], elementwise.gated_mul(y, dtype, gelu).cpu()[bare])


def in_three(h: torch.Tensor) -> torch.Tensor:
    """The same as three addends."""
    one = h.sum(0)
    return torch.stack((one / 4, one / 2, one / 4))


def beneath(x, w, lora) -> tuple[torch.Tensor, torch.Tensor]:
    """One product with weights and all rows of A, as where these lie beneath the weights."""
    wide = torch.cat((w, lora.a_SPD.flatten(0, 1))).cpu().float()
    none = torch.zeros(0, len(x), len(lora.a_SPD) * len(lora.row_E), device=DEVICE)
    return (x.cpu().float() @ wide.T).to(x.dtype).to(DEVICE), none


def shrunk_parts(x, w, lora) -> tuple[torch.Tensor, torch.Tensor]:
    if len(x) <= 64:
        return products.skinny(x, w, None, lora)
    return (x.cpu().float() @ w.cpu().float().T).to(x.dtype).to(DEVICE), shrink(x, lora)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "N", "K", "H", "share", "norm"),
    [
        (5, 4, 2, 16, 1.0, True),
        (66, 6, 2, 24, 0.5, False),
        (70, 4, 2, 32, 1.0, True),
    ],
)
def test_rope_write_with_deltas(T, N, K, H, share, norm, dtype, tolerance) -> None:
    torch.manual_seed(0)
    sizes, width = (N * H, K * H, K * H), 80
    x, w = random(T, width, dtype=dtype), random(sum(sizes), width, dtype=dtype) / width**0.5
    lora = deltas(T, width, sizes, 40, dtype)
    kv = torch.full((2, T // 4 + 3, 4, K, H), torch.nan, dtype=dtype, device=DEVICE)
    index = torch.randperm(kv.shape[1] * 4)[:T].to(DEVICE)
    index[1] = -1
    cos, sin = rope_table(RopeConfig(share=share), H, torch.randint(99, (T,)).to(DEVICE), dtype)
    weights = random(N + K, H, dtype=dtype) if norm else None
    want_kv, plain = kv.cpu().double(), [t.cpu().double() for t in (x, w)]
    flat = lora_linear_ref(*plain, None, wide(lora), sizes)
    rest = (None if weights is None else weights.cpu().double(), index.cpu(), 1e-6)
    want = rope_write_ref_(want_kv, flat, cos.cpu().double(), sin.cpu().double(), *rest)
    y, h = shrunk_parts(x, w, lora)
    args = (cos, sin, weights, index, 1e-6)
    got = folded.rope_write_(kv, y, *args, Shrunk(h, lora))
    assert close(got, want, tolerance)
    again = folded.rope_write_(torch.zeros_like(kv), y, *args, Shrunk(in_three(h), lora))
    assert close(again, want, tolerance)
    large = in_large_tiles(lora, T)
    assert torch.equal(folded.rope_write_(torch.zeros_like(kv), y, *args, Shrunk(h, large)), got)
    whole, none = beneath(x, w, lora)
    again = folded.rope_write_(torch.zeros_like(kv), whole, *args, Shrunk(none, lora))
    assert close(again, want, tolerance)
    assert torch.equal(kv.isnan().cpu(), want_kv.isnan())
    assert close(torch.nan_to_num(kv), torch.nan_to_num(want_kv), tolerance)
    bare, base_kv = torch.arange(T) % 3 == 1, torch.zeros_like(kv)
    base = elementwise.rope_write_(base_kv, y, *args).cpu()[bare]
    assert torch.equal(got.cpu()[bare], base) or (norm and close(got[bare], base, tolerance))


def test_heads_that_a_program_rotates_change_no_bit() -> None:
    torch.manual_seed(0)
    T, N, K, H, found = 9, 8, 4, 16, []
    sizes = (N * H, K * H, K * H)
    x, w = random(T, 32, dtype=HALF), random(sum(sizes), 32, dtype=HALF)
    lora, place = deltas(T, 32, sizes, 40, HALF), torch.arange(T).to(DEVICE)
    y, h = shrunk_parts(x, w, lora)
    cos, sin = rope_table(RopeConfig(share=0.5), H, place, HALF)
    for heads in (1, 2, 4):
        kv = torch.zeros((2, T, 1, K, H), dtype=HALF, device=DEVICE)
        args = cos, sin, None, place, 1e-6, Shrunk(h, lora)
        found.append((folded.rope_write_(kv, y, *args, shape=(heads, None)), kv))
    for q, kv in found[1:]:
        assert torch.equal(q, found[0][0])
        assert torch.equal(kv, found[0][1])


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("N", "K", "H", "share", "norm", "parts"),
    [(4, 2, 16, 1.0, True, 0), (6, 2, 24, 0.5, False, 2), (4, 1, 64, 1.0, True, 3)],
)
def test_rope_write(N, K, H, share, norm, parts, dtype, tolerance) -> None:
    torch.manual_seed(0)
    T, width = 5, (N + 2 * K) * H
    kv = torch.full((2, 4, 4, K, H), torch.nan, dtype=dtype, device=DEVICE)
    y = random(parts, T, width, dtype=torch.float32) if parts else random(T, width, dtype=dtype)
    position = torch.tensor([0, 3, 9, 100, 7], device=DEVICE)
    index = torch.tensor([3, -1, 8, 0, 15], device=DEVICE)
    cos, sin = rope_table(RopeConfig(share=share), H, position, dtype)
    weights = random(N + K, H, dtype=dtype) if norm else None
    want_kv = kv.cpu().double()
    flat = y.sum(0).to(dtype) if parts else y
    rest = (None if weights is None else weights.cpu().double(), index.cpu(), 1e-6)
    want = rope_write_ref_(
        want_kv, flat.cpu().double(), cos.cpu().double(), sin.cpu().double(), *rest
    )
    got = elementwise.rope_write_(kv, y, cos, sin, weights, index, 1e-6)
    assert close(got, want, tolerance)
    assert torch.equal(kv.isnan().cpu(), want_kv.isnan())
    assert close(torch.nan_to_num(kv), torch.nan_to_num(want_kv), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_norm_and_activation(parts, dtype, tolerance) -> None:
    torch.manual_seed(0)
    h, w = random(5, 96, dtype=dtype), random(96, dtype=dtype)
    y = random(parts, 5, 96, dtype=torch.float32) if parts else random(5, 96, dtype=dtype)
    flat = (y.sum(0).to(dtype) if parts else y).cpu().double()
    inner = random(96, dtype=dtype)
    for other, plain, own in ((y, flat, None), (None, None, None), (y, flat, inner)):
        got = elementwise.add_rms_norm(h, other, w, 1e-5, own)
        wide_own = None if own is None else own.cpu().double()
        want = add_rms_norm_ref(h.cpu().double(), plain, w.cpu().double(), 1e-5, wide_own)
        assert close(got[0], want[0], tolerance)
        assert close(got[1], want[1], tolerance)
    for activation in ("silu", "gelu_pytorch_tanh"):
        got = elementwise.gated_mul(y, dtype, activation != "silu")
        assert close(got, gated_mul_ref(flat, torch.float64, activation), tolerance)


def test_kv_write() -> None:
    kv = torch.full((2, 4, 4, 2, 24), torch.nan, device=DEVICE)
    k, v = torch.randn(5, 2, 24).to(DEVICE), torch.randn(5, 4, 24).to(DEVICE)[:, 2:]
    index, want = torch.tensor([3, -1, 8, 0, 15]).to(DEVICE), kv.cpu().clone()
    elementwise.kv_write_(kv, k, v, index)
    kv_write_ref_(want, k.cpu(), v.cpu(), index.cpu())
    torch.testing.assert_close(kv.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab", [9, 8219])
def test_draw(vocab: int) -> None:
    """The tokens and logprobs of plain torch: warm and greedy rows, cut ones, edited logits, keys
    of 64 bits, counters beyond 16; the lowest of equal ids, some id where a logit is NaN."""
    generator, S = np.random.default_rng(vocab), 12
    raw = torch.randn(S, vocab, generator=torch.Generator().manual_seed(0)) * 2
    raw[10], raw[11, 3] = 1.0, torch.nan
    logits = raw.clone()
    logits[:8, 1::3] = -torch.inf
    columns = draws_of(
        np.array([0, 1, 0.7, 1.3, 1, 2, 1e-6, 50, 1, 0.3, 0, 1], np.float32),
        np.array([0, 0, 5, 0, 0, 3, 0, 0, 0, 99, 0, 0]),
        np.array([1, 1, 1, 0.9, 1, 0.5, 1, 1, 1, 0.99, 1, 1]),
        np.array([0, 0, 0, 0, 0.1, 0, 0, 0, 0, 0, 0, 0], np.float32),
        generator.integers(0, 2**64, S, dtype=np.uint64),
        generator.integers(0, 2**20, S),
    )
    draws, largest = Draws(*map(torch.from_numpy, columns)), min(99, vocab)
    for given in (logits, raw):
        want, bits = sample_draw(given, raw, draws, largest)
        parts = [x.to(DEVICE) for x in (_cut(given, draws, largest), raw)]
        parts = [parts[1]] * 2 if given is raw and not len(columns.cut_C) else parts
        numbers = (draws.temperature_S, draws.stream_S, draws.position_S)
        tokens, found = draw.launch(*parts, *(x.to(DEVICE) for x in numbers)).cpu()
        assert tokens[:11].tolist() == want[:11].tolist()
        assert 0 <= tokens[11] < vocab
        found, logprobs = found.view(torch.float32), bits.view(torch.float32)
        torch.testing.assert_close(found[:11], logprobs[:11], atol=2e-6, rtol=1e-6)
        assert found[11].isnan()
    assert tokens[10] == 0


def test_noise_is_that_of_plain_torch() -> None:
    """To the last digits: near 1, where the largest comes from, a careless logarithm loses all."""
    stream, position = torch.tensor([2**63 - 5, -7, 3]), torch.tensor([0, 77, 2**31 - 1])
    want = gumbel_noise(stream, position, 30_000)
    temperature, nothing = torch.ones(3), torch.zeros(3, 30_000)
    for row, rank in ((0, 0), (1, 1), (2, 5)):  # all but the best `rank` at minus infinity
        alone = nothing.clone()
        best = want[row].argsort(descending=True)
        alone[row, best[:rank]] = -torch.inf
        parts = (alone, nothing, temperature, stream, position)
        tokens = draw.launch(*(x.to(DEVICE) for x in parts)).cpu()[0]
        assert tokens[row] == best[rank]
    ulp = torch.finfo(torch.float32).eps
    x = torch.cat((want.flatten().exp(), 1 - torch.arange(1, 999) * 2.0**-24)).clamp(2.0**-24)
    out = torch.empty_like(x, device=DEVICE)
    log_all[(triton.cdiv(len(x), 1024),)](x.to(DEVICE), out, len(x), BLOCK=1024)
    exact = x.double().log()
    assert ((out.cpu() - exact).abs() <= 2 * ulp * exact.abs()).all()


@triton.jit
def log_all(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < N, other=1.0)
    tl.store(out_ptr + n, draw._log(x), mask=n < N)


def test_greedy() -> None:
    """The lowest of equal ids, across pieces too; NaN logprobs where a logit is not finite."""
    torch.manual_seed(0)
    logits = torch.randn(7, 20_000)
    logits[1, [5, 17, 9000]] = 9.0
    logits[2, 7], logits[3, 9], logits[4, :] = torch.nan, -torch.inf, 1.0
    logits[5, 9000], logits[5, [9100, 12_000]] = torch.inf, torch.nan
    logits[6, [3, 15_000]] = torch.inf
    tokens, bits = greedy.launch(logits.to(DEVICE)).cpu()
    assert tokens.tolist() == logits.argmax(-1).tolist()
    want = score(logits, logits.argmax(-1))
    torch.testing.assert_close(bits.view(torch.float32), want, equal_nan=True)
