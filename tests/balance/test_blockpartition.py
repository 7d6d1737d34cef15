"""The solver of balances compared with trying all cuts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import nan

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipekernels.balance.blockpartition import lengths


def all_balances(n: int, partitions: int) -> Iterator[list[int]]:
    """The lengths of the partitions, of every cut of ``n`` elements."""
    for inner in combinations(range(1, n), partitions - 1):
        yield [b - a for a, b in pairwise([0, *inner, n])]


def slices(balance: Sequence[int]) -> list[slice]:
    """The elements of each partition."""
    return [slice(a, b) for a, b in pairwise([0, *accumulate(balance)])]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9) | st.just(99), min_size=1, max_size=12), st.integers(1, 12))
@example([1, 5, 2, 3], 3)  # [6, 2, 3] has the smallest squares, [1, 5, 5] the smallest maximum.
@example([0, 0, 0, 0], 2)  # Lengths break the tie.
def test_lengths_are_optimal(costs: list[int], partitions: int) -> None:
    if partitions > len(costs):
        with pytest.raises(ValueError, match="cannot be cut"):
            lengths(costs, partitions)
        return

    def order(balance: list[int]) -> tuple[int, ...]:
        sums = [sum(costs[part]) for part in slices(balance)]
        return max(sums), sum(s**2 for s in sums), sum(length**2 for length in balance)

    found = lengths(costs, partitions)
    assert found in (possible := list(all_balances(len(costs), partitions)))
    assert order(found) == min(map(order, possible))


@pytest.mark.parametrize(("costs", "partitions"), [([1, 2], 0), ([1, -2], 1), ([1, nan], 1)])
def test_invalid_costs_and_partitions_are_refused(costs: list[int], partitions: int) -> None:
    with pytest.raises(ValueError, match="must|may"):
        lengths(costs, partitions)
