"""Pipes whose layers are sharded over ranks: every rank runs a pipe of its own, and their collectives
have to meet in the same order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest
import torch
from ranks import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipekernels import Communicator, Pipe, tensor_parallelize
from pipekernels.pipeline.pace import Pace, Way


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).double()


def by_pipekernels(comm: Communicator) -> nn.Sequential:
    return tensor_parallelize(model(), {"[024]": "column", "[135]": "row"}, comm)


def by_torch(comm: Communicator) -> nn.Sequential:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (comm.world_size,))
    plan = {str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(6)}
    return parallelize_module(model(), mesh, plan)


def of_this_rank(grad: Tensor) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def pipe_on_rank(
    comm: Communicator, shard: Callable[[Communicator], nn.Sequential], schedule: str | None
) -> None:
    plain = model()
    x = torch.randn(12, 8, dtype=torch.float64)
    expected = plain(x).square().mean()
    expected.backward()

    choose = Pace.choose

    def unlike_the_other_rank(self: Pace, key: Hashable, ways: Sequence[Way]) -> Way:
        choose(self, key, ways)
        return ways[comm.rank]

    Pace.choose = unlike_the_other_rank  # type: ignore[method-assign]
    pipe = Pipe(shard(comm), [2, 2, 2], devices=["cpu"] * 3, chunks=6)
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
            torch.testing.assert_close(of_this_rank(layer.weight.grad), own)


@pytest.mark.parametrize(
    ("shard", "schedule"),
    [
        (by_pipekernels, None),
        (by_pipekernels, "1f1b"),
        (by_pipekernels, "zb-h1"),
        (by_torch, None),
    ],
)
def test_a_pipe_of_sharded_layers(
    shard: Callable[[Communicator], nn.Sequential], schedule: str | None
) -> None:
    run_processes(2, pipe_on_rank, shard, schedule)
