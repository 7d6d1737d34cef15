"""Changes of layers between a forward and its recomputation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pipes import assert_equals_plain, assert_same_gradients, on_cpus
from torch import Tensor, nn
from torch.nn.utils import prune

from pipekernels import Pipe

MODES = ["never", "except_last", "always"]


class Scaled(nn.Linear):
    """Has a buffer, and a different result in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inner = nn.Identity()
        self.register_buffer("scale", torch.full((4,), 2.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x).tanh()) * (self.scale if self.training else 1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), Scaled(), Scaled().eval(), Scaled()).double()


def piped(module: nn.Sequential, checkpoint: Any) -> Pipe:
    return on_cpus(module, [2, 2], chunks=3, checkpoint=checkpoint)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def with_other_buffers(module: nn.Module, x: Tensor) -> Tensor:
    other = {name: buffer * 3 for name, buffer in module.named_buffers()}
    return torch.func.functional_call(module, other, (x,))


def cast(module: nn.Module, x: Tensor) -> Tensor:
    output = module(x)
    module.to(torch.float32)
    return output


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("forward", [with_other_buffers, cast])
def test_recomputation_uses_the_buffers_of_the_forward(
    forward: Callable[..., Tensor], checkpoint: Any, tasks: str, x: Tensor
) -> None:
    grads = []
    module = model()
    for net in (copy.deepcopy(module), piped(module, checkpoint)):
        inputs = x.clone().requires_grad_()
        loss = forward(net, inputs).square().sum()
        layers = [layer for layer in net.modules() if isinstance(layer, Scaled)]
        modes, buffers = [layer.training for layer in layers], list(net.buffers())
        loss.backward()
        grads.append([inputs.grad, *(p.grad for p in net.parameters())])
        assert [layer.training for layer in layers] == modes
        assert all(a is b for a, b in zip(net.buffers(), buffers, strict=True))
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-10)


IN_PLACE = "to recompute stages, but parameters were modified in place"
OTHER_LAYERS = "but layers, their modes, or which parameters they have or train, were changed"
CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "a bias": (lambda module: module[2].bias.detach().mul_(2), IN_PLACE),
    "a frozen weight": (lambda module: module[3].weight.mul_(2), IN_PLACE),
    "a layer": (
        lambda module: setattr(module[0], "inner", nn.Linear(4, 4).double()),
        OTHER_LAYERS,
    ),
    "the mode": (lambda module: module[3].eval(), OTHER_LAYERS),
    "pruned": (
        lambda module: prune.l1_unstructured(module[2], "weight", 0.5), OTHER_LAYERS
    ),
    "parametrized": (
        lambda module: nn.utils.parametrizations.weight_norm(module[2]), OTHER_LAYERS
    ),
}  # fmt: skip


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_are_refused(name: str, checkpoint: Any, tasks: str, x: Tensor) -> None:
    change, message = CHANGES[name]
    module = model()
    module[3].weight.requires_grad_(False)
    pipe = piped(module, checkpoint)
    loss = pipe(x)[:, 0].sum()
    keys = [set(layer._parameters) for layer in module]
    change(pipe.to_sequential())
    if checkpoint == "never" and name != "a frozen weight":  # The graph saved that.
        loss.backward()
    elif checkpoint != "never":
        with pytest.raises(RuntimeError, match=message):
            loss.backward()
        assert all(p.grad is None for p in module.parameters())
    changed = [set(layer._parameters) for layer in module]
    assert (changed != keys) == (name in ("pruned", "parametrized"))

    assert_equals_plain(pipe, x)


@pytest.mark.parametrize("checkpoint", MODES)
def test_layers_that_write_to_their_parameters(checkpoint: Any, tasks: str) -> None:
    """Each forward and each recomputation renormalize the rows of the embedding that they read."""
    module = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 2)).double()
    reference = copy.deepcopy(module)
    x = torch.tensor([0, 1, 1, 3, 4])
    pipe = on_cpus(module, [1, 1], chunks=2, checkpoint=checkpoint)
    for net in (pipe, reference):
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(module, reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_buffer_that_requires_a_gradient(checkpoint: Any, tasks: str, x: Tensor) -> None:
    module = model()
    for buffer in module.buffers():
        buffer.requires_grad_()
    module(x).square().sum().backward()
    expected = [buffer.grad for buffer in module.buffers()]
    for buffer in module.buffers():
        buffer.grad = None
    piped(module, checkpoint)(x).square().sum().backward()
    grads = [buffer.grad for buffer in module.buffers()]
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-10)
