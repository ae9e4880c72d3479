"""Compiles kernels for a Hopper GPU on any machine: `python -m tests.ops.kernels.cross_compile`.

The interpreter runs what the compiler refuses, such as a return in one branch of a constant
condition. Every form of a product (`PARTS` addends, or none) and of what was shrunk.
"""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from purestep.ops.kernels import attention, deltas, elementwise, folded, gated, products

HOPPER = GPUTarget("cuda", 90, 32)
COMMON = {"DTYPE": tl.bfloat16, "PRECISION": "tf32", "BLOCK_T": 16, "BLOCK_N": 128, "EVEN": True}
COMMON |= {"CHAINED": True, "BLOCKS": 2, "HEADS": 2, "PIECES": 1}
TILE = {"K": 2, "G": 4, "H": 96, "BLOCK_H": 128, "BLOCK_SIZE": 16, "WINDOW": 0}
INTS = {f"{name}_ptr": "*i32" for name in ("row", "span", "token", "start", "context", "table")}
INTS |= {"index_ptr": "*i64", "end_ptr": "*i64"}
HEAD = {"N": 8, "K": 2, "H": 96, "C": 64, "BLOCK_C": 32, "BLOCK_R": 32, "NORM": True}

PRODUCT = {"BLOCK_T": 128, "BLOCK_F": 128, "BLOCK_D": 64, "GROUP": 8, "PROGRAMS": 132}
DESCRIPTORS = {
    "x_desc": "tensordesc<bf16[128, 64]>",
    "w_desc": "tensordesc<bf16[2, 128, 64]>",
    "o_desc": "tensordesc<bf16[128, 128]>",
}


def cases() -> list[tuple[Any, dict[str, Any]]]:
    found: list[tuple[Any, dict[str, Any]]] = []
    for parts, h_parts in ((0, 0), (0, 4), (1, 1), (4, 4)):
        both = {"PARTS": parts, "H_PARTS": h_parts}
        found.append((folded._gated_mul, {**both, "GELU": parts == 4}))
        found.append((folded._rope_write, {**both, **HEAD}))
        found.append((elementwise._add_norm, {**both, "ADD": True, "INNER": False, "BLOCK": 64}))
    found.append((elementwise._gated_mul, {"PARTS": 4, "GELU": True, "BLOCK": 64}))
    found.append((elementwise._rope_write, {"PARTS": 4, **HEAD, "BLOCK_H": 128}))
    pieces = {"PARTS": 0, "H_PARTS": 0, "PIECES": 4}
    found.append((folded._gated_mul, {**pieces, "GELU": False}))
    found.append((folded._rope_write, {**pieces, **HEAD}))
    found.append((folded._rope_write, {**pieces, **HEAD, "K": 8, "HEADS": 8}))
    for rows, splits, ends in (("uniform", 4, False), ("single", 1, False), ("longer", 1, True)):
        shape = {"BLOCK_M": 16 if rows != "longer" else 64, "BLOCK_Q": 1, "BLOCK_C": 32}
        form = {"ROWS": rows, "SPLITS": splits, "ENDS": ends}
        found.append((attention._attend, {**TILE, **shape, **form}))
    found.append((attention._combine, {"H": 96, "BLOCK_H": 128, "Z": 4}))
    for parts, add in ((0, True), (4, True), (4, False)):
        found.append((deltas._expand, {"PARTS": parts, "ADD": add}))
    found.append((deltas._expand, {"PARTS": 1, "ADD": True, "BLOCKS": 1, "EVEN": False}))
    found.append((deltas._shrink, {"S": 3, "BLOCK_D": 64}))
    found.append((gated._gated, PRODUCT | {"GELU": False}))
    found.append((products._skinny, {"S": 2, "BLOCK_D": 64, "LORA": True, "BIAS": False}))
    return found


def compile_one(kernel: Any, values: dict[str, Any]) -> None:
    """Raises triton's error, if it has one."""
    names = kernel.arg_names
    consts = {name: value for name, value in (COMMON | values).items() if name in names}
    h_parts = values.get("H_PARTS", values.get("PARTS", 1))
    kinds = INTS | {"h_ptr": "*fp32" if h_parts else "*bf16", "eps": "fp32", "scale": "fp32"}
    kinds |= {"stat_ptr": "*fp32", "part_ptr": "*fp32"} | DESCRIPTORS
    kinds |= {"o_ptr": "*fp32"} if values.get("SPLITS", 1) > 1 else {}
    kinds["y_ptr"] = "*fp32" if values.get("PARTS", 1) and not values.get("ADD") else "*bf16"
    signature = {
        name: "constexpr"
        if name in consts
        else kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in consts.items()}
    triton.compile(ASTSource(kernel, signature, places), target=HOPPER)


def compile_case(number: int) -> str:
    kernel, values = cases()[number]
    compile_one(kernel, values)
    return f"{kernel.__name__} {values}"


def main() -> None:
    with ProcessPoolExecutor() as pool:
        for told in pool.map(compile_case, range(len(cases()))):
            print(told)


if __name__ == "__main__":
    main()
