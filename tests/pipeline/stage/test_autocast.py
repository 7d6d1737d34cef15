"""Pipes under autocast: they have the bits of a loop over micro-batches without the cast cache.

Differences to the loop with the cache stay within error bounds.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.error_bounds import gamma
from support.pipes import Pipe
from torch import nn
from torch.overrides import TorchFunctionMode

MODES = ["never", "except_last", "always"]
CHUNKS = 16
BF16, FLOAT = 2.0**-8, 2.0**-24  # Unit roundoffs.


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
    devices = ["cpu"] * len(balance)
    return Pipe(module, balance, devices=devices, chunks=CHUNKS, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("balance", [[5], [3, 2]])
def test_bits_of_the_loop_without_the_cast_cache(
    balance: list[int],
    watched: bool,
    checkpoint: str,
    execution: str,
    one_thread: None,
    x: torch.Tensor,
) -> None:
    module = plain()
    expected = results(copy.deepcopy(module), x, chunks=CHUNKS, cache=False)
    pipe = pipe_of(module, balance, checkpoint)
    with Watching() if watched else nullcontext():
        found = results(pipe, x)
        assert torch.is_autocast_cache_enabled()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layer", [Twice, InAutocast])
def test_a_weight_that_is_used_twice(
    layer: type[Twice],
    train: bool,
    checkpoint: str,
    execution: str,
    one_thread: None,
    x: torch.Tensor,
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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_training_steps(schedule: str, execution: str, one_thread: None, x: torch.Tensor) -> None:
    """There is a backward per micro-batch; those of GPipe are from the last to the first."""

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().sum()

    module = plain()
    reference = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        losses = [loss_fn(reference(part)) for part in x.tensor_split(CHUNKS)]
    for loss in reversed(losses) if schedule == "gpipe" else losses:
        loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        pipe_of(module, [3, 2]).train_step(
            x, None, loss_fn, schedule=schedule, loss_reduction="sum"
        )
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_the_loop_with_the_cast_cache_differs_by_sums_in_bfloat16(
    execution: str, one_thread: None, x: torch.Tensor
) -> None:
    """With the cache, all micro-batches share the cast weight: gradients are summed in bfloat16.

    The pipe sums the same terms in float32. Its sums are closer to the exact sums, and to the
    gradients without autocast.
    """
    module = plain()
    parts, whole = copy.deepcopy(module), copy.deepcopy(module).double()
    cached = results(copy.deepcopy(module), x, chunks=CHUNKS)
    found = results(pipe_of(module, [3, 2]), x)
    assert torch.equal(found[0], cached[0])
    assert torch.equal(found[1], cached[1])

    terms: list[list[torch.Tensor]] = []
    for part in x.tensor_split(CHUNKS):
        parts.zero_grad()
        terms.append(results(parts, part)[2:])
    whole(x.double()).square().sum().backward()
    distances = [0.0] * 4
    for own, other, exact, *shares in zip(
        found[2:], cached[2:], [p.grad for p in whole.parameters()], *terms, strict=True
    ):
        stacked = torch.stack(shares).double()  # [CHUNKS, *parameter]
        total, magnitude = stacked.sum(0), stacked.abs().sum(0)
        assert ((own - total).abs() <= gamma(CHUNKS - 1, FLOAT) * magnitude).all()
        assert ((other - total).abs() <= gamma(CHUNKS - 1, BF16) * magnitude).all()
        for i, error in enumerate((own - total, other - total, own - exact, other - exact)):
            distances[i] += error.double().square().sum().item()
    of_pipe, of_loop, of_pipe_from_exact, of_loop_from_exact = distances
    assert of_pipe < of_loop
    assert of_pipe_from_exact < of_loop_from_exact
