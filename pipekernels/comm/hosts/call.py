"""A call of a collective, encoded as integers that the ranks compare."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from pipekernels.comm.codes import ALGORITHMS, MOVABLE, REDUCTIONS

DTYPES = {code: dtype for dtype, code in MOVABLE.items()}
BYTES = MOVABLE[torch.uint8]


class Operation(IntEnum):
    """The methods of a communicator, and its set-up at the first use of CUDA."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALL_REDUCE_WHEN_READY = 5
    CUDA_SET_UP = 6


_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_REDUCE_WHEN_READY)


class Call(NamedTuple):
    """One rank's call; must be equal on all ranks."""

    operation: int
    elements: int = 0  # Of this rank's input.
    dtype: int = BYTES
    reduction: int = REDUCTIONS["sum"]
    algorithm: int = 0
    root: int = 0
    blocks: int = 0
    on_cuda: int = 0
    shape: int = 0

    def __str__(self) -> str:
        if self.operation == Operation.CUDA_SET_UP:
            return "first use of CUDA"
        name = Operation(self.operation).name.lower()
        if self.operation == Operation.BARRIER:
            return f"{name}()"
        what = f"{self.elements} x {str(DTYPES[self.dtype]).removeprefix('torch.')}"
        arguments = [what + (" on cuda" if self.on_cuda else "")]
        if self.operation in _REDUCING:
            arguments.append(list(REDUCTIONS)[self.reduction])
        if self.operation == Operation.ALL_REDUCE:
            arguments.append(list(ALGORITHMS)[self.algorithm])
        if self.operation == Operation.ALL_REDUCE_WHEN_READY:
            arguments.append(f"blocks={self.blocks}")
        if self.operation == Operation.BROADCAST:
            arguments.append(f"src={self.root}")
        return f"{name}({', '.join(arguments)})"
