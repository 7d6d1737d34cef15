"""Layers that use torch.utils.checkpoint themselves have the dropout masks of their forwards."""

from typing import Any

import pytest
import torch
from support.pipes import on_cpus
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipekernels import Pipe


class Recomputed(nn.Sequential):
    """Applies ``torch.utils.checkpoint`` to its own layers; not if ``use_reentrant`` is None."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        if self.use_reentrant is None:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


def gradients(pipe: Pipe, schedule: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    pipe.zero_grad()
    x = torch.linspace(-1, 1, 64).view(8, 8)
    if schedule is None:
        pipe(x).square().mean().backward()
    else:
        pipe.train_step(x, None, lambda y: y.square().mean(), schedule=schedule)
    return [p.grad for p in pipe.parameters()]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb-h1"])
def test_layers_that_recompute_themselves_have_the_same_masks(
    schedule: Any, use_reentrant: bool, tasks: str
) -> None:
    """They set the state of torch's default generator in the backward, and restore it."""
    module = nn.Sequential(nn.Linear(8, 8), Recomputed(use_reentrant), Recomputed(use_reentrant))
    pipe = on_cpus(module, [2, 1], chunks=4, checkpoint="never")
    found, state = gradients(pipe, schedule), torch.get_rng_state()
    for layer in list(module)[1:]:
        layer.use_reentrant = None
    torch.testing.assert_close(found, gradients(pipe, schedule), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
