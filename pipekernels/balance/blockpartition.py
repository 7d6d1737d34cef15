"""Cuts a sequence into contiguous blocks with about equal sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pipekernels.balance import cuts


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
    return [list(islice(rest, length)) for length in cuts.solve(sequence, partitions)]
