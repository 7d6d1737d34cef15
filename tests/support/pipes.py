"""Pipes, and what they are compared with."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipekernels import Pipe
from pipekernels.pipeline.engine.stages import Stages


def run_apart(patch: pytest.MonkeyPatch) -> None:
    """Have pipes run each stage as a task of its own, as on several devices, not all as one."""
    inspect_layers = Stages.inspect_layers

    def inspect(stages: Stages) -> None:
        inspect_layers(stages)
        stages.fused = None

    patch.setattr(Stages, "inspect_layers", inspect)


def on_cpus(layers: Any, balance: Sequence[int], **options: Any) -> Pipe:
    """A pipe whose stages are all on the CPU."""
    return Pipe(layers, balance, devices=["cpu"] * len(balance), **options)


def assert_same_gradients(module: nn.Module, other: nn.Module, **tolerances: Any) -> None:
    """Of their parameters; default tolerances: absolute 1e-10, none relative."""
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **{"rtol": 0, "atol": 1e-10, **tolerances})


def outcome(module: nn.Module, x: torch.Tensor, chunks: int = 1) -> list[Any]:
    """The output of a loop over microbatches, and the gradients of the sum of its squares by ``x``
    and by the parameters."""
    module.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    outputs = [module(part) for part in ([leaf] if chunks == 1 else leaf.tensor_split(chunks))]
    output = outputs[0] if chunks == 1 else torch.cat(outputs)
    output.square().sum().backward()
    return [output.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def assert_equals_plain(pipe: Pipe, x: torch.Tensor, **tolerances: Any) -> None:
    """Output and gradients are those of the layers without a pipe."""
    found, expected = outcome(pipe, x), outcome(pipe.to_sequential(), x)
    torch.testing.assert_close(found, expected, **{"rtol": 0, "atol": 1e-10, **tolerances})


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)).double()


def normed_mlp() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)
    return nn.Sequential(*layers).double()


def pipe_of(*layers: nn.Module, device: Any = "cpu", chunks: int = 2, **options: Any) -> Pipe:
    """A pipe with a stage for each layer."""
    devices = [device] * len(layers)
    return Pipe(
        nn.Sequential(*layers), [1] * len(layers), devices=devices, chunks=chunks, **options
    )
