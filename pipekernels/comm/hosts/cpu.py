"""Collectives over several hosts, on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from pipekernels.comm.codes import ALGORITHMS, REDUCIBLE, REDUCTIONS, operation_of
from pipekernels.comm.hosts.agreement import Agreement
from pipekernels.comm.hosts.call import Call, Operation
from pipekernels.comm.hosts.host_map import HostMap
from pipekernels.comm.hosts.link import Link
from pipekernels.comm.hosts.steps import Steps
from pipekernels.comm.shared_memory import SharedMemoryBackend
from pipekernels.comm.tensors import elements_of, shape_digest

# Extra seconds that the ranks of a host wait for each other, so that ranks with a link can first
# report a timeout of another host.
GRACE = 1.0


class MultiHostBackend:
    """A backend for CPU tensors over several hosts: agrees on each collective, then
    runs its steps.

    Args:
        local: the backend over the ranks of this host; owned.
        host_map: of all ranks.
        link: to the ranks at this position on the other hosts; ``None`` if a host has none.
        timeout: seconds that a call waits for one in another thread.
    """

    def __init__(
        self, local: SharedMemoryBackend, host_map: HostMap, link: Link | None, timeout: float
    ) -> None:
        self._host_map = host_map
        self._steps = Steps(local, link, host_map)
        self._agreement = Agreement(local, host_map, link, timeout)
        self.empty = local.empty
        self.output = local.output
        self.close = self._agreement.close
        self.abort = self._agreement.abort

    def all_reduce_tensor(self, tensor: Tensor, op: str, algorithm: str, order: str) -> bool:
        return False  # Needs several steps.

    def barrier(self) -> None:
        with self._agreement.collective(Call(Operation.BARRIER)):
            pass

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        code, op = ALGORITHMS[algorithm], in_any_order(tensor, op)
        call = _call_reducing(Operation.ALL_REDUCE, tensor, op, algorithm=code)
        with self._agreement.collective(call):
            if tensor.numel() > 0:
                flat = tensor.view(-1)
                flat.copy_(self._steps.reduced(flat, op))

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        op = in_any_order(input, op)
        with self._agreement.collective(_call_reducing(Operation.REDUCE_SCATTER, input, op)):
            if output.numel() > 0:
                reduced = self._steps.reduced(input.view(-1), op)
                mine = reduced[self._host_map.rank * output.numel() :][: output.numel()]
                output.view(-1).copy_(mine)

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        with self._agreement.collective(_call_moving(Operation.ALL_GATHER, input)):
            if input.numel() > 0:
                gathered = self._steps.gathered(_bytes_of(input)).flatten()
                output.view(-1).copy_(gathered.view(output.dtype))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        with self._agreement.collective(_call_moving(Operation.BROADCAST, tensor, root=src)):
            if tensor.numel() > 0:
                copied = self._steps.copied(_bytes_of(tensor), src).view(tensor.dtype)
                if self._host_map.rank != src:
                    tensor.view(-1).copy_(copied)


def _call_reducing(operation: Operation, tensor: Tensor, op: str, **arguments: int) -> Call:
    """The call of an operation that reduces ``tensor``."""
    codes = REDUCIBLE[tensor.dtype], REDUCTIONS[op]
    return Call(operation, tensor.numel(), *codes, shape=shape_digest(tensor), **arguments)


def in_any_order(tensor: Tensor, op: str) -> str:
    """``op`` without its order. Raises ValueError if a sum in tree order depends on that."""
    operation = operation_of(op)
    if operation != op and tensor.is_floating_point():
        raise ValueError(
            "order='tree' is for communicators on one host, as the links between hosts add in an "
            "order of their own; use order='rank', or split() the communicator by hosts"
        )
    return operation


def _call_moving(operation: Operation, tensor: Tensor, **arguments: int) -> Call:
    return Call(operation, *elements_of(tensor), shape=shape_digest(tensor), **arguments)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
