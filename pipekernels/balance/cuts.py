"""Cuts a sequence of elements with costs into contiguous partitions. Knows no layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from pipekernels._arguments import integer


def solve(costs: Sequence[float], partitions: int) -> list[int]:
    """Lengths of the contiguous partitions of ``costs`` whose largest sum is smallest; exact. Ties
    go to the smallest sum of squared sums, then to the smallest sum of squared lengths. Raises a
    ValueError as :func:`check_partitions` does, or if a cost is negative or not finite."""
    n = len(costs)
    check_partitions(n, partitions)
    if not all(0 <= cost < inf for cost in costs):
        raise ValueError(f"costs are {list(costs)}; all must be finite, none negative")
    prefix = [0, *accumulate(costs)]

    def cheapest(
        cost: Callable[[int, int], float], combine: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        """The smallest combination of the partitions' costs, and their lengths."""
        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # By the elements so far.
        for left in reversed(range(partitions)):
            ends = range(partitions - left, n - left + 1) if left else [n]
            best = {
                end: min(
                    (combine(before, cost(begin, end)), [*lengths, end - begin])
                    for begin, (before, lengths) in best.items()
                    if begin < end
                )
                for end in ends
            }
        return best[n]

    limit, _ = cheapest(lambda begin, end: prefix[end] - prefix[begin], max)

    def unevenness(begin: int, end: int) -> float:
        total = prefix[end] - prefix[begin]
        if total > limit:
            return inf
        share = total / limit if limit > 0 else 0.0
        return share**2 + 1e-9 * (end - begin) ** 2  # Small: lengths only break ties.

    return cheapest(unevenness, operator.add)[1]


def check_partitions(n: int, partitions: int) -> None:
    """Raise a ValueError unless ``n`` elements can be cut into ``partitions`` non-empty ones."""
    if n < integer("partitions", partitions):
        raise ValueError(
            f"{n} elements cannot be cut into {partitions} partitions; use at most {n}"
        )
