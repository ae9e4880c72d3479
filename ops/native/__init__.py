"""The C forms of some ops for float32 on a CPU (cpu.c), compiled by engine/native.py.

They are there once `load` was called; until then, and where they do not fit, the ops run in plain
torch. The wrappers check nothing: their ops do. Threads are as many as torch has.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}
_ARGUMENTS = {  # of each function of cpu.c, but for the number of threads
    "linear": "ppppnnn",
    "add_deltas": "ppppppppnnnnnn",
    "add_rms_norm": "pppppnnf",
    "rope_write": "pppppppnnnnnnf",
    "attend": "ppppppnnnnnnnnnf",
    "gated_mul": "ppnnn",
    "greedy": "pppnn",
}

_library: ctypes.CDLL | None = None


def load(path: str | None) -> None:
    """Use the compiled cpu.c at `path` from now on in this process, or none. Raises OSError."""
    global _library
    library = None
    if path is not None:
        library = ctypes.CDLL(path)
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = [*(_KINDS[kind] for kind in kinds), ctypes.c_int]
            function.restype = ctypes.c_int64 if name == "attend" else None
    _library = library


def loaded() -> bool:
    return _library is not None


def takes(*tensors: Tensor) -> bool:
    """Whether the C forms are there and take these: float32, contiguous, on a CPU."""
    return _library is not None and all(
        t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() for t in tensors
    )


def _call(name: str, *args: Tensor | int | float | None) -> int | None:
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
    return getattr(_library, name)(*plain, torch.get_num_threads())


def linear(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    (T, D), O = x_TD.shape, w_OD.shape[0]  # noqa: E741
    y_TO = torch.empty(T, O)
    _call("linear", x_TD, w_OD, bias_O, y_TO, T, D, O)
    return y_TO


def add_deltas_(
    y_TO: Tensor,
    x_TD: Tensor,
    a_SPD: Tensor,
    b_PO: Tensor,
    row_E: Tensor,
    span_X2: Tensor,
    token_XI: Tensor,
    out_sizes: Sequence[int],
) -> None:
    S, P, D = a_SPD.shape
    tensors = y_TO, x_TD, a_SPD, b_PO, row_E, span_X2, token_XI
    sizes = ctypes.addressof(_sizes(tuple(out_sizes)))
    _call("add_deltas", *tensors, sizes, S, *token_XI.shape, P, D, y_TO.shape[1])


@cache
def _sizes(out_sizes: tuple[int, ...]) -> ctypes.Array:
    return (ctypes.c_int64 * len(out_sizes))(*out_sizes)


def add_rms_norm(
    h_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    out_TD = h_TD if y_TD is None else torch.empty_like(h_TD)
    normed_TD = torch.empty_like(h_TD)
    _call("add_rms_norm", h_TD, y_TD, weight_D, out_TD, normed_TD, *h_TD.shape, eps)
    return out_TD, normed_TD


def rope_write_(
    kv: Tensor,
    qkv_TO: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    norm_NH: Tensor | None,
    kv_index_T: Tensor,
    eps: float,
) -> Tensor:
    _, blocks, size, K, H = kv.shape
    (T, O), C = qkv_TO.shape, cos_TC.shape[1]  # noqa: E741
    N = O // H - 2 * K
    q_TNH = torch.empty(T, N, H)
    tensors = qkv_TO, cos_TC, sin_TC, norm_NH, kv_index_T, q_TNH, kv
    _call("rope_write", *tensors, T, N, K, H, C, blocks * size, eps)
    return q_TNH


def attend_(
    o_TNH: Tensor,
    q_TNH: Tensor,
    kv: Tensor,
    query_start_R1: Tensor,
    context_len_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int,
) -> int:
    """Writes the results of rows with one query, and returns how many there are. Index tensors are
    int32 and contiguous."""
    _, blocks, size, K, H = kv.shape
    tensors = q_TNH, kv, query_start_R1, context_len_R, block_table_RM, o_TNH
    sizes = *block_table_RM.shape, q_TNH.shape[1], K, H, size, blocks, q_TNH.stride(0)
    return _call("attend", *tensors, *sizes, window, scale)


def gated_mul(y_TO: Tensor, gelu: bool) -> Tensor:
    T, F = y_TO.shape[0], y_TO.shape[1] // 2
    out_TF = torch.empty(T, F)
    _call("gated_mul", y_TO, out_TF, T, F, int(gelu))
    return out_TF


def greedy(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    S = len(logits_SV)
    token_S, logprob_S = torch.empty(S, dtype=torch.int64), torch.empty(S)
    _call("greedy", logits_SV, token_S, logprob_S, *logits_SV.shape)
    return token_S, logprob_S
