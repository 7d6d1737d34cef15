"""All collectives, ours and torch's backend on the same tensors; bandwidths as nccl-tests has them.

Contents are small integers, whose sums are exact in every dtype and order, and every element of
every rank's result is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.nccl.ranks import OURS, Ranks, Work
from bench.timing import bus

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
TENSORS = ("ordinary", "symmetric")
DTYPES = ("bfloat16", "float32")
SIZES = [2**exponent for exponent in range(10, 29, 2)]  # bytes
QUICK_SIZES = [1 << 10, 1 << 16]
PERIOD = 1021  # of contents: prime, so that misplaced blocks show
# Newer names, which torch 2.6 does not have.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Case(NamedTuple):
    """What is called; ``place`` is that of the result: ``'in'`` the input, or ``'out'`` of it."""

    operation: str
    tensor: str
    place: str
    type: str
    size: int

    @property
    def part(self) -> str:
        """The table that it is in."""
        return f"{self.operation}, {self.tensor} tensors, {self.place} of place".replace(
            "in of", "in"
        )


def cases(quick: bool) -> Iterator[Case]:
    """All of them; in place and out of place only where our operation has both."""
    places = {"all_reduce": ["in"], "broadcast": ["in"], "reduce_scatter": ["out"]}
    for operation in OPERATIONS:
        for tensor in TENSORS:
            for place in places.get(operation, ["out", "in"]):
                for dtype in DTYPES[:1] if quick else DTYPES:
                    for size in QUICK_SIZES if quick else SIZES:
                        yield Case(operation, tensor, place, dtype, size)


def contents(rank: int, count: int, like: Tensor) -> Tensor:
    """A rank's data, of the dtype and on the device of ``like``: 1 to 16; sums over up to 16 ranks
    have at most the 8 bits of bfloat16."""
    numbers = torch.arange(count, device=like.device)
    return ((numbers % PERIOD * 7 + rank * 5) % 16 + 1).to(like.dtype)


class Buffers:
    """The tensors of a case on one rank.

    Attributes:
        count: elements of the whole, a multiple of the number of ranks.
        part: elements of one rank's share.
    """

    def __init__(self, case: Case, ranks: Ranks) -> None:
        self._case, self._ranks = case, ranks
        dtype = getattr(torch, case.type)
        self.part = max(1, case.size // dtype.itemsize // ranks.ranks)
        self.count = self.part * ranks.ranks

        def make(count: int) -> Tensor:
            if case.tensor == "ordinary" or ranks.communicator is None:
                return torch.empty(count, dtype=dtype, device=ranks.device)
            on = ranks.device if ranks.device.type == "cuda" else None
            return ranks.communicator.empty(count, dtype=dtype, device=on)

        self.whole = make(self.count)
        own = self.whole[ranks.rank * self.part : (ranks.rank + 1) * self.part]
        self.shared = case.operation in ("reduce_scatter", "all_gather")
        self.own = own if not self.shared or case.place == "in" else make(self.part)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """The candidates."""
        whole, own, ours = self.whole, self.own, self._ranks.communicator
        found: dict[str, dict[str, Callable[[], Any]]] = {
            self._ranks.peer: {
                "all_reduce": lambda: dist.all_reduce(whole),
                "reduce_scatter": lambda: reduce_scatter(own, whole),
                "all_gather": lambda: all_gather(whole, own),
                "broadcast": lambda: dist.broadcast(whole, 0),
            }
        }
        if ours is not None:
            found[OURS] = {
                "all_reduce": lambda: ours.all_reduce(whole),
                "reduce_scatter": lambda: ours.reduce_scatter(whole, out=own),
                "all_gather": lambda: ours.all_gather(own, out=whole),
                "broadcast": lambda: ours.broadcast(whole, 0),
            }
        return {name: calls[self._case.operation] for name, calls in found.items()}

    def fill(self) -> None:
        """Write the inputs, and spoil what is to be written."""
        rank, operation = self._ranks.rank, self._case.operation
        self.whole.fill_(-1)
        self.own.fill_(-1)
        if operation == "all_gather":
            self.own.copy_(contents(rank, self.part, self.own))
        elif operation != "broadcast" or rank == 0:
            self.whole.copy_(contents(rank, self.count, self.whole))

    def wrong(self, call: Callable[[], Any]) -> int:
        """The number of wrong elements of all ranks' results."""
        self.fill()
        call()
        rank, ranks, operation = self._ranks.rank, self._ranks.ranks, self._case.operation
        result = self.own if operation == "reduce_scatter" else self.whole
        if operation == "broadcast":
            right = contents(0, self.count, result)
        elif operation == "all_gather":
            right = torch.cat([contents(other, self.part, result) for other in range(ranks)])
        else:
            right = torch.zeros_like(self.whole)
            for other in range(ranks):
                right += contents(other, self.count, result)
            if operation == "reduce_scatter":
                right = right[rank * self.part : (rank + 1) * self.part]
        return self._ranks.sum(int((result != right).sum()))


def work(case: Case, ranks: Ranks) -> Work:
    """The columns of nccl-tests."""
    buffers = Buffers(case, ranks)
    fields = {
        "size": buffers.whole.nbytes,
        "count": buffers.part if buffers.shared else buffers.count,
        "type": case.type,
        "redop": "sum" if case.operation in ("all_reduce", "reduce_scatter") else "none",
    }
    return Work(buffers.calls(), buffers.wrong, fields, bus(case.operation, ranks.ranks))
