"""Cuts a sequence into contiguous blocks with about equal sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from math import inf

import torch

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
    places = torch.arange(n + 1, device="cpu")
    sizes = places - places[:, None]  # [begin, end]
    prefix = torch.tensor([0, *accumulate(costs)], dtype=torch.float64, device="cpu")
    sums = (prefix - prefix[:, None]).masked_fill(sizes < 1, inf)

    # 1. The smallest limit on the sum of a block with which so many blocks reach the end.
    # The least costs of so many blocks, by where they begin: of none, [n + 1].
    limits = torch.full((n + 1,), inf, dtype=torch.float64, device="cpu")
    limits[n] = 0
    unevenness = limits
    for _ in range(partitions):
        limits = torch.maximum(sums, limits).amin(1)
    limit = float(limits[0])
    # 2. Among cuts within the limit, the most even one, in shares of the limit.
    shares = sums.masked_fill(sums > limit, inf) / (limit or 1.0)
    penalties = shares.square() + 1e-9 * sizes.square()  # Small: lengths only break ties.
    ends: list[list[int]] = []  # Of the first block, by where it begins.
    for _ in range(partitions):
        unevenness, best = (penalties + unevenness).min(1)
        ends.append(best.tolist())

    # 3. From the first block on, each ends where the least penalty for the rest begins.
    bounds = [0]
    for chosen in reversed(ends):
        bounds.append(chosen[bounds[-1]])
    return [end - begin for begin, end in pairwise(bounds)]
