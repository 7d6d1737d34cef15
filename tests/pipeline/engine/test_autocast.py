"""Weights that a layer uses twice under autocast."""

import copy
from functools import partial

import pytest
import torch
from support.pipes import Pipe, on_cpus
from support.reference import gamma
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ["never", "except_last", "always"]
CHUNKS = 16
FLOAT = 2.0**-24  # Its unit roundoff.


class Twice(nn.Module):
    """A linear layer, then the same layer again if ``tied``, else a copy of it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)
        self.two = self.one if tied else copy.deepcopy(self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh())


class InAutocast(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def twice(layer: type[Twice], tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer(tied) for _ in range(4)])


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(48, 16, generator=torch.Generator().manual_seed(1))


def pipe_of(module: nn.Sequential, balance: list[int], checkpoint: str = "never") -> Pipe:
    return on_cpus(module, balance, chunks=CHUNKS, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layer", [Twice, InAutocast])
def test_a_weight_that_is_used_twice(
    layer: type[Twice], train: bool, checkpoint: str, x: torch.Tensor
) -> None:
    """The weight's bfloat16 gradients are summed in float32, in any order."""
    module, apart = twice(layer, True), twice(layer, False)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=layer is Twice)
    names = [name for name, _ in apart.named_parameters()]
    total: dict[str, torch.Tensor] = {}
    magnitude: dict[str, torch.Tensor] = {}
    for part in x.tensor_split(CHUNKS):
        with autocast():
            output = apart(part)
        grads = torch.autograd.grad(output.float().square().sum(), list(apart.parameters()))
        for name, grad in zip(names, grads, strict=True):
            key = name.replace("two", "one")
            total[key] = total.get(key, 0) + grad.double()
            magnitude[key] = magnitude.get(key, 0) + grad.double().abs()
    pipe = pipe_of(module, [2, 2], checkpoint)
    with autocast():
        if train:
            pipe.train_step(x, None, lambda y: y.float().square().sum(), loss_reduction="sum")
        else:
            output = pipe(x)
    if not train:
        output.float().square().sum().backward()
    for name, p in module.named_parameters():
        bound = gamma(2 * CHUNKS - 1, FLOAT) * magnitude[name]
        assert ((p.grad - total[name]).abs() <= bound).all()
