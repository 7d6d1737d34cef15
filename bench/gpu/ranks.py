"""The collectives that :mod:`bench.gpu.nccl` compares, on the tensors of a rank.

Beside ours and those of the torch backend there are two peers whose tensors are symmetric too:

* *torch symmetric memory*: the all-reduces of ``torch.distributed._symmetric_memory``, each named
  by its algorithm: ``one_shot`` (which gives a new tensor), ``two_shot``, ``multimem`` (by NVLink's
  switch).
* *NCCL, symmetric kernels*: NCCL's collectives of tensors in a memory pool that is registered as
  symmetric, for which NCCL 2.27 and newer has special kernels.

Each is tried first, by all ranks together; :func:`without_peers` says which fail, and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.threads import contents, expected
from bench.timing import events, synchronize
from pipekernels import Communicator

OURS = "pipekernels"
TORCH, NCCL_SYMMETRIC = "torch symmetric memory", "NCCL, symmetric kernels"
TRIED = 1 << 14  # bytes of a tensor, by which a peer is tried
GRANULE = 16  # bytes: torch's kernels want a multiple of them from each rank
WARMUP = 2  # calls in each turn, as the turn before was another's
SAMPLE, REPEATS = 5e-3, 100  # least seconds of a turn; short calls are repeated at most this often
# Newer names, which torch 2.6 does not have.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Calls = Mapping[str, Callable[[], Any]]


@dataclass
class Ranks:
    """This rank's place among all.

    Attributes:
        rank, ranks: this one, and how many.
        device: of this rank.
        peer: the torch backend that ours is compared with: NCCL, or Gloo on a CPU.
        communicator: ours; None where the GPUs have no peer access.
        control: a group of Gloo, by which the ranks agree.
        left_out: see :func:`without_peers`; None before it is known.
    """

    rank: int
    ranks: int
    device: torch.device
    peer: str
    communicator: Communicator | None
    control: dist.ProcessGroup
    left_out: dict[str, str] | None = None

    def sum(self, number: int) -> int:
        """The sum over all ranks."""
        total = torch.tensor(number)
        dist.all_reduce(total, group=self.control)
        return int(total)

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Per call, of ``count`` in a row that all ranks begin together; the slowest rank's."""
        for _ in range(WARMUP):
            call()
        synchronize(self.device)
        begin, end = events(self.device, 2)
        dist.barrier(self.control)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        synchronize(self.device)
        longest = torch.tensor(begin.elapsed_time(end) * 1e-3 / count, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.control)
        return float(longest)

    def turn(self, call: Callable[[], Any]) -> Callable[[], float]:
        """A candidate, with enough calls for a turn of :data:`SAMPLE` seconds."""
        once = self.seconds(call, 1)
        count = max(1, min(REPEATS, round(SAMPLE / max(once, 1e-9))))
        return lambda: self.seconds(call, count)


def backend_of(device: torch.device) -> Any:
    """That of the default group, for tensors on ``device``."""
    return dist.distributed_c10d._get_default_group()._get_backend(device)


class TorchMemory:
    """Tensors of ``torch.distributed._symmetric_memory``, and its all-reduces."""

    OPERATIONS = ("all_reduce",)

    def __init__(self, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        self._module, self._device = _symmetric_memory, device
        self._group = dist.distributed_c10d._get_default_group().group_name

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A collective."""
        tensor = self._module.empty(count, dtype=dtype, device=self._device)
        self._module.rendezvous(tensor, self._group)
        return tensor

    def register(self) -> None:
        """It is done already."""

    close = register

    def calls(self, buffers: Buffers) -> Calls:
        """By the names of their algorithms."""
        return {
            f"{TORCH}, {algorithm}": lambda operation=operation: getattr(
                torch.ops.symm_mem, operation
            )(buffers.whole, "sum", self._group)
            for algorithm, operation in {
                "one_shot": "one_shot_all_reduce",
                "two_shot": "two_shot_all_reduce_",
                "multimem": "multimem_all_reduce_",
            }.items()
        }


class NcclMemory:
    """Tensors of a memory pool that NCCL knows as symmetric."""

    OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self._pool, self._device = torch.cuda.MemPool(self._backend.mem_allocator), device
        self._is_registered = False

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.use_mem_pool(self._pool):
            return torch.empty(count, dtype=dtype, device=self._device)

    def register(self) -> None:
        """A collective, after all tensors have been made."""
        self._backend.register_mem_pool(self._pool, symm=True)
        self._is_registered = True

    def close(self) -> None:
        """After the last call."""
        if self._is_registered:
            self._backend.deregister_mem_pool(self._pool)

    def calls(self, buffers: Buffers) -> Calls:
        """NCCL does not say which of its kernels it takes."""
        return {NCCL_SYMMETRIC: buffers.by_torch()}


MEMORIES: dict[str, Callable[[torch.device], TorchMemory | NcclMemory]] = {
    TORCH: TorchMemory,
    NCCL_SYMMETRIC: NcclMemory,
}


class Buffers:
    """The tensors of a collective on one rank.

    Args:
        operation: the collective.
        size: bytes of the whole.
        dtype: of the elements.
        ranks: this one and the others.
        in_place: whether a rank's share is a part of the whole.
        make: makes a tensor of so many elements.

    Attributes:
        whole, own: the tensor that all ranks work on, and this rank's share.
        count: elements of the whole, a multiple of the number of ranks.
        part: elements of one rank's share.
        shared: whether a rank's share is the input or the result.
    """

    def __init__(
        self, operation: str, size: int, dtype: torch.dtype, ranks: Ranks, in_place: bool,
        make: Callable[[int, torch.dtype], Tensor],
    ) -> None:  # fmt: skip
        self._operation, self._ranks, self._dtype = operation, ranks, dtype
        self.part = max(1, size // dtype.itemsize // ranks.ranks)
        self.count = self.part * ranks.ranks
        self.whole = make(self.count, dtype)
        self.shared = operation in ("reduce_scatter", "all_gather")
        apart = self.shared and not in_place
        self.own = make(self.part, dtype) if apart else self._share(self.whole)

    def _share(self, tensor: Tensor) -> Tensor:
        return tensor[self._ranks.rank * self.part : (self._ranks.rank + 1) * self.part]

    def by_torch(self) -> Callable[[], Any]:
        """The collective of torch.distributed."""
        whole, own = self.whole, self.own
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: reduce_scatter(own, whole),
            "all_gather": lambda: all_gather(whole, own),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }
        return calls[self._operation]

    def by_us(self, ours: Communicator) -> Callable[[], Any]:
        """The communicator's collective."""
        whole, own = self.whole, self.own
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: ours.all_reduce(whole),
            "reduce_scatter": lambda: ours.reduce_scatter(whole, out=own),
            "all_gather": lambda: ours.all_gather(own, out=whole),
            "broadcast": lambda: ours.broadcast(whole, 0),
        }
        return calls[self._operation]

    def wrong(self, call: Callable[[], Any]) -> int:
        """The number of wrong elements of all ranks' results after a call."""
        rank, ranks, operation = self._ranks.rank, self._ranks.ranks, self._operation
        of = functools.partial(contents, dtype=self._dtype, device=self._ranks.device)
        self.whole.fill_(-1)  # What is not written shows.
        self.own.fill_(-1)
        if operation == "all_gather":
            self.own.copy_(of(rank, self.part))
        elif operation != "broadcast" or rank == 0:
            self.whole.copy_(of(rank, self.count))
        returned = call()
        if operation == "broadcast":
            right = of(0, self.count)
        elif operation == "all_gather":
            right = torch.cat([of(other, self.part) for other in range(ranks)])
        else:
            right = expected(ranks, self.count, self._dtype, self._ranks.device)
        scattered = operation == "reduce_scatter"
        result, right = (self.own, self._share(right)) if scattered else (self.whole, right)
        if operation == "all_reduce" and isinstance(returned, Tensor):
            result = returned  # It may be a new tensor.
        return self._ranks.sum(int((result != right).sum()))


class Case:
    """The candidates of a collective, with their tensors.

    Attributes:
        buffers: for the communicator and the torch backend.
        calls: by candidate.
    """

    def __init__(
        self, operation: str, size: int, dtype: torch.dtype, ranks: Ranks, symmetric: bool,
        in_place: bool,
    ) -> None:  # fmt: skip
        ours = ranks.communicator
        on = ranks.device if ranks.device.type == "cuda" else None

        def make(count: int, dtype: torch.dtype) -> Tensor:
            if not symmetric or ours is None:
                return torch.empty(count, dtype=dtype, device=ranks.device)
            return ours.empty(count, dtype=dtype, device=on)

        self._open = functools.partial(Buffers, operation, size, dtype, ranks, in_place)
        self.buffers = self._open(make)
        self.calls: dict[str, Callable[[], Any]] = {ranks.peer: self.buffers.by_torch()}
        if ours is not None:
            self.calls[OURS] = self.buffers.by_us(ours)
        self._owners = dict.fromkeys(self.calls, self.buffers)
        self._memories: list[TorchMemory | NcclMemory] = []
        if not symmetric or size % (GRANULE * ranks.ranks):
            return
        left_out = without_peers(ranks)
        for name, memory in MEMORIES.items():
            if operation in memory.OPERATIONS and name not in left_out:
                self.add(memory(ranks.device), left_out)

    def add(self, memory: TorchMemory | NcclMemory, left_out: Mapping[str, str]) -> None:
        """Add the candidates of a peer, on its own tensors."""
        buffers = self._open(memory.empty)
        self._memories.append(memory)
        memory.register()
        found = {k: call for k, call in memory.calls(buffers).items() if k not in left_out}
        self.calls |= found
        self._owners |= dict.fromkeys(found, buffers)

    def wrong(self, name: str) -> int:
        """The number of wrong elements of all ranks' results after a candidate's call."""
        return self._owners[name].wrong(self.calls[name])

    def close(self) -> None:
        """After the last call."""
        for memory in self._memories:
            memory.close()


def without_peers(ranks: Ranks) -> Mapping[str, str]:
    """Why a peer, or one of its algorithms, is left out; by name. A collective at the first call,
    which tries them."""
    if ranks.left_out is None:
        ranks.left_out = {}
        for name, memory in MEMORIES.items():
            case = Case("all_reduce", TRIED * ranks.ranks, torch.float32, ranks, False, True)
            _try(name, lambda memory=memory, case=case: case.add(memory(ranks.device), {}), ranks)
            for candidate in case.calls:
                if candidate.startswith(name):
                    _try(candidate, lambda case=case, c=candidate: case.wrong(c), ranks)
            case.close()
    return ranks.left_out


def _try(name: str, step: Callable[[], Any], ranks: Ranks) -> None:
    """Leave ``name`` out if ``step`` fails on any rank."""
    why = ""
    try:
        step()
    except Exception as error:  # noqa: BLE001 (Whatever this version of torch, or GPU, lacks.)
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    if ranks.sum(bool(why)) and ranks.left_out is not None:
        ranks.left_out[name] = why or "it failed on another rank"
