"""The ranks that :mod:`bench.gpu.nccl` measures on, and the tensors and calls of a collective."""

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
        communicator: ours.
        control: a group of Gloo, by which the ranks agree.
    """

    rank: int
    ranks: int
    device: torch.device
    peer: str
    communicator: Communicator
    control: dist.ProcessGroup

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


class Buffers:
    """The tensors of a collective on one rank.

    Args:
        operation: the collective.
        size: bytes of the whole.
        dtype: of the elements.
        ranks: this one and the others.
        symmetric: whether the tensors are the communicator's.
        in_place: whether a rank's share is a part of the whole.

    Attributes:
        whole, own: the tensor that all ranks work on, and this rank's share.
        count: elements of the whole, a multiple of the number of ranks.
        part: elements of one rank's share.
        shared: whether a rank's share is the input or the result.
    """

    def __init__(
        self, operation: str, size: int, dtype: torch.dtype, ranks: Ranks, symmetric: bool,
        in_place: bool,
    ) -> None:  # fmt: skip
        self._operation, self._ranks, self._dtype = operation, ranks, dtype
        self.part = max(1, size // dtype.itemsize // ranks.ranks)
        self.count = self.part * ranks.ranks
        self.whole = self._made(self.count, symmetric)
        self.shared = operation in ("reduce_scatter", "all_gather")
        apart = self.shared and not in_place
        self.own = self._made(self.part, symmetric) if apart else self._share(self.whole)

    def _made(self, count: int, symmetric: bool) -> Tensor:
        ours, device = self._ranks.communicator, self._ranks.device
        if not symmetric:
            return torch.empty(count, dtype=self._dtype, device=device)
        on = device if device.type == "cuda" else None
        return ours.empty(count, dtype=self._dtype, device=on)

    def _share(self, tensor: Tensor) -> Tensor:
        return tensor[self._ranks.rank * self.part : (self._ranks.rank + 1) * self.part]

    def calls(self) -> Calls:
        """The collective of torch.distributed, and the communicator's."""
        whole, own, ours = self.whole, self.own, self._ranks.communicator
        theirs, by_us = {
            "all_reduce": (lambda: dist.all_reduce(whole), lambda: ours.all_reduce(whole)),
            "reduce_scatter": (
                lambda: reduce_scatter(own, whole),
                lambda: ours.reduce_scatter(whole, out=own),
            ),
            "all_gather": (lambda: all_gather(whole, own), lambda: ours.all_gather(own, out=whole)),
            "broadcast": (lambda: dist.broadcast(whole, 0), lambda: ours.broadcast(whole, 0)),
        }[self._operation]
        return {self._ranks.peer: theirs, OURS: by_us}

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
        call()
        if operation == "broadcast":
            right = of(0, self.count)
        elif operation == "all_gather":
            right = torch.cat([of(other, self.part) for other in range(ranks)])
        else:
            right = expected(ranks, self.count, self._dtype, self._ranks.device)
        scattered = operation == "reduce_scatter"
        result, right = (self.own, self._share(right)) if scattered else (self.whole, right)
        return self._ranks.sum(int((result != right).sum()))
