"""Compiles kernels for a Hopper GPU on any machine: `python -m tests.ops.kernels.cross_compile`.

The interpreter runs what the compiler refuses, such as a return in one branch of a constant
condition. Every form of a product (`PARTS` addends, or none) and of what was shrunk.
"""

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from purestep.ops.kernels import deltas, elementwise, folded, products

HOPPER = GPUTarget("cuda", 90, 32)
COMMON = {"DTYPE": tl.bfloat16, "PRECISION": "tf32", "BLOCK_T": 16, "BLOCK_N": 128, "EVEN": True}
COMMON |= {"CHAINED": True, "BLOCKS": 2, "PIECES": 1}
INTS = {"row_ptr": "*i32", "span_ptr": "*i32", "token_ptr": "*i32", "index_ptr": "*i64"}
HEAD = {"N": 8, "K": 2, "H": 96, "C": 64, "BLOCK_C": 32, "BLOCK_R": 32, "NORM": True}


def cases() -> list[tuple[Any, dict[str, Any]]]:
    found: list[tuple[Any, dict[str, Any]]] = []
    for parts, h_parts in ((0, 0), (0, 4), (1, 1), (4, 4)):
        both = {"PARTS": parts, "H_PARTS": h_parts}
        found.append((folded._gated_mul, {**both, "GELU": parts == 4}))
        found.append((folded._rope_write, {**both, **HEAD}))
        found.append((elementwise._add_norm, {**both, "ADD": True, "INNER": False, "BLOCK": 64}))
    for parts, add in ((0, True), (4, True), (4, False)):
        found.append((deltas._expand, {"PARTS": parts, "ADD": add}))
    found.append((deltas._shrink, {"S": 3, "BLOCK_D": 64}))
    found.append((products._skinny, {"S": 2, "BLOCK_D": 64, "LORA": True, "BIAS": False}))
    return found


def compile_one(kernel: Any, values: dict[str, Any]) -> None:
    """Raises triton's error, if it has one."""
    names = kernel.arg_names
    consts = {name: value for name, value in (COMMON | values).items() if name in names}
    h_parts = values.get("H_PARTS", values.get("PARTS", 1))
    kinds = INTS | {"h_ptr": "*fp32" if h_parts else "*bf16", "eps": "fp32"}
    kinds["y_ptr"] = "*fp32" if values.get("PARTS", 1) and not values.get("ADD") else "*bf16"
    signature = {
        name: "constexpr"
        if name in consts
        else kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in consts.items()}
    triton.compile(ASTSource(kernel, signature, places), target=HOPPER)


def main() -> None:
    for kernel, values in cases():
        compile_one(kernel, values)
        print(kernel.__name__, values)


if __name__ == "__main__":
    main()
