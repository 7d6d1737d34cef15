"""Pipes with features of torch around and inside them: DDP, autocast, hooks, modes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import assert_equals_plain, assert_same_gradients, mlp, pipe_of
from support.ranks import run_processes
from torch import nn

from pipekernels import Communicator, Pipe


def train_with_ddp(comm: Communicator) -> None:
    reference = mlp()
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference(x).square().mean().backward()
    pipe = Pipe(mlp(), [2, 2], devices=["cpu"] * 2, chunks=3)
    ddp = nn.parallel.DistributedDataParallel(pipe)
    for _ in range(2):  # DDP rebuilds its buckets after the first iteration.
        pipe.zero_grad()
        ddp(x.chunk(comm.world_size)[comm.rank]).square().mean().backward()
        assert_same_gradients(pipe, reference)


@pytest.mark.processes
def test_ddp_averages_over_replicas() -> None:
    run_processes(2, train_with_ddp)


def test_autocast_of_the_backward(tasks: str) -> None:
    """The backward is under autocast; the recomputed forward is not."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    x, grads = torch.randn(64, 8), []
    for mode in ("never", "always"):
        pipe = pipe_of(*module, chunks=8, checkpoint=mode)
        module.zero_grad()
        loss = pipe(x).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        grads.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_the_cache_of_autocast_is_off(tasks: str) -> None:
    """Uses of a weight that shared one cast would sum their gradients in bfloat16."""
    seen: list[tuple[bool, bool]] = []

    def see(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return x * 1

    pipe = pipe_of(nn.Linear(2, 2), FunctionLayer(see), checkpoint="always")
    with torch.autocast("cpu", torch.bfloat16):
        output = pipe(torch.ones(2, 2))
    output.float().sum().backward()
    assert seen == [(True, False)] * 4  # Of two microbatches, the forwards and recomputations.


class Normalised(nn.Linear):
    """Replaces its weight's data, and reads an attribute of the parameter."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        weight: Any = self.weight
        return super().forward(input) * weight.gain


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_default_device_is_that_of_the_caller(tasks: str, checkpoint: Any) -> None:
    made: list[torch.device] = []

    def makes(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.empty(()).device)
        return x + 1

    pipe = pipe_of(FunctionLayer(makes), FunctionLayer(makes), checkpoint=checkpoint)
    x = torch.ones(4, 2, requires_grad=True)

    for device in (torch.device("meta"), torch.device("cpu")):
        made.clear()
        with device:
            output = pipe(x)
        output.backward(torch.ones(4, 2))  # A recomputation has the forward's default device.
        assert made == [device] * (4 if checkpoint == "never" else 8)


def test_a_layer_that_replaces_parameter_data_and_reads_its_attributes(tasks: str) -> None:
    module = nn.Sequential(Normalised(3, 3), nn.Linear(3, 3)).double()
    module[0].weight.gain = 2.0
    reference = copy.deepcopy(module)
    pipe = Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2)
    reference[0].weight.gain = 2.0
    x = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(2):
        for model in (pipe, reference):
            model(x).square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
    torch.testing.assert_close(
        list(module.parameters()), list(reference.parameters()), rtol=0, atol=1e-10
    )
    assert_same_gradients(module, reference)


def test_parameters_frozen_in_the_forward(place: torch.device) -> None:
    module = mlp().to(place)
    reference = copy.deepcopy(module)
    pipe = Pipe(module, [2, 2], devices=[place] * 2, chunks=2, checkpoint="never")
    x = torch.randn(6, 4, dtype=torch.float64)
    inputs = []
    for model in (pipe, reference):
        inputs += [x.clone().requires_grad_(), x.clone().requires_grad_()]
        average = {name: p.detach() / 2 for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, average, (inputs[-1],)).square().sum()
        loss.backward()
        model.requires_grad_(False)
        loss = model(inputs[-2]).square().sum()
        model.requires_grad_(True)
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
    grads = [leaf.grad for leaf in inputs]
    torch.testing.assert_close(grads[:2], grads[2:], rtol=0, atol=1e-10)
    assert all(p.requires_grad for p in pipe.parameters())


def other_parameters(pipe: Pipe, x: torch.Tensor) -> torch.Tensor:
    average = {name: p.detach() / 2 for name, p in pipe.named_parameters()}
    return torch.func.functional_call(pipe, average, (x,))


def frozen(pipe: Pipe, x: torch.Tensor) -> torch.Tensor:
    output = pipe.requires_grad_(False)(x)
    pipe.requires_grad_(True)
    return output


def replaced(pipe: Pipe, x: torch.Tensor) -> torch.Tensor:
    output = pipe(x)
    pipe[0].weight = nn.Parameter(torch.zeros_like(pipe.get_parameter("partitions.0.0.weight")))
    return output


@pytest.mark.parametrize("forward", [other_parameters, frozen, replaced])
def test_other_parameters_in_a_recomputation(
    forward: Callable[..., torch.Tensor], tasks: str
) -> None:
    pipe = Pipe(mlp(), [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    loss = forward(pipe, torch.randn(6, 4, dtype=torch.float64, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="which parameters they have or train, were changed"):
        loss.backward()
    assert all(p.grad is None for p in pipe.parameters())


class Tied(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_weight_with_sparse_and_dense_gradients(sparse_first: bool) -> None:
    class Lookup(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.arange(len(x))) + x

    embedding: Any = Lookup(5, 5, sparse=True, dtype=torch.float64)
    layers = [embedding, nn.Tanh(), Tied(embedding.weight)]
    module = nn.Sequential(*(layers if sparse_first else reversed(layers)))
    x = torch.randn(6, 5, dtype=torch.float64)
    torch.cat([module(part) for part in x.tensor_split(2)]).square().sum().backward()
    expected, embedding.weight.grad = embedding.weight.grad, None
    Pipe(module, [1, 2], devices=["cpu"] * 2, chunks=2)(x).square().sum().backward()
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected.to_dense())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_in_place_operations_that_begin_later(checkpoint: Any, tasks: str) -> None:
    module = mlp()
    pipe = Pipe(module, [3, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 4, dtype=torch.float64)
    handle = module[3].register_forward_pre_hook(lambda *_: None)
    pipe(x).sum().backward()
    handle.remove()
    module[3].register_forward_pre_hook(lambda layer, inputs: (inputs[0].mul_(3),))
    for _ in range(2):
        assert_equals_plain(pipe, x)


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_is_kept(dims: int, tasks: str) -> None:
    convolution = nn.Conv2d if dims == 2 else nn.Conv3d
    order = torch.channels_last if dims == 2 else torch.channels_last_3d
    layers: Any = nn.Sequential(convolution(3, 4, 3), nn.ReLU())
    module = layers.to(memory_format=order)
    pipe = Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2)
    x = torch.randn(4, 3, *[6] * dims).to(memory_format=order).requires_grad_()
    out = pipe(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    for tensor in (out, grad):
        assert tensor.is_contiguous(memory_format=order) and not tensor.is_contiguous()
