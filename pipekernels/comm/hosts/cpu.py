"""Collectives over several hosts, on CPU tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pipekernels.comm.hosts.agreement import Agreement
from pipekernels.comm.hosts.call import (
    DTYPES,
    Call,
    Operation,
    check_reduction,
)
from pipekernels.comm.hosts.layout import Layout
from pipekernels.comm.hosts.route import Route
from pipekernels.comm.hosts.steps import ReduceInPlace, Steps

# Seconds that the ranks of a host wait longer for each other than for other hosts, so that those
# that listen to these can say what they have heard.
GRACE = 1.0

_CPU = torch.device("cpu")


class End(ABC):
    """The collectives of ``_C.Communicator``, over several hosts, for tensors on one device."""

    _layout: Layout
    _steps: Steps

    @abstractmethod
    def _collective(self, call: Call) -> AbstractContextManager[None]:
        """Runs its body as one collective, once all ranks have made the same call."""

    @abstractmethod
    def _deliver(self, result: Tensor, output: Tensor) -> None:
        """Copy the result of a collective to where it was asked for."""

    def all_reduce(
        self, data: int, count: int, dtype: int, reduction: int, algorithm: int, shape: int = 0
    ) -> None:
        call = Call(Operation.ALL_REDUCE, count, dtype, reduction, algorithm, shape=shape)
        self._all_reduce(call, data)

    def reduce_scatter(
        self, input: int, output: int, count: int, dtype: int, reduction: int, shape: int = 0
    ) -> None:
        check_reduction(dtype, reduction)
        whole, kind = count * self._layout.world_size, DTYPES[dtype]
        call = Call(Operation.REDUCE_SCATTER, whole, dtype, reduction, shape=shape)
        with self._collective(call):
            if count > 0:
                reduced = self._steps.reduced(self._steps.at(input, whole, kind), reduction)
                mine = reduced[self._layout.rank * count :][:count]
                self._deliver(mine, self._steps.at(output, count, kind))

    def all_gather(self, input: int, output: int, count: int, dtype: int, shape: int = 0) -> None:
        kind = DTYPES[dtype]
        with self._collective(Call(Operation.ALL_GATHER, count, dtype, shape=shape)):
            if count > 0:
                data = self._steps.at(input, count * kind.itemsize, torch.uint8)
                gathered = self._steps.gathered(data).flatten().view(kind)
                self._deliver(gathered, self._steps.at(output, gathered.numel(), kind))

    def broadcast(self, data: int, count: int, dtype: int, root: int, shape: int = 0) -> None:
        if not 0 <= root < self._layout.world_size:
            raise ValueError(f"src must be a rank in 0..{self._layout.world_size - 1}, got {root}")
        kind = DTYPES[dtype]
        with self._collective(Call(Operation.BROADCAST, count, dtype, root=root, shape=shape)):
            if count > 0:
                tensor = self._steps.at(data, count * kind.itemsize, torch.uint8)
                copied = self._steps.copied(tensor, root).view(kind)
                wanted = 0 if self._layout.rank == root else count  # The root has it.
                self._deliver(copied[:wanted], tensor.view(kind)[:wanted])

    def _all_reduce(self, call: Call, data: int, inside: ReduceInPlace | None = None) -> None:
        check_reduction(call.dtype, call.reduction)
        with self._collective(call):
            if call.elements > 0:
                tensor = self._steps.at(data, call.elements, DTYPES[call.dtype])
                self._deliver(self._steps.reduced(tensor, call.reduction, inside), tensor)


class Hosts(End):
    """One rank's end of a communicator over several hosts; has the methods of ``_C.Communicator``.

    Args:
        local: a ``_C.Communicator`` over the ranks of this host; owned.
        layout: of all ranks.
        route: to the ranks of this position on the other hosts; ``None`` if there is not one on each.
        timeout: seconds that a call waits for one in another thread.

    Attributes:
        local, layout, route: as above.
        agreement: by which each collective begins.
    """

    def __init__(self, local: Any, layout: Layout, route: Route | None, timeout: float) -> None:
        self.local = local
        self.layout = self._layout = layout
        self.route = route
        lane = None if route is None else route.lane
        self.agreement = Agreement(local, layout, lane, timeout)
        self._steps = Steps(local, lane, layout, _CPU, self._shared)

    def all_reduce_tensor(self, tensor: Tensor, op: str, algorithm: str) -> bool:
        """As of ``_C.Communicator``: never done in one step."""
        return False

    def barrier(self) -> None:
        with self._collective(Call(Operation.BARRIER)):
            pass

    def allocate(self, size: int) -> Any:
        return self.local.allocate(size)

    def close(self) -> None:
        self.agreement.close()

    def abort(self) -> None:
        self.agreement.abort()

    def gathered(self, data: Tensor) -> Tensor:
        """``[world_size, data.numel()]``: the bytes of all ranks, in a collective under way."""
        return self._steps.gathered(data)

    def _collective(self, call: Call) -> AbstractContextManager[None]:
        return self.agreement.collective(call)

    def _deliver(self, result: Tensor, output: Tensor) -> None:
        output.copy_(result)

    def _shared(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.local.allocate(count * dtype.itemsize), dtype=dtype)
