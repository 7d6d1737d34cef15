"""Pipes under autocast have the bits of a loop over micro-batches without the cast cache."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support.pipes import Pipe, on_cpus
from support.reference import gamma
from torch import nn
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ["never", "except_last", "always"]
CHUNKS = 16
FLOAT = 2.0**-24  # Its unit roundoff.


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
    )


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


class Watching(TorchFunctionMode):
    """A mode; while one is active, a pipe stays on the caller's thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(48, 16, generator=torch.Generator().manual_seed(1))


def results(
    module: nn.Module, x: torch.Tensor, *, chunks: int = 1, cache: bool = True
) -> list[torch.Tensor]:
    """Output and gradients of a forward by micro-batches under autocast, and one backward."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        output = torch.cat([module(part) for part in x.tensor_split(chunks)])
    output.float().square().sum().backward()
    return [output.detach().float(), x.grad, *(p.grad for p in module.parameters())]


def pipe_of(module: nn.Sequential, balance: list[int], checkpoint: str = "never") -> Pipe:
    return on_cpus(module, balance, chunks=CHUNKS, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", MODES)
def test_bits_of_the_loop_under_a_mode(checkpoint: str, execution: str, x: torch.Tensor) -> None:
    module = plain()
    expected = results(copy.deepcopy(module), x, chunks=CHUNKS, cache=False)
    pipe = pipe_of(module, [3, 2], checkpoint)
    with Watching():
        found = results(pipe, x)
        assert torch.is_autocast_cache_enabled()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layer", [Twice, InAutocast])
def test_a_weight_that_is_used_twice(
    layer: type[Twice], train: bool, checkpoint: str, execution: str, x: torch.Tensor
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
