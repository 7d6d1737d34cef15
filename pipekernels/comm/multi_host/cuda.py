"""Collectives over several hosts, on CUDA tensors: those of a ``torch.distributed`` group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels import _backend
from pipekernels.comm.cuda import CudaBackend
from pipekernels.comm.messages import backends_of
from pipekernels.comm.multi_host.cpu import bytes_of, in_any_order
from pipekernels.device.streams import with_index

_log = logging.getLogger(__name__)

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # Divided here: Gloo has no averages.
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class GroupBackend:
    """A :class:`pipekernels.comm.cuda.CudaBackend` over a ``torch.distributed`` group.

    What its backend (NCCL) promises holds, and not what a communicator promises inside a host: the
    order of a sum is the backend's, 16-bit sums may be rounded at each addition, a NaN may get lost
    in a maximum, different calls are not found, and a lost rank is a timeout of the backend.

    Args:
        group: of the ranks of the communicator, in their order; None if it was made without one.
        device: a CUDA device.
        parent: not used here.

    Raises:
        RuntimeError: there is no group, it has no backend for CUDA, or CUDA cannot be used.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, parent: object = None
    ) -> None:
        _backend.require_cuda(device)
        if group is None or "cuda" not in backends_of(group):
            has = "no group" if group is None else f"a group with {backends_of(group)}"
            raise RuntimeError(
                f"CUDA tensors go from host to host by torch.distributed, but there is {has}; make "
                "the communicator by from_process_group() of a group that was initialised with "
                "backend='cpu:gloo,cuda:nccl'"
            )
        self._group = group
        self._size = dist.get_world_size(group)
        self.device = with_index(device)

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        op = in_any_order(tensor, op)
        dist.all_reduce(tensor, _OPERATIONS[op], self._group)
        self._divide(tensor, op)

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        op = in_any_order(input, op)
        flat = output.view(-1)
        dist.reduce_scatter_tensor(flat, input.view(-1), _OPERATIONS[op], self._group)
        self._divide(output, op)

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        whole = bytes_of(output)[: self._size * bytes_of(input).numel()]
        dist.all_gather_into_tensor(whole, bytes_of(input), self._group)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        root = dist.get_global_rank(self._group, src)
        dist.broadcast(bytes_of(tensor), root, self._group)

    def empty(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=self.device)

    output = empty

    def check(self) -> None:
        """The backend raises its errors itself."""

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self, *, abort: bool) -> None:
        """The group stays: it is the caller's."""

    def _divide(self, tensor: Any, op: str) -> None:
        if op == "avg":
            tensor /= self._size


def over_links(
    make: Callable[..., CudaBackend],
    group: dist.ProcessGroup | None,
    device: torch.device,
    parent: object,
) -> CudaBackend | GroupBackend:
    """``make(device, parent)``, or where GPUs have broken or slow links the NCCL of ``group``.

    RuntimeError if links are broken and there is no NCCL."""
    backend = make(device, parent)
    has_nccl = group is not None and backends_of(group).get("cuda") == "nccl"
    problem = "NVLink does not join all GPUs" if backend.has_slow_links and has_nccl else ""
    if backend.broken_links:
        problem = f"{backend.broken_links} do not get what each other's GPU writes to their memory"
    if not problem:
        return backend
    backend.close(abort=False)
    if has_nccl:
        _log.warning("%s: collectives on CUDA are those of NCCL", problem)
        return GroupBackend(group, device)
    raise RuntimeError(
        f"{problem}; turn off the IOMMU or PCI access control (ACS), or make the communicator by "
        "from_process_group() of a group with backend='cpu:gloo,cuda:nccl'"
    )
