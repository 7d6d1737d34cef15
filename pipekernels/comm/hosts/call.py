"""A call of a collective, encoded as integers that the ranks compare."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from pipekernels.comm.codes import ALGORITHMS, MOVABLE, REDUCTIONS

DTYPES = {code: dtype for dtype, code in MOVABLE.items()}
BYTES = MOVABLE[torch.uint8]


class Operation(IntEnum):
    """The methods of a communicator."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4


_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)


class Call(NamedTuple):
    """One rank's call; must be equal on all ranks."""

    operation: int
    elements: int = 0  # Of this rank's input.
    dtype: int = BYTES
    reduction: int = REDUCTIONS["sum"]
    algorithm: int = 0
    root: int = 0
    shape: int = 0

    def __str__(self) -> str:
        name = Operation(self.operation).name.lower()
        if self.operation == Operation.BARRIER:
            return f"{name}()"
        arguments = [f"{self.elements} x {str(DTYPES[self.dtype]).removeprefix('torch.')}"]
        if self.operation in _REDUCING:
            arguments.append(list(REDUCTIONS)[self.reduction])
        if self.operation == Operation.ALL_REDUCE:
            arguments.append(list(ALGORITHMS)[self.algorithm])
        if self.operation == Operation.BROADCAST:
            arguments.append(f"src={self.root}")
        return f"{name}({', '.join(arguments)})"
