"""What four ranks on two hosts can do; started by two_hosts.sh, or on pretended hosts.

All reductions are of whole numbers, whose sums are exact in any order.
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear, ops
from support.sweeps.collectives import Call, make

RANKS = 4


def collectives(group: dist.ProcessGroup | None) -> list[list[float]]:
    """The results of every collective of torch that Gloo has."""
    rank, x, swapped = dist.get_rank(), torch.arange(4.0) + dist.get_rank(), torch.zeros(4)
    lists = [[torch.zeros(4) for _ in range(RANKS)] for _ in range(2)]
    results = [swapped, *lists[0]]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        results.append(x.clone())
        dist.all_reduce(results[-1], op, group)
    results.append(x.clone())
    dist.all_reduce(results[-1], group=group, async_op=True).wait()
    dist.all_gather(lists[0], x, group)
    results.append(functional.all_gather_tensor(x, 0, group or dist.group.WORLD))
    results.append(functional.reduce_scatter_tensor(x, "sum", 0, group or dist.group.WORLD))
    dist.all_to_all_single(swapped, x, group=group)
    dist.gather(x, lists[1] if rank == 1 else None, 1, group)
    results += lists[1]
    dist.scatter(x, lists[0] if rank == 3 else None, 3, group)
    results.append(x.clone())
    dist.broadcast(x, 2, group)
    dist.reduce(x, 2, group=group)
    results += [x] if rank == 2 else []
    received = torch.zeros(4)
    for work in (dist.isend(x, (rank + 1) % RANKS, group), dist.irecv(received, group=group)):
        work.wait()
    dist.barrier(group)
    objects: list[int] = [0] * RANKS
    dist.all_gather_object(objects, rank, group)
    assert objects == [*range(RANKS)]
    return [each.tolist() for each in [*results, received]]


def data_parallel() -> None:
    model = DistributedDataParallel(nn.Linear(3, 2).double())
    model(torch.full((1, 3), dist.get_rank(), dtype=torch.float64)).sum().backward()
    assert model.module.weight.grad.eq(1.5).all()


def communicator(comm: Communicator) -> None:
    """Collectives, layers, operations and communicators of some of the ranks."""
    for seed in range(40):
        make(comm, Call.draw(seed, RANKS, 3000).anywhere())
    assert Communicator.from_handle(comm.handle) is comm
    with torch.device("meta"):  # The default device must not affect the communicator.
        assert comm.all_reduce(torch.ones(3, device="cpu")).tolist() == [4.0] * 3
    leaf = torch.ones(3, requires_grad=True)
    (ops.all_reduce(leaf, comm) * (comm.rank + 1)).sum().backward()
    assert leaf.grad.tolist() == [10.0] * 3

    torch.manual_seed(0)
    first, second, x = nn.Linear(10, 8), nn.Linear(8, 6), torch.randn(4, 10)
    column = ColumnParallelLinear.from_linear(first, comm)
    for reduce in ("all_reduce", "reduce_scatter"):
        row = RowParallelLinear.from_linear(second, comm, reduce=reduce)
        expected = second(first(x))
        if reduce == "reduce_scatter":
            expected = expected.chunk(RANKS)[comm.rank]
        torch.testing.assert_close(row(column(x)), expected)
    state = row.full_state_dict()
    assert all(state[name].equal(value) for name, value in second.state_dict().items())

    alone = comm.split(None if comm.rank else 7)
    assert (alone is None) == (comm.rank > 0)
    inside, between = comm.split(comm.rank // 2), comm.split(comm.rank % 2, key=-comm.rank)
    own = torch.tensor([comm.rank])
    assert inside.all_gather(own).tolist() == [[0, 1], [2, 3]][comm.rank // 2]
    assert inside.empty(3).fill_(1).eq(1).all()  # Symmetric: these ranks share memory.
    assert between.all_gather(own).tolist() == [[2, 0], [3, 1]][comm.rank % 2]
    assert between.split(0).all_gather(own).tolist() == [[2, 0], [3, 1]][comm.rank % 2]


def refusals(comm: Communicator) -> None:
    """What needs one host; each refusal says what to do instead."""
    ones = torch.ones(comm.world_size)
    for call in (comm.all_reduce, comm.reduce_scatter):
        with pytest.raises(ValueError, match=r"order='tree', and so invariant=True.*on 2 host"):
            call(ones, order="tree")
        call(ones, "max", order="tree")  # The same in every order.
        call(ones.long(), order="tree")
    with pytest.raises(RuntimeError, match=r"on one host, and these are on 2; use torch\.empty"):
        comm.empty(3)
    full = nn.Linear(256, 6)
    layer = RowParallelLinear.from_linear(full, comm, input_is_parallel=False, invariant=True)
    with pytest.raises(ValueError, match=r"use order='rank', or .* each host, by split\(\)"):
        layer(torch.ones(2, 256))
    with pytest.raises(ValueError, match="average of int64"):
        comm.all_reduce(torch.ones(1, dtype=torch.int64), "avg")
    with pytest.raises(RuntimeError, match=r"there is no group|built without|no CUDA device"):
        comm.split(0).empty(1, device="cuda")
    comm.close()
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        comm.barrier()


def mesh() -> None:
    """Tensor parallelism in the memory of a host, data parallelism between hosts by Gloo."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    between, inside = both.get_group("data"), both.get_group("tensor")
    assert isinstance(between._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert inside.name() == "pipekernels" and between.name() != "pipekernels"
    torch.manual_seed(0)
    full = nn.Linear(8, 4)
    with Communicator.from_process_group(inside) as comm:
        assert comm.empty(2).fill_(1).eq(1).all()
        layer = RowParallelLinear.from_linear(full, comm, input_is_parallel=False)
        rows = torch.arange(16.0).view(2, 8)
        layer(rows[both.get_local_rank("data")][None]).sum().backward()
        dist.all_reduce(layer.weight.grad, group=between)
        full(rows).sum().backward()
        torch.testing.assert_close(layer.weight.grad, full.weight.grad.chunk(2, dim=1)[comm.rank])


def check() -> None:
    """All of the above, but for DDP, which imports a compiler."""
    ours = dist.group.WORLD
    assert ours is not None and dist.get_backend() in ("pipekernels", "cpu:pipekernels")
    assert isinstance(ours._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert collectives(None) == collectives(dist.new_group(backend="gloo"))
    with Communicator.from_process_group() as comm:
        communicator(comm)
        refusals(comm)
    mesh()


if __name__ == "__main__":
    dist.init_process_group("pipekernels")
    check()
    data_parallel()
    print(f"rank {dist.get_rank()} on {os.uname().nodename} is right", flush=True)
    dist.barrier()
    dist.destroy_process_group()
