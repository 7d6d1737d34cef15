"""DDP, DTensor, FSDP and functional collectives over the backend of torch.distributed."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.ranks import in_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)


def train(rank: int, group: Any) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # DDP broadcasts the parameters of rank 0.
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(10 + rank)
    for step in range(4):
        loss = model(torch.randn(8, 20)).square().mean()
        if step == 1:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *model.buffers()]


@in_group(2)
def test_ddp_trains_as_with_gloo(rank: int) -> None:
    expected = train(rank, dist.new_group(backend="gloo"))
    dist.group.WORLD._gloo = None
    for value, other in zip(train(rank, dist.group.WORLD), expected, strict=True):
        assert value.equal(other)  # The sum of two terms does not depend on their order.


@in_group(2)
def test_dtensor_matmul(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    a, b = torch.randn(6, 8).double(), torch.randn(8, 5).double()
    x = distribute_tensor(a.clone().requires_grad_(), mesh, [Shard(1)])
    w = distribute_tensor(b.clone().requires_grad_(), mesh, [Shard(0)])
    product = (x @ w).redistribute(mesh, [Replicate()])
    assert isinstance(product, DTensor)
    torch.testing.assert_close(product.to_local(), a @ b)
    rows = (x @ w).redistribute(mesh, [Shard(0)])
    torch.testing.assert_close(rows.to_local(), (a @ b).chunk(2)[rank])
    product.sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), a.t() @ torch.ones(6, 5).double())


@in_group(2)
def test_fsdp(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    sharded = copy.deepcopy(model)
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    x = torch.randn(4, 7).double()
    model(x).square().mean().backward()
    sharded(x.chunk(2)[rank]).square().mean().backward()
    for ours, whole in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), whole.grad)


@in_group(2)
def test_functional_collectives(rank: int) -> None:
    group = dist.group.WORLD
    x = torch.arange(4.0) + rank
    assert functional.all_reduce(x, "sum", group).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert functional.all_reduce(x, "avg", group).tolist() == [0.5, 1.5, 2.5, 3.5]
    gathered = functional.all_gather_tensor(x, 0, group)
    assert gathered.tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
    scattered = functional.reduce_scatter_tensor(x, "sum", 0, group)
    assert scattered.tolist() == [[1.0, 3.0], [5.0, 7.0]][rank]
    assert functional.broadcast(x, 1, group).tolist() == [1.0, 2.0, 3.0, 4.0]
    swapped = functional.all_to_all_single(x, None, None, group)
    assert swapped.tolist() == [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]][rank]
    several = functional.all_reduce_coalesced([x, x[:1]], "max", group)
    assert [y.tolist() for y in several] == [[1.0, 2.0, 3.0, 4.0], [1.0]]


@in_group(2)
def test_ranks_with_unevenly_many_inputs_join(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3), find_unused_parameters=True)
    with model.join():
        for _ in range(3 + 2 * rank):
            model(torch.randn(2, 3)).sum().backward()
