"""The cut solver compared with trying all cuts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import combinations, pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipekernels.pipeline.planning.cuts import cuts, solve


def best_by_trying_all(costs: list[int], partitions: int) -> int:
    n = len(costs)
    best = sum(costs)
    for inner in combinations(range(1, n), partitions - 1):
        edges = [0, *inner, n]
        best = min(best, max(sum(costs[a:b]) for a, b in pairwise(edges)))
    return best


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_solve_is_optimal(costs: list[int], partitions: int) -> None:
    if partitions > len(costs):
        with pytest.raises(ValueError, match="cannot be cut"):
            solve(costs, partitions)
        return
    lengths = solve(costs, partitions)
    assert sum(lengths) == len(costs)
    assert len(lengths) == partitions and min(lengths) >= 1
    edges = [sum(lengths[:i]) for i in range(partitions + 1)]
    largest = max(sum(costs[a:b]) for a, b in pairwise(edges))
    assert largest == best_by_trying_all(costs, partitions)


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
def test_equally_good_partitions_are_evened_out(
    costs: list[float], partitions: int, balance: list[int]
) -> None:
    assert solve(costs, partitions) == balance


@settings(deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(1, 7), st.sampled_from([max, operator.add]))
def test_cuts_yields_all_cuts_sorted_by_cost(
    data: st.DataObject, n: int, partitions: int, combine: Callable[[float, float], float]
) -> None:
    """Costs may depend on the partition, and be infinite."""
    places = [(p, a, b) for p in range(partitions) for a in range(n) for b in range(a + 1, n + 1)]
    drawn = data.draw(
        st.lists(st.sampled_from([0, 1, 2, 3, 5, inf]), min_size=len(places), max_size=len(places))
    )
    costs = dict(zip(places, drawn, strict=True))
    for p, a, b in places:
        costs[p, a, b] = max(costs[p, a, b], costs.get((p, a, b - 1), 0))
    expected = []
    for inner in combinations(range(1, n), partitions - 1):
        edges = [0, *inner, n]
        total = 0.0
        for p, (a, b) in enumerate(pairwise(edges)):
            total = combine(total, costs[p, a, b])
        if total < inf:
            expected.append((total, [b - a for a, b in pairwise(edges)]))
    if partitions > n:
        expected = []
    found = list(cuts(n, partitions, lambda p, a, b: costs[p, a, b], combine))
    assert [cost for cost, _ in found] == sorted(cost for cost, _ in expected)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("costs", "partitions"), [([1, 2], 0), ([1, -2], 1), ([1, nan], 1)])
def test_solve_refuses_invalid_costs_and_partitions(costs: list[int], partitions: int) -> None:
    with pytest.raises(ValueError, match="must|may"):
        solve(costs, partitions)
