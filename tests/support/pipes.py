"""Pipes whose default ``execution`` the fixtures ``execution`` and ``place`` set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import pipekernels

execution = "auto"


class Pipe(pipekernels.Pipe):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"execution": execution, **options})


class PipelineParallel(pipekernels.PipelineParallel):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"execution": execution, **options})


def on_cpus(layers: Any, balance: Sequence[int], **options: Any) -> Pipe:
    """A pipe whose stages are all on the CPU."""
    return Pipe(layers, balance, devices=["cpu"] * len(balance), **options)


def assert_same_gradients(module: nn.Module, other: nn.Module, **tolerances: float) -> None:
    """Of their parameters; default tolerances: absolute 1e-10, none relative."""
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **{"rtol": 0, "atol": 1e-10, **tolerances})


def pipe_of(*layers: nn.Module, device: Any = "cpu", chunks: int = 2, **options: Any) -> Pipe:
    """A pipe with a stage for each layer."""
    devices = [device] * len(layers)
    return Pipe(
        nn.Sequential(*layers), [1] * len(layers), devices=devices, chunks=chunks, **options
    )
