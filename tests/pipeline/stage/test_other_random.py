"""Layers that draw from other generators than torch's default ones are recomputed as they ran."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from support.pipes import on_cpus
from torch import nn

from pipekernels import is_recomputing

SHARED = torch.Generator()


class Scale(nn.Module):
    """Multiplies by a number that is drawn; ``drawn`` has those of forwards."""

    def __init__(self, draw: Callable[[], float], generator: object = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.generator = generator
        self._draw = draw
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self._draw()
        if not is_recomputing():
            self.drawn.append(factor)
        return (x * self.weight * factor).tanh()


def owning(generator: Any, draw: Callable[[Any], float]) -> Scale:
    return Scale(lambda: draw(generator), generator)


MAKERS: dict[str, Callable[[], Scale]] = {
    "random": lambda: Scale(random.random),
    "numpy": lambda: Scale(lambda: float(numpy.random.rand())),
    "shared generator": lambda: Scale(lambda: torch.rand((), generator=SHARED).item()),
    "own generator": lambda: owning(
        torch.Generator(), lambda generator: torch.rand((), generator=generator).item()
    ),
    "own numpy generator": lambda: owning(numpy.random.default_rng(3), lambda g: g.random()),
    "own numpy state": lambda: owning(numpy.random.RandomState(3), lambda g: g.rand()),
    "own random": lambda: owning(random.Random(3), lambda g: g.random()),
}


def check_gradient(layers: list[Scale], grad: torch.Tensor, x: torch.Tensor, rows: int) -> None:
    """Against the factors that the forwards have drawn."""
    leaf = x.detach().clone().requires_grad_()
    parts = list(leaf.split(rows))
    for layer in layers:
        parts = [(part * f).tanh() for part, f in zip(parts, layer.drawn, strict=True)]
    torch.testing.assert_close(grad, torch.autograd.grad(torch.cat(parts).sum(), leaf)[0])


@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("source", MAKERS)
def test_recomputations_draw_what_forwards_drew(execution: str, source: str, mode: str) -> None:
    layers = [MAKERS[source]() for _ in range(4)]
    pipe = on_cpus(nn.Sequential(*layers), [1, 2, 1], chunks=4, checkpoint=mode)
    x = torch.linspace(-1, 1, 8, requires_grad=True)

    def run() -> torch.Tensor:
        for layer in layers:
            layer.drawn.clear()
        output = pipe(x)
        state = random.getstate(), SHARED.get_state(), numpy.random.rand()
        (grad,) = torch.autograd.grad(output.sum(), x)
        assert (state[0] == random.getstate()) and torch.equal(state[1], SHARED.get_state())
        return grad

    for _ in range(3):
        try:
            grad = run()
        except RuntimeError as error:  # Two stages have drawn their first numbers at once.
            assert "run this mini-batch again" in str(error)
            grad = run()
        check_gradient(layers, grad, x, 2)


def test_the_default_execution_keeps_to_one_thread() -> None:
    layers = nn.Sequential(Scale(random.random), Scale(random.random))
    pipe = on_cpus(layers, [1, 1], chunks=4, checkpoint="never", execution="auto")
    pipe(torch.ones(4, requires_grad=True))
    assert pipe._engine.stages.observed.needs_one_thread()


def test_stages_that_begin_to_draw_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=20)

    class Late(nn.Module):
        """Draws for the micro-batch ``when`` only, while another layer draws as well."""

        def __init__(self, when: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.when = when

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x[0] != self.when:
                return x * self.weight
            factors = []
            for _ in range(2):
                if not is_recomputing() and len(threads) == 2:
                    together.wait()
                factors.append(random.random())
            return x * self.weight * factors[0] * factors[1]

    # Stage 0 has its second micro-batch while stage 1 has its first.
    threads = [1, 2]
    pipe = on_cpus(
        nn.Sequential(Late(2), Late(1)), [1, 1], chunks=2, checkpoint="always", execution="threads"
    )
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    output = pipe(x)
    with pytest.raises(RuntimeError, match="at the same time"):
        output.sum().backward()
    threads.pop()
    pipe(x).sum().backward()
    assert pipe._engine.stages.observed.needs_one_thread()


def test_halves_of_normal_pairs_are_replayed(execution: str) -> None:
    """NumPy's global generator keeps the second of two normal numbers, beside its own state."""
    layers = [Scale(lambda: float(numpy.random.randn())) for _ in range(3)]
    pipe = on_cpus(nn.Sequential(*layers), [1, 2], chunks=3, checkpoint="always")
    for kept in (0, 1):
        numpy.random.seed(5)
        numpy.random.randn(kept)
        for layer in layers:
            layer.drawn.clear()
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        output = pipe(x)
        state = numpy.random.get_state(legacy=False)
        (grad,) = torch.autograd.grad(output.sum(), x)
        after = numpy.random.get_state(legacy=False)
        assert (state["has_gauss"], state["gauss"]) == (after["has_gauss"], after["gauss"])
        assert (state["state"]["key"] == after["state"]["key"]).all()
        check_gradient(layers, grad, x, 2)
