"""What the backends of shared memory and of a CUDA device share.

A backend runs the collectives of one rank on tensors of one device. Shared memory
(:mod:`pipekernels.comm.shared_memory`) and several hosts (:mod:`pipekernels.comm.hosts.cpu`) have
those of CPU tensors, :mod:`pipekernels.comm.cuda` and :mod:`pipekernels.comm.hosts.cuda` those of a
CUDA device, where calls run in the current stream and return at once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipekernels.comm.codes import ALGORITHMS, MOVABLE, REDUCTIONS
from pipekernels.comm.tensors import elements_of, shape_digest


class NativeBackend:
    """The collectives of ``native``, a communicator of the extension, which takes addresses.

    Callers pass tensors of :func:`pipekernels.comm.tensors.to_dense`, an ``op`` of ``REDUCTIONS``
    in :mod:`pipekernels.comm.codes`, which names the order too, and reducible dtypes. Backends
    check that all ranks make the same call, and raise the errors of
    :class:`pipekernels.Communicator`.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        """Reduce ``tensor`` over all ranks, in place."""
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
        """Reduce ``input`` over all ranks; ``output`` receives this rank's slice of the result."""
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
        """Write the inputs of all ranks, in rank order, to the beginning of ``output``."""
        count, dtype = elements_of(input)
        self._native.all_gather(
            input.data_ptr(), output.data_ptr(), count, dtype, shape_digest(input), *self._caller()
        )

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy ``tensor`` of rank ``src`` to all ranks, in place."""
        count, dtype = elements_of(tensor)
        self._native.broadcast(
            tensor.data_ptr(), count, dtype, src, shape_digest(tensor), *self._caller()
        )

    def _caller(self) -> tuple[Any, ...]:
        """What native calls want to know about their caller."""
        return ()
