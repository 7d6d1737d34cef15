"""A rank's backend for CPU tensors, over shared memory, and what backends of devices share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.comm.codes import codes
from pipekernels.comm.tensors import allocated, elements_of, shape_digest


class NativeBackend:
    """The collectives of ``native``, a communicator of the extension, which takes addresses.

    Callers pass tensors of :func:`pipekernels.comm.tensors.to_dense` with reducible dtypes, and as
    ``op`` a name in ``codes().reductions``, which names the order too. Backends check that all
    ranks make the same call, and raise the errors of :class:`pipekernels.Communicator`.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._codes = codes()

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        """Reduce ``tensor`` over all ranks, in place."""
        self._native.all_reduce(
            tensor.data_ptr(),
            tensor.numel(),
            self._codes.movable[tensor.dtype],
            self._codes.reductions[op],
            self._codes.algorithms[algorithm],
            shape_digest(tensor),
            *self._caller(),
        )

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        """Reduce ``input`` over all ranks; ``output`` receives this rank's slice of the result."""
        self._native.reduce_scatter(
            input.data_ptr(),
            output.data_ptr(),
            output.numel(),
            self._codes.movable[input.dtype],
            self._codes.reductions[op],
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
        # These methods of Communicator, checks included, in one call if possible; return whether.
        self.all_reduce_tensor = core.all_reduce_tensor
        self.all_gather_tensor = core.all_gather_tensor
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
        movable, reductions = self._codes.movable, self._codes.reductions
        return bool(_backend.load().has_reduction(movable[dtype], reductions[op]))

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """:meth:`all_reduce` on rank ``root``; the tensors of the others are undefined then."""
        count, dtype = elements_of(tensor)
        self.core.reduce(tensor.data_ptr(), count, dtype, self._codes.reductions[op], root)

    def gather(self, input: Tensor, outputs: Sequence[Tensor], root: int) -> None:
        """Store the ``input`` of each rank in ``outputs`` of ``root``; the others have none."""
        self._exchange("gather", [input], outputs, root, elements_of(input)[0])

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Store a tensor of ``inputs`` of rank ``root`` in ``output`` of each; the others have
        none."""
        self._exchange("scatter", inputs, [output], root, elements_of(output)[0])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Store ``inputs[to]`` of each rank in ``outputs[from]`` of rank ``to``."""
        self._exchange("all_to_all", inputs, outputs, 0, 0)

    def _exchange(
        self, call: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *place: int
    ) -> None:
        places = [(list(map(Tensor.data_ptr, x)), [y.nbytes for y in x]) for x in (inputs, outputs)]
        dtype = elements_of([*inputs, *outputs][0])[1] if inputs or outputs else 0
        self.core.exchange(self._codes.calls[call], *places[0], *places[1], dtype, *place)

    def send(self, tensor: Tensor, dst: int, tag: int) -> _backend.Message:
        """Start sending ``tensor`` to rank ``dst``. Its memory must stay until the message ends."""
        return self.core.send(tensor.data_ptr(), tensor.nbytes, dst, tag)

    def receive(self, tensor: Tensor, src: int | None, tag: int) -> _backend.Message:
        """Start receiving ``tensor`` from ``src``, by default any rank; else as :meth:`send`."""
        return self.core.receive(tensor.data_ptr(), tensor.nbytes, -1 if src is None else src, tag)

    def announce(self, call: str, tensor: Tensor, op: str = "", root: int = 0) -> None:
        """Check that all ranks are about to make the same ``call``, of ``codes().calls``, by other
        means than these methods."""
        count, dtype = tensor.numel(), elements_of(tensor)[1]
        reduction = self._codes.reductions.get(op, 0)
        self.core.announce(self._codes.calls[call], dtype, reduction, root, count)
