"""The codes of csrc/include/pipekernels/dtype.h."""

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
}
REDUCTIONS = {"sum": 0, "avg": 1, "max": 2, "min": 3}
ALGORITHMS = {"auto": 0, "one_shot": 1, "two_shot": 2, "ring": 3}
