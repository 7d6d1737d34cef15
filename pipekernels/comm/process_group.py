"""A rank's backend over a process group of torch, for ranks that cannot share memory."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels._torch_private import register_backend
from pipekernels.comm.codes import operation_of

_OPERATIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # Divided here: Gloo has no averages.
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class ProcessGroupBackend:
    """The collectives of ``group``, whose engine (Gloo, NCCL) moves and reduces all data.

    The engine's promises hold, not a communicator's: the order of a sum is the engine's, a 16-bit
    sum may be rounded at each addition, a NaN may get lost in a maximum, different calls are not
    found, and errors are torch's.

    Args:
        group: of the ranks of the communicator, in their order.
        device: of the tensors.
        hosts: the number of hosts that the ranks are on.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, hosts: int) -> None:
        self.device = device
        self._group: dist.ProcessGroup | None = group
        self._hosts = hosts

    def all_reduce_tensor(self, *_: object) -> bool:
        """Whether the extension could do the call without the checks in Python."""
        return False

    all_gather_tensor = all_reduce_tensor

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        operation, group = self._operation(tensor, op), self._open()
        dist.all_reduce(tensor, _OPERATIONS[operation], group)
        if operation == "avg":
            tensor /= group.size()

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        operation, group = self._operation(input, op), self._open()
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPERATIONS[operation]
        # The name of torch.distributed's function depends on torch's version.
        group._reduce_scatter_base(output.view(-1), input.view(-1), options).wait()
        if operation == "avg":
            output /= group.size()

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        group, part = self._open(), _bytes_of(input)
        group._allgather_base(_bytes_of(output)[: group.size() * part.numel()], part).wait()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        dist.broadcast(_bytes_of(tensor), None, self._open(), False, src)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._open().alltoall([*outputs], [*inputs]).wait()

    def send(self, tensor: Tensor, dst: int, tag: int) -> dist.Work:
        return self._open().send([tensor], dst, tag)

    def receive(self, tensor: Tensor, src: int | None, tag: int) -> dist.Work:
        if src is None:
            return self._open().recv_anysource([tensor], tag)
        return self._open().recv([tensor], src, tag)

    def barrier(self) -> None:
        dist.barrier(self._open())

    def empty(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._hosts > 1:
            raise RuntimeError(
                f"symmetric memory needs all ranks on one host, and these are on {self._hosts}; "
                "use torch.empty(), or a communicator of the ranks of each host, by split()"
            )
        return self.output(sizes, dtype)

    def output(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=self.device)

    def check(self) -> None:
        """The engine raises its errors itself."""

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self, *, abort: bool = False) -> None:
        """Drop the group, which stays if the caller has made it."""
        self._group = None

    abort = close

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this communicator has been closed; make a new one")
        return self._group

    def _operation(self, tensor: Tensor, op: str) -> str:
        """``op`` without its order."""
        operation = operation_of(op)
        if operation != op and tensor.is_floating_point():
            raise ValueError(
                "order='tree', and so invariant=True, needs ranks that share memory, and torch's "
                f"{self._open().name()} adds for these, on {self._hosts} host(s); use "
                "order='rank', or a communicator of the ranks of each host, by split()"
            )
        return operation


def over_gloo(
    store: dist.Store, rank: int, world_size: int, hosts: int, timeout: float
) -> ProcessGroupBackend:
    """The backend for CPU tensors of ranks on several hosts, over a new Gloo group. A collective
    over the ranks, which connect over ``store``, a store for this purpose only."""
    # Not new_group(), which needs all ranks of the job, or an equal number of groups on all ranks.
    group, cpu = dist.ProcessGroup(store, rank, world_size), torch.device("cpu")
    limit = datetime.timedelta(seconds=timeout)
    register_backend(group, cpu, dist.ProcessGroupGloo(store, rank, world_size, limit))
    dist.barrier(group)  # A rank that closed while others still connect would end their attempts.
    return ProcessGroupBackend(group, cpu, hosts)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
