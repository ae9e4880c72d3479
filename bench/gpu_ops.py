"""What do a GPU's kernels reach of what the device can do?

Ceilings first: a copy and a large bf16 product. Then, for the linears of Llama 3.1 8B, a product of
few rows beside torch's, what adapters add to it, and attention over pages. Everything is timed as
the engine runs it, in a graph, over as many copies of the weights as the cache cannot hold, and
checked against float64 before. Values are microseconds; `floor_us` is the time to move the bytes.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.report import Figure, parser, report
from purestep.ops.add_rms_norm import add_rms_norm
from purestep.ops.gated_linear import gated_mul
from purestep.ops.lora_linear import (
    CHUNK,
    Deltas,
    Shrunk,
    lora_linear,
    shrunk_linear,
    tile_size,
)
from purestep.ops.paged_attention import decode_attention
from purestep.ops.rope_write import rope_write_

LINEARS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "out": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    report(measure(args.smoke or not torch.cuda.is_available()), args.json)


def measure(smoke: bool) -> list[Figure]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    notes = {"device": torch.cuda.get_device_name() if device == "cuda" else device, "smoke": smoke}
    rate, speed = ceilings(smoke, device)
    figures = [
        Figure(figure="gpu_ops/copy", value=rate, unit="GB/s", notes=notes),
        Figure(figure="gpu_ops/gemm", value=speed, unit="TFLOP/s", notes=notes),
    ]
    for name, (width, sizes) in LINEARS.items():
        if smoke:
            width, sizes = 64, tuple(32 for _ in sizes)
        for rows in (1, 8, 64, 256):
            figures += linear(name, rows, width, sizes, device, rate, notes)
    for rows, context in ((1, 256), (8, 256), (64, 640), (256, 640)):
        if smoke:
            rows, context = min(rows, 2), 20
        figures.append(attention(rows, context, device, rate, notes))
    return figures


def ceilings(smoke: bool, device: str) -> tuple[float, float]:
    """GB/s of reading and writing numbers once, TFLOP/s of a bf16 product."""
    size, count = (64, 2**10) if smoke else (8192, 2**29)
    source = torch.randn(size, size, device=device).to(torch.bfloat16)
    numbers = torch.randint(0, 9, (count,), dtype=torch.int32, device=device)
    target = torch.empty_like(numbers)
    copy_us = timed([lambda: torch.add(numbers, 1, out=target)])
    product_us = timed([lambda: source @ source])
    return 2 * target.nbytes / copy_us / 1e3, 2 * size**3 / product_us / 1e6


def linear(
    name: str,
    rows: int,
    width: int,
    sizes: Sequence[int],
    device: str,
    rate: float,
    notes: dict[str, Any],
) -> list[Figure]:
    dtype, O = torch.bfloat16 if device == "cuda" else torch.float32, sum(sizes)  # noqa: E741
    copies = max(2, min(10, 600_000_000 // (2 * O * width))) if device == "cuda" else 1
    weights = [torch.randn(O, width, device=device).to(dtype) * width**-0.5 for _ in range(copies)]
    x_TD = torch.randn(rows, width, device=device).to(dtype)
    want = x_TD.double() @ weights[0].double().T
    check(shrunk_linear(x_TD, weights[0], None, None, sizes)[0], want)
    ours = timed([lambda w=w: shrunk_linear(x_TD, w, None, None, sizes) for w in weights])
    torchs = timed([lambda w=w: F.linear(x_TD, w) for w in weights])
    floor = {"floor_us": O * width * 2 / rate / 1e3}
    found = [
        Figure(
            figure=f"gpu_ops/linear/{name}/rows{rows}", value=ours, unit="us", peer="torch",
            peer_value=torchs, lower_is_better=True, notes=notes | floor,
        )
    ]  # fmt: skip
    reader = reader_of(rows, sizes, device, dtype)
    base = timed([lambda w=w: reader(x_TD, w, None) for w in weights])
    for adapters, rank in ((1, 16), (8, 16), (32, 16), (8, 64)):
        if adapters <= rows:
            parts = (rows, width, sizes, adapters, rank, device, dtype)
            lora = [make_deltas(*parts) for _ in weights]
            pairs = zip(weights, lora, strict=True)
            both = timed([lambda w=w, d=d: reader(x_TD, w, d) for w, d in pairs])
            extra = lora[0].a_SPD.nbytes + lora[0].b_PO.nbytes
            noted = notes | {"floor_us": extra / rate / 1e3, "base_us": base}
            label = f"gpu_ops/lora/{name}/rows{rows}/adapters{adapters}"
            label += f"/rank{rank}" if rank != 16 else ""
            found.append(Figure(figure=label, value=both - base, unit="us", notes=noted))
    return found


def reader_of(
    rows: int, sizes: Sequence[int], device: str, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Deltas | None], Any]:
    """The product and the kernel that reads it: deltas are added by the one or the other."""
    if len(sizes) == 2:
        return lambda x, w, d: gated_mul_of(shrunk_linear(x, w, None, d, sizes), dtype)
    if len(sizes) == 1:
        h_TD = torch.zeros(rows, sizes[0], device=device, dtype=dtype)
        return lambda x, w, d: add_rms_norm(h_TD, lora_linear(x, w, None, d), h_TD[0], 1e-5)
    H = 128 if sizes[1] % 128 == 0 else 16
    kv = torch.zeros(2, -(-rows // 16), 16, sizes[1] // H, H, device=device, dtype=dtype)
    angle_TC = torch.zeros(rows, H, device=device, dtype=dtype)
    index_T = torch.arange(rows, device=device)
    return lambda x, w, d: rope_of(
        shrunk_linear(x, w, None, d, sizes), kv, (angle_TC, angle_TC, None, index_T, 1e-5)
    )


def gated_mul_of(product: tuple[Tensor, Shrunk | None], dtype: torch.dtype) -> Tensor:
    return gated_mul(product[0], dtype, shrunk=product[1])


def rope_of(product: tuple[Tensor, Shrunk | None], kv: Tensor, args: tuple[Any, ...]) -> Tensor:
    return rope_write_(kv, product[0], *args, product[1])


def make_deltas(
    rows: int,
    width: int,
    sizes: Sequence[int],
    adapters: int,
    rank: int,
    device: str,
    dtype: torch.dtype,
) -> Deltas:
    """Adapters of one rank in turn."""
    P, size = rank * adapters, tile_size(rows)
    slot_T = torch.arange(rows) % adapters
    spans, tokens = [(0, P // CHUNK)], []
    for slot in range(adapters):
        for part in (slot_T == slot).nonzero().flatten().split(size):
            spans.append((slot * rank // CHUNK, (slot + 1) * rank // CHUNK))
            tokens.append(F.pad(part, (0, size - len(part)), value=-1))
    ints = {"dtype": torch.int32, "device": device}
    return Deltas(
        a_SPD=torch.randn(len(sizes), P, width, device=device).to(dtype) * width**-0.5,
        b_PO=torch.randn(P, sum(sizes), device=device).to(dtype),
        row_E=torch.arange(P).to(**ints),
        span_X2=torch.tensor(spans).to(**ints),
        token_XI=torch.stack(tokens).to(**ints),
    )


def attention(rows: int, context: int, device: str, rate: float, notes: dict[str, Any]) -> Figure:
    N, K, H, B = 32, 8, 128, 16
    dtype, M = torch.bfloat16 if device == "cuda" else torch.float32, -(-context // 16)
    pages = [torch.randn(2, rows * M, B, K, H, device=device).to(dtype) for _ in range(4)]
    q_TNH = torch.randn(rows, N, H, device=device).to(dtype)
    ints = {"dtype": torch.int32, "device": device}
    index = (
        torch.arange(rows + 1).to(**ints),
        torch.full((rows,), context).to(**ints),
        torch.randperm(rows * M).view(rows, M).to(**ints),
    )
    value = timed([lambda kv=kv: decode_attention(q_TNH, kv, *index, H**-0.5) for kv in pages])
    floor = {"floor_us": rows * context * K * H * 4 / rate / 1e3}
    label = f"gpu_ops/attention/rows{rows}/context{context}"
    return Figure(figure=label, value=value, unit="us", lower_is_better=True, notes=notes | floor)


def check(y: Tensor, want: Tensor) -> None:
    got = y.double().sum(0) if y.dim() == 3 else y.double()
    error = float((got - want).norm() / want.norm())
    if not error < 1e-2:
        raise AssertionError(f"a product is wrong by {error}")


def timed(calls: Sequence[Callable[[], Any]], rounds: int = 5) -> float:
    """Median microseconds of a call, from replays of a graph of all of them."""
    for call in calls:
        call()
    if not torch.cuda.is_available():
        return 1.0
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls) * 1e3)
    return median(times[1:])


if __name__ == "__main__":
    main()
