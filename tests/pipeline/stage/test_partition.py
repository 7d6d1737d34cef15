"""Partitions: errors of a wrong balance, and what stages may share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipekernels import Pipe
from pipekernels.pipeline.stage.partition import split_module

CPU = torch.device("cpu")


def test_the_default_balance_goes_by_parameters() -> None:
    module = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 10))
    assert Pipe(module, devices=["cpu"] * 2).balance == [1, 3]


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
