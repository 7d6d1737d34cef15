"""Partitions: optimal cuts, and errors of a wrong balance."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import combinations, pairwise
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipekernels.pipeline.stage.partition import balance_by_parameters, cuts, solve, split_module

CPU = torch.device("cpu")


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


def test_balance_by_parameters_separates_the_heavy_layer() -> None:
    module = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 10))
    assert balance_by_parameters(module, 2) == [1, 3]


def test_split_keeps_names_modes_and_a_layer_used_twice() -> None:
    shared = nn.Linear(2, 2)
    module = nn.Sequential()
    module.add_module("a", shared)
    module.add_module("b", nn.ReLU())
    module.add_module("c", shared)
    module.eval()
    first, second = split_module(module, [1, 2], [CPU, CPU])
    assert list(first._modules) == ["a"] and list(second._modules) == ["b", "c"]
    assert first.a is second.c
    assert not first.training and not second.training


@pytest.mark.parametrize(
    ("balance", "devices", "error", "message"),
    [
        ([1, 1], 2, ValueError, "adds up to 2 layers, but the module has 3"),
        ([3, 0], 2, ValueError, "at least one layer"),
        ([1, 2], 1, IndexError, "1 devices for 2 partitions"),
    ],
)
def test_split_errors(
    balance: list[int], devices: int, error: type[Exception], message: str
) -> None:
    module = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())
    with pytest.raises(error, match=message):
        split_module(module, balance, [CPU] * devices)


def test_parameters_shared_across_devices_are_refused() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    with pytest.raises(ValueError, match="shared by stages on cpu and meta"):
        split_module(nn.Sequential(a, b), [1, 1], [CPU, torch.device("meta")])


def test_a_module_with_buffers_shared_across_devices_is_refused() -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    module = nn.Sequential(norm, nn.Linear(2, 2), nn.Sequential(norm))
    with pytest.raises(ValueError, match=r"module '2\.0' is shared by stages on cpu and meta"):
        split_module(module, [2, 1], [CPU, torch.device("meta")])
    assert len(split_module(module, [2, 1], [CPU] * 2)) == 2


def test_a_buffer_shared_by_modules_is_copied_across_devices() -> None:
    module = nn.Sequential(*(nn.BatchNorm1d(2, affine=False) for _ in range(2)))
    module[1].running_mean = module[0].running_mean
    first, second = split_module(module, [1, 1], [CPU, torch.device("meta")])
    assert first[0].running_mean.device.type == "cpu"
    assert second[0].running_mean.device.type == "meta"
