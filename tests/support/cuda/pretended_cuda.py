"""Fakes to run CUDA communicators over several hosts on CPU tensors, without a GPU.

Two things are faked: the device end that reduces inside a host, and NCCL. Like the real ones, they
report errors asynchronously. The fakes encode our assumptions about CUDA and NCCL; only tests on
GPUs can verify these.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels import Communicator, PeerError, _backend
from pipekernels.comm.end import ReadyCounters
from pipekernels.comm.hosts import cuda as hosts_cuda
from pipekernels.comm.hosts.cpu import HostsEnd
from pipekernels.comm.shared_memory import SharedMemoryEnd

CPU = torch.device("cpu")


class PretendedDevice:
    """Replaces :class:`pipekernels.comm.cuda.CudaEnd`; its ranks share CPU memory."""

    made: ClassVar[list[PretendedDevice]] = []
    problem = ""  # The error that the next instance raises when it is constructed.

    def __init__(self, local: SharedMemoryEnd, device: torch.device, *, blocks: int) -> None:
        local.barrier()
        if self.problem:
            raise RuntimeError(self.problem)
        self.device = CPU
        self.calls: list[str] = []
        self.closed = ""
        self.fails = False  # Whether the next call fails.
        self._local = local
        self._error: PeerError | TimeoutError | None = None
        self.made.append(self)

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        self._run("reduce_scatter", output, input, output, op)

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        local_ranks = os.environ["LAYOUT"].count(os.environ["PIPEKERNELS_HOST_ID"])
        filled = output.view(-1)[: input.numel() * local_ranks]
        self._run("all_gather", filled, input, output)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self._run("broadcast", tensor, tensor, src)

    def all_reduce_when_ready(
        self, tensor: Tensor, op: str, ready: ReadyCounters, blocks: int
    ) -> None:
        self.calls.append(str((ready.target, ready.block_rows, blocks)))
        self._run("all_reduce", tensor, tensor, op, "auto")

    def check_is(self, device: torch.device) -> None:
        assert device.type == "cuda"

    def empty(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        return self.output(sizes, dtype)

    def output(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._error is not None:  # Not reported to the caller yet: check() does that.
            return torch.empty(sizes, dtype=dtype, device=CPU)
        return self._local.empty(sizes, dtype)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self, *, abort: bool) -> None:
        self.closed = self.closed or ("aborted" if abort else "closed")

    def _run(self, name: str, filled: Tensor, *arguments: Any) -> None:
        self.calls.append(name)
        if self._error is None:
            try:
                if self.fails:
                    raise PeerError("rank 0 is pretended to have died", 0)
                getattr(self._local, name)(*arguments)
            except (PeerError, TimeoutError) as error:
                self._error = error
                self._local.abort()
        if self._error is not None:
            filled.view(-1).view(torch.uint8).fill_(0xFF)


class PretendedNccl:
    """The methods of ``ProcessGroupNCCL`` that a link uses, over Gloo."""

    Options = SimpleNamespace
    made: ClassVar[list[PretendedNccl]] = []
    stuck_at = -1  # Index of the operation of the next instance that never ends.

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        assert options._timeout > datetime.timedelta()
        self._gloo = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=60))
        self._left = self.stuck_at
        self._works: list[PretendedWork] = []
        self.ended = ""
        self.made.append(self)

    def size(self) -> int:
        return self._gloo.size()

    def allreduce(self, tensors: list[Tensor]) -> Any:
        return self._start(lambda: self._gloo.allreduce(tensors))

    def _allgather_base(self, output: Tensor, input: Tensor) -> Any:
        return self._start(lambda: self._gloo.allgather([list(output.unbind())], [input]))

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        return self._start(lambda: self._gloo.broadcast(tensor, root))

    def abort(self) -> None:
        self.ended = "aborted"
        for work in self._works:
            work.over.set()

    def shutdown(self) -> None:
        self.ended = "shut down"

    def _start(self, start: Callable[[], Any]) -> PretendedWork:
        self._left -= 1
        work = PretendedWork()
        self._works.append(work)
        if self.ended:  # An operation on an aborted group ends at once.
            work.over.set()
        elif self._left != -1:  # The stuck operation does not start, so the other hosts wait.
            start().get_future().then(lambda _: work.over.set())
        return work


class PretendedWork:
    """An operation, which is over when it is complete or aborted."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def synchronize(self) -> None:
        self.over.wait()


class _DeviceCollectives:
    """An end with the collectives of ``device``; everything else is that of ``hosts``."""

    def __init__(self, hosts: HostsEnd, device: Any) -> None:
        self._hosts = hosts
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            setattr(self, name, getattr(device, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hosts, name)


def pretend(layout: str, backend: str) -> None:
    """Make this process believe that it has CUDA and that its group has ``backend`` for CUDA."""
    os.environ["LAYOUT"] = layout
    torch.cuda.is_current_stream_capturing = lambda: False
    _backend.require_cuda = lambda device=None: None
    hosts_cuda.CudaEnd = PretendedDevice
    dist.is_nccl_available = lambda: True
    dist.ProcessGroupNCCL = PretendedNccl
    config = f"cpu:gloo,cuda:{backend}" if backend else "cpu:gloo"
    dist.get_backend_config = lambda group=None: config


def use_pretended(comm: Communicator) -> Any:
    """Let ``comm`` treat CPU tensors as CUDA tensors; returns the device end."""
    device = comm._device_end(torch.device("cuda", 0))
    comm._host_end = _DeviceCollectives(comm._host_end, device)
    return device
