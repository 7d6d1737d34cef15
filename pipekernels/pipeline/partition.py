"""Cutting a sequence of layers into contiguous partitions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import nn


def solve(costs: Sequence[float], partitions: int) -> list[int]:
    """Lengths of the contiguous partitions of ``costs`` whose largest sum is smallest.

    Exact, by dynamic programming over (partition, end), the linear partition problem: O(partitions
    x len(costs)^2).

    Args:
        costs: non-negative cost of each element, in any unit.
        partitions: number of partitions, each of at least one element.

    Raises:
        ValueError: fewer elements than partitions, or ``partitions`` below 1, or a negative cost.
    """
    n = len(costs)
    if partitions < 1:
        raise ValueError(f"partitions is {partitions}; it must be at least 1")
    if n < partitions:
        raise ValueError(
            f"a sequence of {n} elements cannot be cut into {partitions} partitions; use at most {n}"
        )
    if any(cost < 0 for cost in costs):
        raise ValueError(f"costs are {list(costs)}; none may be negative")
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # best[end]: (smallest largest sum of costs[:end] in the partitions so far, where the last one
    # begins)
    best = [(prefix[end], 0) for end in range(n + 1)]
    cuts: list[list[int]] = []
    for k in range(2, partitions + 1):
        row = [(float("inf"), 0)] * (n + 1)
        for end in range(k, n + 1):
            row[end] = min(
                (max(best[begin][0], prefix[end] - prefix[begin]), begin)
                for begin in range(k - 1, end)
            )
        cuts.append([begin for _, begin in row])
        best = row
    lengths: list[int] = []
    end = n
    for row_cuts in reversed(cuts):
        begin = row_cuts[end]
        lengths.append(end - begin)
        end = begin
    lengths.append(end)
    return lengths[::-1]


def balance_by_parameters(module: nn.Sequential, partitions: int) -> list[int]:
    """A balance from parameter counts alone, for when nothing else is known: no sample, no
    measurement."""
    return solve(
        [1 + sum(p.numel() for p in layer.parameters()) for layer in layers(module)], partitions
    )


def layers(module: nn.Sequential) -> list[nn.Module]:
    """The layers of ``module`` in order; one that occurs twice is listed twice."""
    return [layer for layer in module._modules.values() if layer is not None]


def split_module(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> list[nn.Sequential]:
    """Cut ``module`` by ``balance`` and move each partition to its device. Layer names are kept.

    Raises:
        ValueError: ``balance`` has an entry below 1 or does not add up to the number of layers.
        IndexError: fewer devices than partitions.
    """
    named = [(name, layer) for name, layer in module._modules.items() if layer is not None]
    if any(length <= 0 for length in balance):
        raise ValueError(f"balance is {list(balance)}; every partition needs at least one layer")
    if sum(balance) != len(named):
        raise ValueError(
            f"balance {list(balance)} adds up to {sum(balance)} layers, but the module has {len(named)}; "
            "they must be equal"
        )
    if len(devices) < len(balance):
        raise IndexError(
            f"{len(devices)} devices for {len(balance)} partitions; give at least one device per partition "
            "(a device may be repeated)"
        )
    partitions = []
    begin = 0
    for length in balance:
        partition = nn.Sequential(OrderedDict(named[begin : begin + length]))
        partition.train(module.training)
        partitions.append(partition)
        begin += length
    _deny_sharing_across_devices(partitions, devices)
    return [p.to(device) for p, device in zip(partitions, devices, strict=False)]


def _deny_sharing_across_devices(
    partitions: Sequence[nn.Module], devices: Iterable[torch.device]
) -> None:
    home: dict[int, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=False):
        for name, parameter in partition.named_parameters():
            if home.setdefault(id(parameter), device) != device:
                raise ValueError(
                    f"parameter {name!r} is shared by stages on {home[id(parameter)]} and {device}; "
                    "put the stages that share it on one device"
                )
