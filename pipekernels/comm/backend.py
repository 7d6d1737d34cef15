"""What runs the collectives of one rank, on tensors of one device.

Shared memory (:mod:`pipekernels.comm.shared_memory`), a CUDA device (:mod:`pipekernels.comm.cuda`)
and several hosts (:mod:`pipekernels.comm.hosts`) implement these interfaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.comm.codes import ALGORITHMS, MOVABLE, REDUCTIONS
from pipekernels.comm.tensors import elements_of, shape_digest


class Backend(Protocol):
    """The collectives of one rank.

    Callers pass tensors of :func:`pipekernels.comm.tensors.to_dense`, an ``op`` of ``REDUCTIONS``
    in :mod:`pipekernels.comm.codes`, which names the order too, and reducible dtypes. The
    implementation checks that all ranks make the same call, and raises the errors of
    :class:`pipekernels.Communicator`.
    """

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        """Reduce ``tensor`` over all ranks, in place."""

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        """Reduce ``input`` over all ranks; ``output`` receives this rank's slice of the result."""

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        """Write the inputs of all ranks, in rank order, to the beginning of ``output``."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy ``tensor`` of rank ``src`` to all ranks, in place."""

    def empty(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised symmetric tensor."""

    def output(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        """A symmetric tensor for a result; an ordinary one if none can be allocated now."""


class CpuBackend(Backend, Protocol):
    """The backend for CPU tensors, which every communicator has."""

    @property
    def all_reduce_tensor(self) -> Callable[[Tensor, str, str, str], bool]:
        """:meth:`pipekernels.Communicator.all_reduce`, checks included, in one native call if
        possible; returns whether it was."""

    @property
    def flat_calls(self) -> _backend.Communicator | None:
        """Whose methods ``*_flat`` make collectives of contiguous tensors as if they had one
        dimension, in one native call; None over several hosts. They return False for tensors,
        dtypes and operations that the methods above have to serve, whose tensors must then have
        one dimension."""

    @property
    def core(self) -> _backend.Communicator | None:
        """The native communicator of all ranks; None over several hosts."""

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Whether the reductions above take this dtype and operation."""

    def announce(self, call: str, tensor: Tensor, op: str = "", root: int = 0) -> None:
        """Check that all ranks are about to make the same ``call``, of ``CALLS``, by other means
        than these methods. A ``tensor`` of all_to_all may have another size on each rank."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def close(self) -> None:
        """Leave the communicator."""

    def abort(self) -> None:
        """Leave, and tell the peers that an error is the reason."""


class DeviceBackend(Backend, Protocol):
    """Tensors on a CUDA device. Calls run in the current stream and return at once."""

    @property
    def device(self) -> torch.device:
        """The device, with its index."""

    def check(self) -> None:
        """Raise errors of earlier calls, as far as known."""

    def synchronize(self) -> None:
        """Wait for this rank's collectives, then :meth:`check`."""

    def close(self, *, abort: bool) -> None:
        """Wait for this rank's collectives, or abort them, and free the memory."""


class NativeBackend:
    """The collectives of ``native``, a communicator of the extension, which takes addresses."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        self._native.all_reduce(
            tensor.data_ptr(),
            tensor.numel(),
            MOVABLE[tensor.dtype],
            REDUCTIONS[op],
            ALGORITHMS[algorithm],
            shape_digest(tensor),
            *self._caller(),
        )

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        self._native.reduce_scatter(
            input.data_ptr(),
            output.data_ptr(),
            output.numel(),
            MOVABLE[input.dtype],
            REDUCTIONS[op],
            shape_digest(input),
            *self._caller(),
        )

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        count, dtype = elements_of(input)
        self._native.all_gather(
            input.data_ptr(), output.data_ptr(), count, dtype, shape_digest(input), *self._caller()
        )

    def broadcast(self, tensor: Tensor, src: int) -> None:
        count, dtype = elements_of(tensor)
        self._native.broadcast(
            tensor.data_ptr(), count, dtype, src, shape_digest(tensor), *self._caller()
        )

    def _caller(self) -> tuple[Any, ...]:
        """What native calls want to know about their caller."""
        return ()
