"""Layers whose duration is simulated, so that profiles do not depend on the machine; all cuts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Clock:
    """A simulated clock, in seconds, which only layers advance. Copies of a layer share it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, int]] = []  # (layer, rows) of each forward

    def __call__(self) -> float:
        return self.now

    def __deepcopy__(self, memo: Any) -> "Clock":
        return self


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.seconds
        return grad, None, None, None


class Work(nn.Module):
    """Advances the clock by given times; by seven times as much in ``disturbed`` of ten runs."""

    def __init__(
        self, clock: Clock, name: str, forward: float, backward: float, disturbed: int = 0
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.clock, self.name = clock, name
        self.times, self.disturbed = (forward, backward), disturbed

    def forward(self, x: Tensor) -> Tensor:
        run = sum(name == self.name for name, _ in self.clock.log)
        self.clock.log.append((self.name, x.shape[0]))
        factor = 7 if run % 10 < self.disturbed else 1
        forward, backward = self.times
        return _Tick.apply(x * self.scale, self.clock, factor * forward, factor * backward)


def all_balances(n: int, partitions: int) -> Iterator[list[int]]:
    """The lengths of the partitions, of every cut of ``n`` elements."""
    for inner in combinations(range(1, n), partitions - 1):
        yield [b - a for a, b in pairwise([0, *inner, n])]


def slices(balance: Sequence[int]) -> list[slice]:
    """The elements of each partition."""
    return [slice(a, b) for a, b in pairwise([0, *accumulate(balance)])]
