"""Meshes, stages and comparisons for tests of the pipeline over a mesh dimension, on every rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipekernels import Communicator, execute_pipeline

WIDTH = 6
exactly: Any = {"rtol": 0.0, "atol": 1e-10}


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


def assert_same_grads(module: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        wanted = torch.zeros_like(q) if q.grad is None else q.grad
        torch.testing.assert_close(
            torch.zeros_like(p) if p.grad is None else p.grad, wanted, **exactly
        )
