"""Which backwards run in two parts, and what hooks and timelines see of it.

The bits of their gradients are compared in ``test_equals_the_loop.py`` and ``test_bits.py``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pipes import on_cpus
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipekernels.pipeline.engine.split_backward import backward_of_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


class Double(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def not_splittable() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    layer = nn.Linear(6, 6)
    return {
        "used twice": lambda x: layer(layer(x).tanh()),
        "custom function": lambda x: Double.apply(layer(x)),
        "custom function above": lambda x: layer(Double.apply(x)),
        "no parameters": torch.tanh,
    }


@pytest.mark.parametrize("name", not_splittable())
def test_graphs_that_cannot_be_split_are_unchanged(name: str) -> None:
    leaf = torch.randn(4, 6).requires_grad_()
    root = not_splittable()[name](leaf)
    assert backward_of_inputs([get_gradient_edge(root)], [torch.ones_like(root)], [leaf]) is None
    assert leaf.grad is None


def test_an_output_that_does_not_depend_on_the_inputs() -> None:
    leaf, bare = torch.randn(4, 6).requires_grad_(), nn.Parameter(torch.rand(6))
    roots = [nn.Linear(6, 6)(leaf).sum(), bare.exp().sum()]
    edges = [get_gradient_edge(root) for root in roots]
    assert backward_of_inputs(edges, [torch.ones(()), torch.ones(())], [leaf]) is None


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
    for execution in ("auto", "inline", "threads", "split"):
        calls.clear()
        model.zero_grad()
        pipe = on_cpus(model, [1, 1], chunks=4, checkpoint="never", execution=execution)
        if execution == "split":
            pipe(x).sum().backward()
        else:
            with pipe.timeline():  # Prevents that stages are fused, also in the first pass.
                pipe.train_step(x, None, torch.sum, schedule="zb-h1", loss_reduction="sum")
        assert calls == [kind] * 4
        exact = {"rtol": 0, "atol": 0} if execution == "split" else {}
        torch.testing.assert_close([p.grad for p in model.parameters()], expected, **exact)


def test_a_split_pass_has_both_parts_on_its_timeline_and_a_named_schedule_its_own() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = on_cpus(model, [1, 1], chunks=3, checkpoint="never", execution="split")
    with pipe.timeline() as timeline:
        pipe(torch.randn(6, 6)).sum().backward()
    types = [(e.action.stage, e.action.type) for e in timeline.phases[1].events]
    assert sorted(set(types)) == [(0, "B"), (1, "I"), (1, "W")]
    assert all(types.count(each) == 3 for each in set(types))
    with pipe.timeline() as timeline:
        pipe.train_step(torch.randn(6, 6), None, torch.sum, schedule="gpipe", loss_reduction="sum")
    assert {e.action.type for e in timeline.phases[0].events} == {"F", "B"}
