"""Models, training loops and comparisons for tests of CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pipekernels import Pipe
from pipekernels.skip import Namespace
from support.cuda.recorded_graphs import Record
from support.skip_layers import Pop, Stash

WIDTH = 6
CAPTURED = 3  # the step in which everything is captured
STEPS = 5


class CudaRecord(Record):
    """A record of real graphs, of which only ``capturing`` is known."""

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @capturing.setter
    def capturing(self, value: bool) -> None:
        pass


class Pair(nn.Module):
    """Returns a dict of its input, integers and None."""

    def forward(self, x):
        return {"x": x, "index": torch.arange(len(x), device=x.device), "none": None}


class First(nn.Module):
    """Writes to its input in place, as the first layer of a stage may."""

    def forward(self, pair):
        return pair["x"].mul_(1.5) + pair["index"].unsqueeze(1)


def model(device: torch.device, dropout: float = 0.0) -> tuple[nn.Sequential, list[int]]:

    def drop() -> nn.Module:
        return nn.Dropout(dropout) if dropout else nn.Identity()

    torch.manual_seed(0)
    skip = Namespace()
    stages: list[list[nn.Module]] = [
        [Stash().isolate(skip), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Pair()],
        [First(), drop(), nn.Linear(WIDTH, WIDTH)],
        [nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), drop()],
        [Pop().isolate(skip), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)],
    ]
    module = nn.Sequential(*[layer for stage in stages for layer in stage])
    return module.to(device=device, dtype=torch.float64), [len(stage) for stage in stages]


def pipe_of(
    module: nn.Sequential, balance: list[int], device: torch.device, **options: Any
) -> Pipe:
    return Pipe(
        module,
        balance,
        devices=[device] * len(balance),
        **{"chunks": 3, "checkpoint": "never", "cuda_graphs": True} | options,
    )


def slots(pipe: Pipe) -> list[int]:
    """Number of slots of each stage."""
    return [len(stage.slots()) for stage in pipe._engine.stages.graphs.values()]


class Held:
    """Checks that tensors do not change after :meth:`hold`."""

    def __init__(self) -> None:
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hold(self, *tensors: Any) -> None:
        self._tensors += [(t, t.detach().clone()) for t in tensors]

    def check(self) -> None:
        for tensor, before in self._tensors:
            assert torch.equal(tensor, before)


def train(
    module: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    record: Record | None = None,
    schedule: str | None = None,
    steps: int = STEPS,
) -> list[torch.Tensor]:
    """Losses and gradients of the inputs of each step, and the parameters after all steps.

    Inputs change from step to step. With a ``schedule``, steps are the pipe's ``train_step``.
    """
    results: list[torch.Tensor] = []
    held = Held()
    for step in range(steps):
        torch.manual_seed(step)
        given = (x * 1.1**step).requires_grad_()
        if schedule is None:
            output = module(given)
            loss = F.mse_loss(output, y)
            loss.backward()
            held.hold(output)
            del output
        else:
            lanes = {"lanes": 2} if schedule == "interleaved" else {}
            loss = module.train_step(given, y, F.mse_loss, schedule=schedule, **lanes)
        if record is not None:
            record.spoil()
        assert given.grad is not None
        grads = [parameter.grad for parameter in module.parameters()]
        held.hold(given.grad, *grads)
        results += [loss.detach(), given.grad]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    held.check()
    return [*results, *(parameter.detach() for parameter in module.parameters())]


def data(device: torch.device, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH, dtype=torch.float64)
    return x.to(device), y.to(device)


def assert_equal(ours: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, others, rtol=1e-10, atol=1e-10)
