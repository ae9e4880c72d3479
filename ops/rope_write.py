"""rope_write_: turn queries and keys by their positions, put keys and values into the pages.

T tokens, N query heads, K key/value heads, H head size, C channels of a head that turn, n addends.
"""

from typing import Any

import torch
from torch import Tensor

from purestep.ops import kernels, native
from purestep.ops.add_rms_norm import joined
from purestep.ops.kv_write import kv_write_
from purestep.ops.lora_linear import Shrunk, flat, shrunk_of
from purestep.ops.product import Product, listed, num_tokens, product_of


@kernels.named("rope_write_")
def rope_write_(
    kv: Tensor,
    y: Product,
    cos_TC: Tensor,
    sin_TC: Tensor,
    norm_NH: Tensor | None,
    kv_index_T: Tensor,
    eps: float,
    shrunk: Shrunk | None = None,
) -> Tensor:
    """The turned queries [T, N, H]; writes keys, turned, and values as `kv_write_` does.

    `y` is the output of the qkv product, queries, keys and values of every head side by side:
    [T, (N + 2K) H] in the pages' format, or fp32 addends [n, T, ...], summed in order and rounded
    once. With `norm_NH` (the weights of query heads, then of key heads) heads are normed before.
    `shrunk` (on a GPU) is what `shrunk_linear` has left to add to `y` first.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.purestep.rope_write_(
            kv, listed(y), cos_TC, sin_TC, norm_NH, kv_index_T, eps, flat(shrunk)
        )
    args = kv, y, cos_TC, sin_TC, norm_NH, kv_index_T, eps
    if not y.is_cuda:
        norms = () if norm_NH is None else (norm_NH,)
        fits = y.dim() == 2 and native.takes(kv, y, cos_TC, sin_TC, *norms)
        return native.rope_write_(*args) if fits else rope_write_ref_(*args)
    from purestep.ops.kernels import elementwise, folded

    return elementwise.rope_write_(*args) if shrunk is None else folded.rope_write_(*args, shrunk)


def rope_write_ref_(
    kv: Tensor,
    y: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    norm_NH: Tensor | None,
    kv_index_T: Tensor,
    eps: float,
) -> Tensor:
    """The specification, in plain torch; also what runs without a GPU or a compiler."""
    K, H, C = kv.shape[3], kv.shape[4], cos_TC.shape[1]
    qkv_TMH = joined(y, kv.dtype).unflatten(-1, (-1, H))
    qk_TNH, v_TKH = qkv_TMH[:, :-K], qkv_TMH[:, -K:]
    if norm_NH is not None:
        x = qk_TNH.float() if kv.dtype != torch.float64 else qk_TNH
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        qk_TNH = norm_NH * x.to(kv.dtype)
    first, second = qk_TNH[..., : C // 2], qk_TNH[..., C // 2 : C]
    turned = torch.cat((-second, first), dim=-1) * sin_TC[:, None]
    turned = qk_TNH[..., :C] * cos_TC[:, None] + turned
    qk_TNH = torch.cat((turned, qk_TNH[..., C:]), dim=-1)
    q_TNH, k_TKH = qk_TNH.split((qk_TNH.shape[1] - K, K), dim=1)
    kv_write_(kv, k_TKH.contiguous(), v_TKH, kv_index_T)
    return q_TNH.contiguous()


def _traced(
    kv: Tensor,
    y: list[Tensor],
    cos_TC: Tensor,
    sin_TC: Tensor,
    norm_NH: Tensor | None,
    kv_index_T: Tensor,
    eps: float,
    shrunk: list[Tensor],
) -> Tensor:
    args = cos_TC, sin_TC, norm_NH, kv_index_T, eps
    return rope_write_(kv, product_of(y), *args, shrunk_of(shrunk))


def _fake(kv: Tensor, y: list[Tensor], *_: Any) -> Tensor:
    K, H = kv.shape[3:]
    return kv.new_empty(num_tokens(y), y[-1].shape[-1] // H - 2 * K, H)


torch.library.define(
    "purestep::rope_write_",
    "(Tensor(a!) kv, Tensor[] y, Tensor cos_TC, Tensor sin_TC, Tensor? norm_NH, Tensor kv_index_T,"
    " float eps, Tensor[] shrunk) -> Tensor",
)
torch.library.impl("purestep::rope_write_", ("cpu", "cuda"), _traced)
torch.library.register_fake("purestep::rope_write_", _fake)
