"""Partitions: optimal cuts, and what a wrong balance is told."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipekernels.pipeline.partition import balance_by_parameters, solve, split_module

CPU = torch.device("cpu")


def best_by_trying_all(costs: list[int], partitions: int) -> int:
    n = len(costs)
    best = sum(costs)
    for cuts in combinations(range(1, n), partitions - 1):
        edges = [0, *cuts, n]
        best = min(best, max(sum(costs[a:b]) for a, b in pairwise(edges)))
    return best


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


@pytest.mark.parametrize(("costs", "partitions"), [([1, 2], 0), ([1, -2], 1)])
def test_solve_refuses_what_makes_no_sense(costs: list[int], partitions: int) -> None:
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
