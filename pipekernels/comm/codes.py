"""The codes of csrc/include/pipekernels: elements/dtype.h and collectives/call.h."""

from __future__ import annotations

import torch

# In the order of their codes. The oldest supported torch does not have the last two.
_DTYPES = (
    "float64 float32 float16 bfloat16 int32 int64 int16 int8 uint8 bool complex64 complex128 "
    "complex32 uint16 uint32 uint64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2"
)
MOVABLE = {
    getattr(torch, name): code for code, name in enumerate(_DTYPES.split()) if hasattr(torch, name)
}
REDUCIBLE = {dtype: code for dtype, code in MOVABLE.items() if code < 6}
REDUCTIONS = {
    "sum": 0,
    "avg": 1,
    "max": 2,
    "min": 3,
    "sum in tree order": 4,
    "avg in tree order": 5,
    "product": 6,
    "and": 7,
    "or": 8,
    "xor": 9,
    "premul_sum": 10,
}
# Those of call.h.
CALLS = {
    "barrier": 0,
    "all_reduce": 1,
    "reduce_scatter": 2,
    "all_gather": 3,
    "broadcast": 4,
    "reduce": 5,
    "gather": 6,
    "scatter": 7,
    "all_to_all": 8,
}
OPERATIONS = ("sum", "avg", "max", "min")
ORDERS = ("rank", "tree")
ALGORITHMS = {"auto": 0, "one_shot": 1, "two_shot": 2, "ring": 3}


def reduction_in(op: str, order: str) -> str:
    """The name in :data:`REDUCTIONS` of ``op`` in ``order``."""
    return f"{op} in tree order" if order == "tree" and op in ("sum", "avg") else op


def operation_of(reduction: str) -> str:
    """The ``op`` of a name in :data:`REDUCTIONS`, without its order."""
    return reduction.removesuffix(" in tree order")
