"""Meshes, stages and comparisons for tests of the pipeline over a mesh dimension, on every rank."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipekernels import Communicator, execute_pipeline

WIDTH = 6
exactly = {"rtol": 0.0, "atol": 1e-10}


def line(comm: Communicator) -> DeviceMesh:
    """All ranks in one dimension."""
    return init_device_mesh("cpu", (comm.world_size,), mesh_dim_names=("pipe",))


def square(other: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", other))


def randn(*shape: int, seed: int = 1) -> Tensor:
    """The same values on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mlp(_: int = 0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def stages(world_size: int, make: Callable[[int], nn.Module] = mlp) -> list[nn.Module]:
    torch.manual_seed(3)
    return [make(index) for index in range(world_size)]


def run(module: nn.Module, x: Tensor | None, mesh: DeviceMesh, m: int, **kwargs: Any) -> Tensor:
    return execute_pipeline(
        module, x, num_microbatches=m, model_axis_name="pipe", mesh=mesh, **kwargs
    )


def assert_equal_on_all_ranks(mine: Tensor) -> None:
    drawn = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(drawn, mine)
    assert all(torch.equal(other, mine) for other in drawn)


def assert_same_grads(module: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        wanted = torch.zeros_like(q) if q.grad is None else q.grad
        torch.testing.assert_close(
            torch.zeros_like(p) if p.grad is None else p.grad, wanted, **exactly
        )


def assert_equals_sequential(
    comm: Communicator, mesh: DeviceMesh, modules: list[nn.Module], x: Tensor, m: int
) -> Tensor:
    """Check output and gradients of the parameters and of ``x``; returns the output."""
    reference = nn.Sequential(*copy.deepcopy(modules))
    mine, last = modules[comm.rank], comm.world_size - 1
    x_reference = x.clone().detach().requires_grad_(x.requires_grad)
    expected = reference(x_reference)
    target = randn(*expected.shape, seed=2)
    output = run(mine, x, mesh, m)
    assert output.shape == expected.shape
    assert output.dtype == expected.dtype
    assert output.requires_grad == expected.requires_grad
    wanted = expected if comm.rank == last else torch.zeros_like(expected)
    torch.testing.assert_close(output, wanted, **exactly)
    if expected.requires_grad:
        (expected - target).square().mean().backward()
        (output - target).square().mean().backward()
        assert_same_grads(mine, reference[comm.rank])
    if x.requires_grad:
        wanted = x_reference.grad if comm.rank == 0 else torch.zeros_like(x)
        torch.testing.assert_close(x.grad, wanted, **exactly)
    return output
