"""Which backwards run in two parts, and what timelines see of it.

The bits of their gradients are compared in ``test_equals_the_loop.py`` and ``test_bits.py``.
"""

from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.loops import leaves_of
from support.pipes import on_cpus
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Double(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def test_graphs_that_cannot_be_split() -> None:
    """Their bits are those of whole backwards."""
    layer, bare = nn.Linear(6, 6), nn.Parameter(torch.rand(6))
    for function in (
        lambda x: Double.apply(layer(x)),
        lambda x: layer(Double.apply(x)),
        lambda x: (layer(x), bare.exp().expand(len(x), 6)),  # It does not depend on the input.
    ):
        grads = []
        for schedule in ("1f1b", "zb-h1"):
            torch.manual_seed(0)
            first = nn.Linear(6, 6)
            last = FunctionLayer(function)
            last.layer, last.bare = layer, bare
            pipe = on_cpus(nn.Sequential(first, last), [1, 1], chunks=2)
            loss = lambda out: sum(y.square().sum() for y in leaves_of(out, torch.Tensor))
            with pipe.timeline():  # Fused stages have whole backwards.
                pipe.train_step(torch.ones(4, 6), None, loss, schedule=schedule)
            grads.append([first.weight.grad, layer.weight.grad, bare.grad])
            layer.weight.grad = bare.grad = None
        torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["on a tensor", "register_prehook", "register_hook"])
def test_hooks_are_called_once(kind: str) -> None:
    calls: list[str] = []

    def scale(grads: Any, *_: Any) -> Any:
        calls.append(kind)
        return 3 * grads if kind == "on a tensor" else tuple(3 * grad for grad in grads)

    class Hooked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            register = y.register_hook if kind == "on a tensor" else getattr(y.grad_fn, kind)
            register(scale)
            return y

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Hooked(6, 6))
    x = torch.randn(4, 6)
    torch.cat([model(part) for part in x.chunk(4)]).sum().backward()
    expected = [p.grad for p in model.parameters()]
    calls.clear()
    model.zero_grad()
    pipe = on_cpus(model, [1, 1], chunks=4, checkpoint="never")
    with pipe.timeline():  # Fused stages have whole backwards.
        pipe.train_step(x, None, torch.sum, schedule="zb-h1", loss_reduction="sum")
    assert calls == [kind] * 4
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_a_step_of_zb_h1_has_both_parts_on_its_timeline() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = on_cpus(model, [1, 1], chunks=3, checkpoint="never")
    with pipe.timeline() as timeline:
        pipe.train_step(torch.randn(6, 6), None, torch.sum, schedule="zb-h1")
    types = [(e.action.stage, e.action.type) for e in timeline.phases[0].events]
    assert sorted(set(types)) == [(0, "B"), (0, "F"), (1, "F"), (1, "I"), (1, "W")]
    assert all(types.count(each) == 3 for each in set(types))
