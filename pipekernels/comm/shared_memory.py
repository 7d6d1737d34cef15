"""A rank's backend for CPU tensors, over shared memory, and what those of devices share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.comm.codes import ALGORITHMS, CALLS, MOVABLE, REDUCTIONS
from pipekernels.comm.tensors import allocated, elements_of, shape_digest


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


_METHODS = "all_reduce", "all_reduce_tensor", "reduce_scatter", "all_gather", "broadcast", "barrier"


class SharedMemoryBackend(NativeBackend):
    """A backend for CPU tensors over memory that all ranks have mapped.

    Args:
        core: this rank's native communicator; owned.
    """

    def __init__(self, core: _backend.Communicator) -> None:
        super().__init__(core)
        # Its methods `*_flat` make collectives of contiguous tensors as if they had one dimension,
        # in one native call. They return False for tensors, dtypes and operations that the methods
        # here have to serve, whose tensors must then have one dimension.
        self.core = core
        # Communicator.all_reduce(), checks included, in one call if possible; returns whether.
        self.all_reduce_tensor = core.all_reduce_tensor
        # Makes symmetric tensors. Without room the native call raises an error.
        self.empty = cast(
            "Callable[[torch.Size, torch.dtype], Tensor]",
            functools.partial(allocated, core.allocate),
        )
        self.output = self.empty  # For results: on a CUDA device ordinary tensors while it is full.
        self.barrier = core.barrier
        self.close = core.close
        self.abort = core.abort  # Also tells the peers that an error is the reason.

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Whether the reductions take this dtype and operation."""
        return bool(_backend.load().has_reduction(MOVABLE[dtype], REDUCTIONS[op]))

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """:meth:`all_reduce` on rank ``root``; the tensors of the others are undefined then."""
        count, dtype = tensor.numel(), MOVABLE[tensor.dtype]
        self.core.reduce(tensor.data_ptr(), count, dtype, REDUCTIONS[op], root)

    def gather(self, input: Tensor, outputs: Sequence[Tensor], root: int) -> None:
        """Store the ``input`` of each rank in ``outputs`` of ``root``; the others have none."""
        addresses = [output.data_ptr() for output in outputs]
        self.core.gather(input.data_ptr(), addresses, *elements_of(input), root)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Store a tensor of ``inputs`` of rank ``root`` in ``output`` of each; the others have
        none."""
        addresses = [input.data_ptr() for input in inputs]
        self.core.scatter(addresses, output.data_ptr(), *elements_of(output), root)

    def announce(self, call: str, tensor: Tensor, op: str = "", root: int = 0) -> None:
        """Check that all ranks are about to make the same ``call``, of ``CALLS``, by other means
        than these methods. A ``tensor`` of all_to_all may have another size on each rank."""
        dtype = MOVABLE.get(tensor.dtype, MOVABLE[torch.uint8])
        count = 0 if call == "all_to_all" else tensor.numel()
        self.core.announce(CALLS[call], dtype, REDUCTIONS.get(op, 0), root, count)


class ThreadBackend(SharedMemoryBackend):
    """The backend of a rank that is a thread. One thread that calls for all ranks waits in its
    first call for the second: errors say so, at once if it is the only thread that there is.
    ``callers`` are the threads that have called any of the ranks."""

    def __init__(self, core: _backend.Communicator, rank: int, callers: set[int]) -> None:
        super().__init__(core)
        remedy = (
            "each rank of Communicator.threads() calls from a thread of its own, all at the same "
            f"time; this is rank {rank}, called by thread"
        )
        for name in _METHODS:
            setattr(self, name, functools.partial(_call, getattr(self, name), callers, remedy))


def _call(call: Callable[..., Any], callers: set[int], remedy: str, *args: Any) -> Any:
    # Peers cannot come while this is the only thread. Else it may be a slow start: wait for them.
    thread = threading.current_thread()
    callers.add(threading.get_ident())
    if len(callers) == threading.active_count() == 1:
        raise RuntimeError(f"{remedy} {thread.name}, the only one of this process")
    try:
        return call(*args)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {remedy} {thread.name}") from None
