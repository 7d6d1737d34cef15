"""Cuts a sequence into contiguous blocks with about equal sums."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from math import inf

from pipekernels._arguments import integer


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Cut ``sequence``, non-negative numbers, into ``partitions`` blocks of at least one element so
    that the largest sum of a block is smallest.

    This is exact; fairscale and torchgpipe search for the smallest variance (Barany and Grinberg,
    2013) and may miss it::

        >>> solve([1, 2, 3, 4, 5, 6], partitions=2)
        [[1, 2, 3, 4], [5, 6]]

    Raises:
        ValueError: ``partitions`` is not an integer from 1 to ``len(sequence)``, or a number is
            negative or not finite.
    """
    rest = iter(sequence)
    return [list(islice(rest, length)) for length in lengths(sequence, partitions)]


def lengths(costs: Sequence[float], partitions: int) -> list[int]:
    """Lengths of the blocks of :func:`solve`, with its errors. Ties go to the smallest sum of
    squared sums, then to the smallest sum of squared lengths."""
    n = len(costs)
    if n < integer("partitions", partitions):
        raise ValueError(
            f"{n} elements cannot be cut into {partitions} partitions; use at most {n}"
        )
    if not all(0 <= cost < inf for cost in costs):
        raise ValueError(f"costs are {list(costs)}; all must be finite, none negative")
    sums = [0.0, *accumulate(map(float, costs))]  # Of the costs before each place.

    def last_end(begin: int, _: object = None) -> int:
        """Where the longest block from ``begin`` within the limit ends."""
        return bisect_right(sums, limit, begin, key=lambda total: total - sums[begin]) - 1

    # 1. The smallest limit on the sum of a block with which so many blocks reach the end.
    too_low, enough = 0.0, sums[n]
    while too_low < (limit := (too_low + enough) / 2) < enough:  # Until no number is in between.
        *_, end = accumulate(range(partitions), last_end, initial=0)
        too_low, enough = (too_low, limit) if end == n else (limit, enough)
    limit = enough

    # 2. Among cuts within the limit, the most even one, in shares of the limit.
    def unevenness(begin: int, end: int) -> float:
        share = (sums[end] - sums[begin]) / (limit or 1.0)
        return share * share + 1e-9 * (end - begin) ** 2  # Lengths only break ties.

    # Of the last 0, 1, 2, ... blocks, by where these begin: unevenness, and the end of the first.
    best = [{n: (0.0, n)}]
    *reached, _ = accumulate(range(partitions), last_end, initial=0)  # By the blocks before.
    for farthest in reversed(reached):
        rest, first, last = best[-1], min(best[-1]), max(best[-1])
        best.append({})
        for begin in range(bisect_left(range(n), first, key=last_end), min(farthest, last - 1) + 1):
            ends = range(max(begin + 1, first), min(last_end(begin), last) + 1)
            best[-1][begin] = min((unevenness(begin, end) + rest[end][0], end) for end in ends)
    # 3. From the first block on, each ends where the least unevenness of the rest begins.
    bounds = accumulate(reversed(best[1:]), lambda begin, ends: ends[begin][1], initial=0)
    return [end - begin for begin, end in pairwise(bounds)]
