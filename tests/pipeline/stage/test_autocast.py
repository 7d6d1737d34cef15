"""Pipes under autocast: which loop over micro-batches they have the bits of, and how far they are from the
others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.error_bounds import gamma
from torch import nn
from torch.overrides import TorchFunctionMode

from pipekernels import Pipe
from pipekernels.pipeline.engine.pace import Way

MODES = ["never", "except_last", "always"]
CHUNKS = 16
BF16, FLOAT = 2.0**-8, 2.0**-24
"""Unit roundoffs."""


class InAutocast(nn.Linear):
    """Enters autocast itself, and uses its weight twice there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(super().forward(x).tanh())


def plain() -> list[nn.Module]:
    return [nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)]


def one_layer_twice() -> list[nn.Module]:
    layer = nn.Linear(16, 16)
    return [layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(16, 16)]


def layers_in_autocast() -> list[nn.Module]:
    return [InAutocast(16, 16) for _ in range(4)]


class Watching(TorchFunctionMode):
    """Keeps a pipe on the caller's thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def model_of(layers: Callable[[], list[nn.Module]]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(48, 16, generator=torch.Generator().manual_seed(1))


def results(
    module: nn.Module, x: torch.Tensor, *, chunks: int = 1, cache: bool = True
) -> list[torch.Tensor]:
    """The output and all gradients, of a forward in micro-batches under autocast and one backward."""
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
@pytest.mark.parametrize("layers", [plain, one_layer_twice])
@pytest.mark.parametrize("stages", [1, 2])
def test_bits_of_the_loop_without_the_cast_cache(
    stages: int,
    layers: Callable[[], list[nn.Module]],
    watched: bool,
    checkpoint: str,
    way: Way,
    one_thread: None,
    x: torch.Tensor,
) -> None:
    module = model_of(layers)
    expected = results(copy.deepcopy(module), x, chunks=CHUNKS, cache=False)
    pipe = pipe_of(module, [3, 2] if stages == 2 else [5], checkpoint)
    with Watching() if watched else nullcontext():
        found = results(pipe, x)
        assert torch.is_autocast_cache_enabled()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("checkpoint", MODES)
def test_layers_that_enter_autocast_themselves(
    checkpoint: str, way: Way, one_thread: None, x: torch.Tensor
) -> None:
    module = model_of(layers_in_autocast)
    reference = copy.deepcopy(module)
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        torch.cat([reference(part) for part in x.tensor_split(CHUNKS)]).sum().backward()
    finally:
        torch.set_autocast_cache_enabled(before)
    pipe_of(module, [2, 2], checkpoint)(x).sum().backward()
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("layers", [plain, one_layer_twice])
def test_training_steps(
    layers: Callable[[], list[nn.Module]],
    schedule: str,
    way: Way,
    one_thread: None,
    x: torch.Tensor,
) -> None:
    """A backward per micro-batch; GPipe's go from the last to the first."""

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().sum()

    module = model_of(layers)
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
    way: Way, one_thread: None, x: torch.Tensor
) -> None:
    """There all micro-batches share one cast of a weight, so it is in bfloat16 that their gradients are
    summed up. The pipe sums up the same terms in float32, and is nearer to their exact sum and to the
    gradients without autocast."""
    module = model_of(plain)
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
