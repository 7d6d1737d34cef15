"""Results and gradients of a pipe."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import assert_same_gradients, on_cpus, pipe_of
from support.pipes import normed_mlp as mlp
from torch import nn

from pipekernels import Pipe, is_checkpointing, is_recomputing

MODES = ["always", "except_last", "never"]


def on(place: torch.device, module: nn.Sequential, balance: list[int], **kwargs: Any) -> Pipe:
    return Pipe(module, balance, devices=[place] * len(balance), **kwargs)


def test_autograd_grad_does_not_change_grad_and_hooks_run_once(place: torch.device) -> None:
    module = mlp()
    pipe = on(place, module, [2, 3], chunks=4)
    x = torch.randn(9, 6, dtype=torch.float64)
    grads = torch.autograd.grad(pipe(x).square().sum(), list(pipe.parameters()))
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-10)
    assert all(p.grad is None for p in pipe.parameters())

    calls: list[str] = []
    weight = pipe[0].weight
    weight.register_hook(lambda grad: calls.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    pipe(x).sum().backward()
    assert calls == ["hook", "accumulated"]


def test_is_checkpointing_and_is_recomputing(place: torch.device) -> None:
    seen: list[tuple[bool, bool]] = []

    def asks(x: torch.Tensor) -> torch.Tensor:
        seen.append((is_checkpointing(), is_recomputing()))
        return x * 1

    pipe = pipe_of(nn.Linear(4, 4), FunctionLayer(asks), device=place, checkpoint="except_last")
    pipe(torch.randn(2, 4)).sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]
    assert not is_checkpointing() and not is_recomputing()


def test_some_micro_batches_of_an_output_have_a_gradient(place: torch.device) -> None:
    positive = FunctionLayer(lambda x: x if x.sum() > 0 else x.detach())
    pipe = pipe_of(nn.Identity(), positive, device=place, checkpoint="never")
    x = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    pipe(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0], [0.0]]))


def test_a_later_backward_that_does_not_reach_the_input(place: torch.device) -> None:
    class Second(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.weight.expand(len(x), -1, -1)

    pipe = pipe_of(nn.Linear(6, 6), Second(6, 6), device=place)
    x = torch.randn(4, 6, requires_grad=True)
    output, weights = pipe(x)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert torch.autograd.grad(weights.sum(), x, allow_unused=True) == (None,)


def test_gradients_accumulate_over_backwards_and_runs_may_interleave(place: torch.device) -> None:
    module = mlp()
    reference = copy.deepcopy(module)
    pipe = on(place, module, [2, 3], chunks=3)
    a, b = torch.randn(2, 5, 6, dtype=torch.float64)
    one, two = pipe(a), pipe(b)
    (one.sum() * 2 + two.square().sum()).backward()
    pipe(a).sum().backward()
    (reference(a).sum() * 3 + reference(b).square().sum()).backward()
    assert_same_gradients(pipe, reference, rtol=0, atol=1e-10)


def test_a_second_and_a_double_backward_raise(place: torch.device) -> None:
    pipe = on(place, mlp(), [2, 3], chunks=2)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (loss := pipe(x).sum()).backward()
    with pytest.raises(RuntimeError, match="retain_graph=True|second time"):
        loss.backward()
    # The first backward must raise: its result has no graph, so a second one might raise nothing.
    with pytest.raises(RuntimeError, match="a pipe can be differentiated once only"):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x), self.b(x)


@pytest.mark.parametrize("mode", MODES)
def test_an_output_that_the_loss_does_not_use(mode: str, place: torch.device) -> None:
    pipe = pipe_of(nn.Linear(3, 3), Two(), device=place, checkpoint=mode)
    used, unused = pipe(torch.randn(4, 3))
    assert unused.requires_grad
    used.sum().backward()
    assert pipe[1].a.weight.grad is not None
    assert pipe[1].b.weight.grad is None


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("mode", MODES)
def test_a_stage_that_gives_its_input_no_gradient(mode: str, place: torch.device) -> None:
    """It is None for the stages before, as without a pipe, not zero."""
    last = nn.Sequential(FunctionLayer(NoGradient.apply), nn.Linear(3, 3))
    pipe = pipe_of(nn.Linear(3, 3), last, device=place, checkpoint=mode)
    x = torch.randn(4, 3, requires_grad=True)
    pipe(x).sum().backward()
    assert x.grad is None and pipe[0].weight.grad is None
    assert pipe[1][1].weight.grad is not None


@pytest.mark.parametrize("chunks", [1, 2])
def test_outputs_have_memory_of_their_own(chunks: int, place: torch.device) -> None:
    """Autograd cannot know that an output of a pipe is a view, so it must not be one."""

    class Views(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return x, x.view(-1, 2), self.weight.view(1, 2).expand(len(x), 2)

    module = nn.Sequential(nn.Flatten(), Views(2, 1))
    pipe = on(place, module, [1, 1], chunks=chunks, checkpoint="always")
    x = torch.ones(4, 2, 1).requires_grad_()
    layer: Any = pipe[1]
    weight = layer.weight.detach().clone()
    outputs = pipe(x)
    for factor, output in enumerate(outputs, 2):
        output.detach().mul_(factor)
    for factor, tensor in enumerate((x[..., 0], *outputs[:2]), 1):
        assert torch.equal(tensor, torch.full((4, 2), factor))
    assert torch.equal(layer.weight, weight)
    with torch.no_grad():
        pipe(x)[0].zero_()
    assert torch.equal(x, torch.ones(4, 2, 1))


VIEWS: dict[str, list[nn.Module]] = {
    "the input": [nn.Identity(), nn.ReLU(inplace=True)],
    "a view, two stages before": [nn.Flatten(), nn.Identity(), nn.ReLU(inplace=True)],
    "a view, in one stage": [nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))],
    "an entry": [FunctionLayer(lambda x: {"y": x[:, 1:]}), FunctionLayer(lambda d: d["y"].mul_(2))],
}


def backward(pipe: Pipe, x: torch.Tensor) -> None:
    output = pipe(x)
    loss = output.sum()
    output.detach().mul_(2)
    loss.backward()


def forward_alone(pipe: Pipe, x: torch.Tensor) -> None:
    with torch.no_grad():
        pipe(x).mul_(2)


def step(pipe: Pipe, x: torch.Tensor) -> None:
    pipe.train_step(x, None, lambda output: output.mul_(2).square().mean())


@pytest.mark.parametrize("run", [backward, forward_alone, step])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("name", VIEWS)
def test_the_input_is_kept_by_layers_that_write_to_views_of_it(
    name: str, checkpoint: Any, chunks: int, run: Callable[..., None], tasks: str
) -> None:
    pipe = pipe_of(*VIEWS[name], nn.PReLU(), chunks=chunks, checkpoint=checkpoint)
    data = torch.randn(4, 6, 2)
    # One of another layout first, of which nn.Flatten makes a copy.
    for given in (data.transpose(1, 2), data, data.requires_grad_(), data):
        before = given.detach().clone()
        run(pipe, given)
        assert given.equal(before)


@pytest.mark.parametrize(
    "trace",
    [
        lambda pipe, x: torch.jit.trace(pipe, (x,)),
        lambda pipe, x: torch.export.export(pipe, (x,)),
        lambda pipe, x: torch.fx.symbolic_trace(pipe),
    ],
)
def test_tracing_is_refused(trace: Callable[..., Any]) -> None:
    pipe = on_cpus(mlp(), [2, 3], chunks=2).eval().requires_grad_(False)
    with pytest.raises((RuntimeError, AttributeError, TypeError)):
        trace(pipe, torch.randn(6, 6, dtype=torch.float64))


def test_an_input_overwritten_before_its_recomputation(place: torch.device) -> None:
    pipe = on(place, mlp(), [2, 3], chunks=2, checkpoint="always")
    x = torch.randn(4, 6, dtype=torch.float64)
    loss = pipe(x).sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="input of stage 0 was modified in place after the"):
        loss.backward()
