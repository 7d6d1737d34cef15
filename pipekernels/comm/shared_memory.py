"""A rank's backend for CPU tensors, over shared memory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.comm.backend import NativeBackend
from pipekernels.comm.codes import CALLS, MOVABLE, REDUCTIONS
from pipekernels.comm.tensors import allocated

_log = logging.getLogger(__name__)


class _AlgorithmLog:
    """Reductions that log which algorithm they take, once for each dtype and power of two of bytes.

    Has no reference to the backend, which must not be in a reference cycle.
    """

    def __init__(self, core: _backend.Communicator) -> None:
        self._core = core
        self._known: set[tuple[str, torch.dtype, int]] = set()

    def all_reduce_tensor(self, tensor: Tensor, op: str, algorithm: str, order: str) -> bool:
        is_done = self._core.all_reduce_tensor(tensor, op, algorithm, order)
        if is_done:
            self.note(tensor, algorithm)
        return is_done

    def note(self, tensor: Tensor, algorithm: str) -> None:
        size = tensor.numel() * tensor.itemsize
        why = "as the caller asks"
        if algorithm == "auto":
            algorithm = self._core.choose_algorithm(size)
            why = "by size"
        key = (algorithm, tensor.dtype, size.bit_length())
        if key not in self._known:
            self._known.add(key)
            _log.info("all_reduce of %d bytes of %s: %s, %s", size, tensor.dtype, algorithm, why)


class SharedMemoryBackend(NativeBackend):
    """A :class:`pipekernels.comm.backend.CpuBackend` over memory that all ranks have mapped.

    Args:
        core: this rank's native communicator; owned. Algorithms are logged if the logger is enabled
            now: asking in every call would take a share of a small one's time.
    """

    def __init__(self, core: _backend.Communicator) -> None:
        super().__init__(core)
        self.core = core
        self._log = _AlgorithmLog(core) if _log.isEnabledFor(logging.INFO) else None
        self.all_reduce_tensor = (self._log or core).all_reduce_tensor
        self.flat_calls = core if self._log is None else None
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

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        super().all_reduce(tensor, op, algorithm)
        if self._log is not None:
            self._log.note(tensor, algorithm)
