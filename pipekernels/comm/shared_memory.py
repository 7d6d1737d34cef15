"""A rank's backend for CPU tensors, over shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.comm.backend import NativeBackend
from pipekernels.comm.codes import CALLS, MOVABLE, REDUCTIONS
from pipekernels.comm.tensors import allocated


class SharedMemoryBackend(NativeBackend):
    """A :class:`pipekernels.comm.backend.CpuBackend` over memory that all ranks have mapped.

    Args:
        core: this rank's native communicator; owned.
    """

    def __init__(self, core: _backend.Communicator) -> None:
        super().__init__(core)
        self.core = core
        self.flat_calls = core
        self.all_reduce_tensor = core.all_reduce_tensor
        # Without room the native call raises an error.
        self.empty = cast(
            "Callable[[torch.Size, torch.dtype], Tensor]",
            functools.partial(allocated, core.allocate),
        )
        self.output = self.empty
        self.barrier = core.barrier
        self.close = core.close
        self.abort = core.abort

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        return bool(_backend.load().has_reduction(MOVABLE[dtype], REDUCTIONS[op]))

    def announce(self, call: str, tensor: Tensor, op: str = "", root: int = 0) -> None:
        dtype = MOVABLE.get(tensor.dtype, MOVABLE[torch.uint8])
        count = 0 if call == "all_to_all" else tensor.numel()
        self.core.announce(CALLS[call], dtype, REDUCTIONS.get(op, 0), root, count)
