"""Ranks on several hosts: network namespaces, or processes with different PIPEKERNELS_HOST_IDs.

As a program, started by two_hosts.sh, it does on four ranks what ``test_two_pretended_hosts`` does.
All reductions are of whole numbers, whose sums are exact in any order.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support import TIMEOUT
from support.checks import assert_raises
from support.programs import run
from support.ranks import in_group, on_ranks
from support.sweeps.collectives import Call, make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear, _backend, ops
from pipekernels.comm import cuda

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)

RANKS = 4


def collectives(group: dist.ProcessGroup) -> list[list[float]]:
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
    results.append(functional.all_gather_tensor(x, 0, group))
    results.append(functional.reduce_scatter_tensor(x, "sum", 0, group))
    dist.all_to_all_single(swapped, x, group=group)
    dist.gather(x, lists[1] if rank == 1 else None, 1, group)
    dist.scatter(x, lists[0] if rank == 3 else None, 3, group)
    results += [*lists[1], x.clone()]
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


def use(comm: Communicator) -> None:
    """Collectives, layers, operations and communicators of some of the ranks."""
    for seed in range(40):
        make(comm, Call.draw(seed, RANKS, 3000).anywhere())
    leaf = torch.ones(3, requires_grad=True)
    (ops.all_reduce(leaf, comm) * (comm.rank + 1)).sum().backward()
    assert leaf.grad.tolist() == [10.0] * 3

    torch.manual_seed(0)
    first, second, x = nn.Linear(10, 8), nn.Linear(8, 6), torch.randn(4, 10)
    column, row = ColumnParallelLinear.from_linear(first, comm), RowParallelLinear.from_linear
    torch.testing.assert_close(row(second, comm)(column(x)), second(first(x)))
    scattered = row(second, comm, reduce="reduce_scatter")(column(x))
    torch.testing.assert_close(scattered, second(first(x)).chunk(RANKS)[comm.rank])
    assert column.full_state_dict()["weight"].equal(first.weight)

    alone = comm.split(None if comm.rank else 7)
    assert (alone is None) == (comm.rank > 0)
    inside, between = comm.split(comm.rank // 2), comm.split(comm.rank % 2, key=-comm.rank)
    own = torch.tensor([comm.rank])
    assert inside.all_gather(own).tolist() == [[0, 1], [2, 3]][comm.rank // 2]
    assert inside.empty(3).fill_(1).eq(1).all()  # Symmetric: these ranks share memory.
    for each in (between, between.split(0)):
        assert each.all_gather(own).tolist() == [[2, 0], [3, 1]][comm.rank % 2]


def be_refused(comm: Communicator) -> None:
    """What needs one host; each refusal says what to do instead."""
    ones = torch.ones(comm.world_size)
    for call in (comm.all_reduce, comm.reduce_scatter):
        message = r"order='tree', and so invariant=True.*on 2 host"
        assert_raises(ValueError, message, call, ones, order="tree")
        call(ones, "max", order="tree")  # The same in every order.
        call(ones.long(), order="tree")
    message = r"on one host, and these are on 2; use torch\.empty"
    assert_raises(RuntimeError, message, comm.empty, 3)
    full = nn.Linear(256, 6)
    layer = RowParallelLinear.from_linear(full, comm, input_is_parallel=False, invariant=True)
    message = r"use order='rank', or .* each host, by split\(\)"
    assert_raises(ValueError, message, layer, torch.ones(2, 256))
    assert_raises(ValueError, "average of int64", comm.all_reduce, ones.long(), "avg")
    message = r"there is no group|built without|no CUDA device"
    assert_raises(RuntimeError, message, comm.split(0).empty, 1, device="cuda")
    comm.close()
    assert_raises(RuntimeError, "closed; make a new one", comm.barrier)


def train_on_a_mesh() -> None:
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


@in_group(RANKS, hosts="aabb")
def test_two_pretended_hosts(rank: int) -> None:
    ours = dist.group.WORLD
    assert dist.get_backend() in ("pipekernels", "cpu:pipekernels")
    assert isinstance(ours._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert collectives(ours) == collectives(dist.new_group(backend="gloo"))
    with Communicator.from_process_group() as comm:
        use(comm)
        be_refused(comm)
    train_on_a_mesh()


def can_make_namespaces() -> bool:
    """Whether this is root on a machine that lets it make network namespaces."""
    name = f"pipekernels{os.getpid()}"
    if os.geteuid() or not shutil.which("ip") or os.system(f"ip netns add {name} 2>/dev/null"):
        return False
    return os.system(f"ip netns del {name}") == 0


@pytest.mark.full
def test_two_hosts() -> None:
    if not can_make_namespaces():
        pytest.skip("network namespaces cannot be made here")
    folder = Path(__file__).parent
    environment = {
        **os.environ, "PYTHON": sys.executable, "RANKS": "2",
        "PYTHONPATH": os.pathsep.join(map(str, (folder.parent, folder.parents[1]))),
    }  # fmt: skip
    done = run("bash", folder / "two_hosts.sh", __file__, code=None, env=environment)
    for rank in range(RANKS):
        assert f"rank {rank} on host{rank // 2} is right" in done.stdout, done.stdout + done.stderr


@on_ranks(4)
def test_a_store_serves_ranks_on_hosts_of_different_sizes(alone: Communicator) -> None:
    os.environ["PIPEKERNELS_HOST_ID"] = "abcc"[alone.rank]
    store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
    with Communicator.from_store(store, alone.rank, 4, timeout=TIMEOUT) as comm:
        assert comm.all_gather(torch.tensor([comm.rank])).tolist() == [0, 1, 2, 3]
        assert comm.all_reduce(torch.ones(3), "avg").tolist() == [1.0] * 3
        comm.barrier()


@on_ranks(3, killed=(2,))
def test_a_killed_rank_ends_a_communicator_over_hosts(alone: Communicator) -> None:
    os.environ["PIPEKERNELS_HOST_ID"] = "aab"[alone.rank]
    with Communicator.from_process_group(timeout=TIMEOUT) as comm:
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="(?i)gloo|connection|peer"):
            while True:
                comm.all_reduce(torch.ones(1000))


@in_group(2)
def test_cuda_tensors_between_hosts(rank: int) -> None:
    """The choice of their backend, which runs here on CPU tensors."""
    _backend.require_cuda = lambda device=None: None
    device = torch.device("cuda", 0)
    group = dist.new_group(backend="cpu:gloo")
    for wrong, says in ((None, "there is no group"), (group, "there is a group with .*gloo")):
        with pytest.raises(RuntimeError, match=f"{says}.*backend='cpu:gloo,cuda:nccl'"):
            cuda.between_hosts(wrong, 2, device, None)
    vars(cuda)["backends_of"] = lambda group: {"cuda": "nccl"}
    backend = cuda.between_hosts(group, 2, device, None)
    backend.check()
    assert (backend._group, backend.device) == (group, device)
    x = torch.ones(3)
    backend.all_reduce(x, "avg", "auto")
    assert x.tolist() == [1.0] * 3


if __name__ == "__main__":
    dist.init_process_group("pipekernels")
    test_two_pretended_hosts.body(dist.get_rank())
    print(f"rank {dist.get_rank()} on {os.uname().nodename} is right", flush=True)
    dist.barrier()
    dist.destroy_process_group()
