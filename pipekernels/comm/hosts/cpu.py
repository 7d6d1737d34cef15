"""Collectives over several hosts, on CPU tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pipekernels.comm.codes import ALGORITHMS, REDUCIBLE, REDUCTIONS, operation_of
from pipekernels.comm.hosts.agreement import Agreement
from pipekernels.comm.hosts.call import Call, Operation
from pipekernels.comm.hosts.host_map import HostMap
from pipekernels.comm.hosts.route import Route
from pipekernels.comm.hosts.steps import ReduceInPlace, Steps
from pipekernels.comm.shared_memory import SharedMemoryEnd
from pipekernels.comm.tensors import elements_of, shape_digest

# Extra seconds that the ranks of a host wait for each other, so that ranks with a link can first
# report a timeout of another host.
GRACE = 1.0

_CPU = torch.device("cpu")


class SteppedEnd(ABC):
    """A :class:`pipekernels.comm.end.End` over several hosts: agrees on each collective, then runs
    its steps.

    Args:
        host_map: of all ranks.
        steps: for tensors on this end's device.
    """

    def __init__(self, host_map: HostMap, steps: Steps) -> None:
        self._host_map = host_map
        self._steps = steps

    @abstractmethod
    def _collective(self, call: Call) -> AbstractContextManager[None]:
        """Runs its body as one collective, once all ranks have made the same call."""

    @abstractmethod
    def _deliver(self, result: Tensor, output: Tensor) -> None:
        """Copy the result of a collective to the caller's tensor."""

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        code, op = ALGORITHMS[algorithm], _in_any_order(tensor, op)
        self._all_reduce(
            call_reducing(Operation.ALL_REDUCE, tensor, op, algorithm=code), tensor, op
        )

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        op = _in_any_order(input, op)
        with self._collective(call_reducing(Operation.REDUCE_SCATTER, input, op)):
            if output.numel() > 0:
                reduced = self._steps.reduced(input.view(-1), op)
                mine = reduced[self._host_map.rank * output.numel() :][: output.numel()]
                self._deliver(mine, output.view(-1))

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        with self._collective(_call_moving(Operation.ALL_GATHER, input)):
            if input.numel() > 0:
                gathered = self._steps.gathered(_bytes_of(input)).flatten()
                self._deliver(gathered.view(output.dtype), output.view(-1))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        with self._collective(_call_moving(Operation.BROADCAST, tensor, root=src)):
            if tensor.numel() > 0:
                copied = self._steps.copied(_bytes_of(tensor), src).view(tensor.dtype)
                wanted = 0 if self._host_map.rank == src else tensor.numel()  # The root keeps its.
                self._deliver(copied[:wanted], tensor.view(-1)[:wanted])

    def _all_reduce(
        self, call: Call, tensor: Tensor, op: str, inside: ReduceInPlace | None = None
    ) -> None:
        with self._collective(call):
            if tensor.numel() > 0:
                flat = tensor.view(-1)
                self._deliver(self._steps.reduced(flat, op, inside), flat)


def call_reducing(operation: Operation, tensor: Tensor, op: str, **arguments: int) -> Call:
    """The call of an operation that reduces ``tensor``."""
    codes = REDUCIBLE[tensor.dtype], REDUCTIONS[op]
    return Call(operation, tensor.numel(), *codes, shape=shape_digest(tensor), **arguments)


def _in_any_order(tensor: Tensor, op: str) -> str:
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


class HostsEnd(SteppedEnd):
    """A :class:`pipekernels.comm.end.HostEnd` over several hosts.

    Args:
        local: the end over the ranks of this host; owned.
        host_map: of all ranks.
        route: to the ranks at this position on the other hosts; ``None`` if a host has none.
        timeout: seconds that a call waits for one in another thread.

    Attributes:
        local, host_map, route: as above.
        agreement: starts each collective.
    """

    def __init__(
        self, local: SharedMemoryEnd, host_map: HostMap, route: Route | None, timeout: float
    ) -> None:
        link = None if route is None else route.link
        super().__init__(host_map, Steps(local, link, host_map, _CPU))
        self.local = local
        self.host_map = host_map
        self.route = route
        self.agreement = Agreement(local, host_map, link, timeout)
        self.empty = local.empty
        self.output = local.output
        self.close = self.agreement.close
        self.abort = self.agreement.abort

    def all_reduce_tensor(self, tensor: Tensor, op: str, algorithm: str, order: str) -> bool:
        return False  # Needs several steps.

    def barrier(self) -> None:
        with self._collective(Call(Operation.BARRIER)):
            pass

    def gathered(self, data: Tensor) -> Tensor:
        """The bytes of all ranks, ``[world_size, data.numel()]``. Call it inside a collective."""
        return self._steps.gathered(data)

    def _collective(self, call: Call) -> AbstractContextManager[None]:
        return self.agreement.collective(call)

    def _deliver(self, result: Tensor, output: Tensor) -> None:
        output.copy_(result)
