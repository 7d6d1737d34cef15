"""A rank's end for CPU tensors, over shared memory."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.comm.codes import ALGORITHMS, REDUCIBLE, REDUCTIONS
from pipekernels.comm.tensors import elements_of, shape_digest


class SharedMemoryEnd:
    """A :class:`pipekernels.comm.end.HostEnd` over memory that all ranks have mapped.

    Args:
        core: this rank's native communicator; owned.
    """

    def __init__(self, core: _backend.Communicator) -> None:
        self.core = core
        self.all_reduce_tensor = core.all_reduce_tensor
        self.barrier = core.barrier
        self.close = core.close
        self.abort = core.abort

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        codes = REDUCIBLE[tensor.dtype], REDUCTIONS[op], ALGORITHMS[algorithm]
        self.core.all_reduce(tensor.data_ptr(), tensor.numel(), *codes, shape_digest(tensor))

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        codes = REDUCIBLE[input.dtype], REDUCTIONS[op]
        self.core.reduce_scatter(
            input.data_ptr(), output.data_ptr(), output.numel(), *codes, shape_digest(input)
        )

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        self.core.all_gather(
            input.data_ptr(), output.data_ptr(), *elements_of(input), shape_digest(input)
        )

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self.core.broadcast(tensor.data_ptr(), *elements_of(tensor), src, shape_digest(tensor))

    def empty(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        elements = math.prod(sizes)  # sizes.numel() would overflow beyond 64 bits.
        buffer = self.core.allocate(min(elements * dtype.itemsize, sys.maxsize))
        if elements == 0:  # torch.frombuffer() refuses an empty buffer.
            return torch.empty(sizes, dtype=dtype, device="cpu")
        # Reshape in place: a view that a custom autograd function returns cannot be modified.
        return torch.frombuffer(buffer, dtype=dtype).resize_(sizes)

    output = empty
