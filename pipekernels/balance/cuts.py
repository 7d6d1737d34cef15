"""Cuts a sequence of elements with costs into contiguous partitions. Knows no layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
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
    limit, _ = _cheapest(n, partitions, lambda begin, end: prefix[end] - prefix[begin], max)

    def unevenness(begin: int, end: int) -> float:
        total = prefix[end] - prefix[begin]
        if total > limit:
            return inf
        share = total / limit if limit > 0 else 0.0
        return share**2 + 1e-9 * (end - begin) ** 2  # Small: lengths only break ties.

    _, lengths = _cheapest(n, partitions, unevenness, operator.add)
    return lengths


def check_partitions(n: int, partitions: int) -> None:
    """Raise a ValueError unless ``n`` elements can be cut into ``partitions`` non-empty ones."""
    if n < integer("partitions", partitions):
        raise ValueError(
            f"{n} elements cannot be cut into {partitions} partitions; use at most {n}"
        )


def _cheapest(
    n: int,
    partitions: int,
    cost: Callable[[int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The cheapest cut of ``n`` elements into ``partitions`` of at least one, as (cost, length of
    each partition). ``cost(begin, end)`` is that of a partition with the elements ``begin`` to
    ``end - 1``: not less for a later ``end``, ``inf`` if it is not allowed. A cut's cost is
    ``combine`` of those of its partitions.

    Best-first search (A*, Hart, Nilsson and Raphael, 1968) with an exact estimate of the remaining
    cost, so few other cuts are visited.
    """

    def ends(p: int, begin: int) -> range:
        left = partitions - p
        return range(n if left == 1 else begin + 1, n - left + 2)

    # rest[p][begin]: the smallest cost of the elements from begin on, in the partitions from p on.
    rest = [[inf] * (n + 1) for _ in range(partitions + 1)]
    rest[partitions][n] = 0.0
    for p in reversed(range(partitions)):
        for begin in range(p, n) if p > 0 else [0]:
            for end in ends(p, begin):
                here = cost(begin, end)
                if here >= rest[p][begin]:
                    break  # A longer partition costs no less.
                rest[p][begin] = min(rest[p][begin], combine(here, rest[p + 1][end]))

    # (lower bound of the cost, partitions still to cut, lengths so far, their cost)
    heap: list[tuple[float, int, list[int], float]] = [(rest[0][0], partitions, [], 0.0)]
    while True:
        bound, left, lengths, so_far = heappop(heap)
        if left == 0:
            return bound, lengths
        p, begin = partitions - left, sum(lengths)
        for end in ends(p, begin):
            with_next = combine(so_far, cost(begin, end))
            if with_next == inf:
                break
            bound = combine(with_next, rest[p + 1][end])
            if bound < inf:
                heappush(heap, (bound, left - 1, [*lengths, end - begin], with_next))
