"""The cut solver compared with trying all cuts."""

import operator
from collections.abc import Callable
from functools import reduce
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning import all_balances, slices

from pipekernels.pipeline.planning.cuts import cuts, solve


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_solve_is_optimal(costs: list[int], partitions: int) -> None:
    if partitions > len(costs):
        with pytest.raises(ValueError, match="cannot be cut"):
            solve(costs, partitions)
        return

    def largest(lengths: list[int]) -> int:
        return max(sum(costs[part]) for part in slices(lengths))

    lengths = solve(costs, partitions)
    assert lengths in (possible := list(all_balances(len(costs), partitions)))
    assert largest(lengths) == min(map(largest, possible))


@pytest.mark.parametrize(
    ("costs", "partitions", "balance"),
    [
        ([10, 1, 1, 1, 1], 3, [1, 2, 2]),
        ([1, 1, 1, 1, 10], 3, [2, 2, 1]),
        ([0, 0, 0, 0, 0, 0], 3, [2, 2, 2]),
        ([0.5, 0.25, 0.25, 0.5], 3, [1, 2, 1]),
        ([10, 1, 1, 1, 3], 3, [1, 3, 1]),  # Costs are evened out before lengths.
    ],
)
def test_equal_costs_are_balanced(costs: list[float], partitions: int, balance: list[int]) -> None:
    assert solve(costs, partitions) == balance


@settings(deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(1, 7), st.sampled_from([max, operator.add]))
def test_cuts_yields_all_cuts_sorted_by_cost(
    data: st.DataObject, n: int, partitions: int, combine: Callable[[float, float], float]
) -> None:
    """Costs may depend on the partition, and be infinite."""
    costs: dict[tuple[int, int, int], float] = {}
    for p in range(partitions):
        for a in range(n):
            drawn = st.lists(st.sampled_from([0, 1, 2, 3, 5, inf]), min_size=n - a, max_size=n - a)
            for b, cost in enumerate(sorted(data.draw(drawn)), a + 1):
                costs[p, a, b] = cost
    expected = []
    for balance in all_balances(n, partitions):
        parts = [costs[p, s.start, s.stop] for p, s in enumerate(slices(balance))]
        expected.append((reduce(combine, parts, 0.0), balance))
    expected = [(total, balance) for total, balance in expected if total < inf]
    found = list(cuts(n, partitions, lambda *part: costs[part], combine))
    assert [cost for cost, _ in found] == sorted(cost for cost, _ in expected)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("costs", "partitions"), [([1, 2], 0), ([1, -2], 1), ([1, nan], 1)])
def test_solve_refuses_invalid_costs_and_partitions(costs: list[int], partitions: int) -> None:
    with pytest.raises(ValueError, match="must|may"):
        solve(costs, partitions)
