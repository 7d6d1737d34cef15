"""Pipes of sharded layers: each rank has a pipe, and all call collectives in the same order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion

from pipekernels import Communicator, Pipe, tensor_parallelize

pytestmark = pytest.mark.processes
Shard = Callable[[Communicator], nn.Sequential]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).double()


def by_pipekernels(comm: Communicator) -> nn.Sequential:
    return tensor_parallelize(model(), {"[024]": "column", "[135]": "row"}, comm)


def by_torch(comm: Communicator) -> Any:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (comm.world_size,))
    plan: Any = {str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(6)}
    return parallelize_module(model(), mesh, plan)


def piped(layers: nn.Sequential) -> Pipe:
    return Pipe(layers, [2, 2, 2], devices=["cpu"] * 3, chunks=6)


def by_pipekernels_in_a_pipe(comm: Communicator) -> Pipe:
    pipe = piped(model())
    plan = {f"partitions.*.{i}": "row" if i % 2 else "column" for i in range(6)}
    return tensor_parallelize(pipe, plan, comm)


def local(grad: Any) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def pipe_on_rank(comm: Communicator, shard: Shard, schedule: Any) -> None:
    plain = model()
    x = torch.randn(12, 8, dtype=torch.float64)
    expected = plain(x).square().mean()
    expected.backward()

    layers = shard(comm)
    pipe = layers if isinstance(layers, Pipe) else piped(layers)
    for _ in range(5):
        pipe.zero_grad()
        if schedule is None:
            loss = pipe(x).square().mean()
            loss.backward()
        else:
            loss = pipe.train_step(x, x, lambda y, _: y.square().mean(), schedule=schedule)
        torch.testing.assert_close(loss, expected)
        for i, layer in enumerate(pipe):
            own = plain[i].weight.grad.tensor_split(2, dim=i % 2)[comm.rank]
            torch.testing.assert_close(local(layer.weight.grad), own)


@pytest.mark.parametrize(
    ("shard", "schedule"),
    [
        (by_pipekernels, None),
        (by_pipekernels, "1f1b"),
        (by_pipekernels, "zb-h1"),
        (by_torch, None),
        (by_pipekernels_in_a_pipe, None),
    ],
)
def test_a_pipe_of_sharded_layers(shard: Shard, schedule: Any) -> None:
    run_processes(2, pipe_on_rank, shard, schedule)


def fsdp_on_rank(comm: Communicator) -> None:
    mesh = init_device_mesh("cpu", (comm.world_size,))
    x = torch.randn(6 * comm.world_size, 8, dtype=torch.float64)
    plain = model()
    for reshard in (False, True):
        pipe = Pipe(model(), [2, 2, 2], devices=["cpu"] * 3, chunks=6)
        fully_shard(pipe, mesh=mesh, reshard_after_forward=reshard)
        for _ in range(3):
            plain.zero_grad()
            pipe.zero_grad()
            x = x.roll(1, 0) * 1.1
            plain(x).square().mean().backward()
            pipe(x.chunk(comm.world_size)[comm.rank]).square().mean().backward()
            for layer, parallel in zip(plain, pipe, strict=True):
                torch.testing.assert_close(parallel.weight.grad.full_tensor(), layer.weight.grad)
        with pytest.raises(RuntimeError, match="FSDP shards this pipe.* not for train_step"):
            pipe.train_step(x, None, torch.sum)

    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match=r"FSDP shards FSDPLinear.*fully_shard\(pipe\)"):
        Pipe(sharded, [2, 2, 2], devices=["cpu"] * 3)
    pipe = Pipe(model(), [2, 2, 2], devices=["cpu"] * 3)
    pipe(x)
    fully_shard(pipe[3], mesh=mesh)
    for _ in range(2):
        with pytest.raises(ValueError, match="FSDP shards FSDPLinear"):
            pipe(x)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="FSDP2 of torch 2.6 does not run on CPUs"
)
def test_fsdp_around_a_pipe_and_not_inside() -> None:
    run_processes(2, fsdp_on_rank)
