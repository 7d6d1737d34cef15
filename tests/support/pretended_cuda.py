"""CUDA communicators over several hosts where there is no GPU: the real code, on CPU tensors.

Only the two ends are pretended: the device that reduces inside a host, and NCCL. As the real ones, they
say only later what has gone wrong.
"""

from __future__ import annotations

import ctypes
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
from pipekernels.comm.hosts import cuda as hosts_cuda
from pipekernels.comm.hosts.call import DTYPES
from pipekernels.comm.hosts.cpu import Hosts
from pipekernels.comm.tensors import Gates

CPU = torch.device("cpu")


class PretendedDevice:
    """Has the methods of :class:`pipekernels.comm.cuda.Device`, for a host's ranks on the CPU."""

    made: ClassVar[list[PretendedDevice]] = []
    problem = ""  # Of the next one.

    def __init__(self, core: Any, device: torch.device) -> None:
        core.barrier()
        if self.problem:
            raise RuntimeError(self.problem)
        self.device = CPU
        self.calls: list[str] = []
        self.closed = ""
        self.fails = False  # At the next call.
        self._core = core
        self._error: PeerError | TimeoutError | None = None
        self.made.append(self)

    def reduce_scatter(
        self, input: int, output: int, count: int, dtype: int, reduction: int, shape: int
    ) -> None:
        arguments = (input, output, count, dtype, reduction, shape)
        self._run(self._core.reduce_scatter, arguments, output, count, dtype)

    def all_gather(self, input: int, output: int, count: int, dtype: int, shape: int) -> None:
        whole = count * os.environ["LAYOUT"].count(os.environ["PIPEKERNELS_HOST_ID"])
        self._run(self._core.all_gather, (input, output, count, dtype, shape), output, whole, dtype)

    def broadcast(self, data: int, count: int, dtype: int, root: int, shape: int) -> None:
        self._run(self._core.broadcast, (data, count, dtype, root, shape), data, count, dtype)

    def all_reduce_when_ready(
        self,
        data: int,
        count: int,
        dtype: int,
        reduction: int,
        gates: Gates,
        blocks: int,
        shape: int,
    ) -> None:
        self.calls.append(str((*gates, blocks)))
        arguments = (data, count, dtype, reduction, 0, shape)
        self._run(self._core.all_reduce, arguments, data, count, dtype)

    def check_is(self, device: torch.device) -> None:
        assert device.type == "cuda"

    def empty(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        return self.output(sizes, dtype)

    def output(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._error is not None:  # Which nobody here has heard of yet.
            return torch.empty(sizes, dtype=dtype, device=CPU)
        buffer = self._core.allocate(sizes.numel() * dtype.itemsize)
        return torch.frombuffer(buffer, dtype=dtype).resize_(sizes)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self, *, abort: bool) -> None:
        self.closed = self.closed or ("aborted" if abort else "closed")

    def _run(
        self, method: Callable[..., None], arguments: Any, output: int, count: int, dtype: int
    ) -> None:
        self.calls.append(method.__name__)
        if self._error is None:
            try:
                if self.fails:
                    raise PeerError("rank 0 is pretended to have died", 0)
                method(*arguments)
            except (PeerError, TimeoutError) as error:
                self._error = error
                self._core.abort()
        if self._error is not None:
            ctypes.memset(output, 0xFF, count * DTYPES[dtype].itemsize)


class PretendedNccl:
    """Has the methods of ``ProcessGroupNCCL`` that a lane uses, over Gloo."""

    Options = SimpleNamespace
    made: ClassVar[list[PretendedNccl]] = []
    stuck_at = -1  # Which operation of the next one never ends.

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
        if self.ended:  # As if it had been issued before: cut short, too.
            work.over.set()
        elif self._left != -1:  # Else the other hosts wait for this one.
            start().get_future().then(lambda _: work.over.set())
        return work


class PretendedWork:
    """Is over when NCCL is done, or cut short."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def synchronize(self) -> None:
        self.over.wait()


class _Both:
    """An end with the collectives of one, and all else of another."""

    def __init__(self, hosts: Hosts, device: Any) -> None:
        self._hosts = hosts
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            setattr(self, name, getattr(device, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hosts, name)


def pretend(layout: str, backend: str) -> None:
    """Let this process take itself for one with CUDA, whose group has ``backend`` for it."""
    os.environ["LAYOUT"] = layout
    torch.cuda.is_current_stream_capturing = lambda: False
    _backend.require_cuda = lambda device=None: None
    hosts_cuda.Device = PretendedDevice
    dist.is_nccl_available = lambda: True
    dist.ProcessGroupNCCL = PretendedNccl
    config = f"cpu:gloo,cuda:{backend}" if backend else "cpu:gloo"
    dist.get_backend_config = lambda group=None: config


def use_pretended(comm: Communicator) -> Any:
    """Have ``comm`` take CPU tensors where it would take CUDA ones; returns that end."""
    core = comm._core
    device = comm._on(torch.device("cuda", 0))
    comm._core = _Both(core, device)
    return device
