"""The codes of csrc/include/pipekernels/elements/dtype.h."""

from __future__ import annotations

import torch

REDUCIBLE = {
    torch.float64: 0,
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
MOVABLE = REDUCIBLE | {
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.bool: 9,
    torch.complex64: 10,
    torch.complex128: 11,
    torch.complex32: 12,
    torch.uint16: 13,
    torch.uint32: 14,
    torch.uint64: 15,
    torch.float8_e4m3fn: 16,
    torch.float8_e4m3fnuz: 17,
    torch.float8_e5m2: 18,
    torch.float8_e5m2fnuz: 19,
}
# Not in the oldest supported torch.
for _name, _code in {"float8_e8m0fnu": 20, "float4_e2m1fn_x2": 21}.items():
    if hasattr(torch, _name):
        MOVABLE[getattr(torch, _name)] = _code
REDUCTIONS = {
    "sum": 0,
    "avg": 1,
    "max": 2,
    "min": 3,
    "sum in tree order": 4,
    "avg in tree order": 5,
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
