"""The backend of torch.distributed: random calls, works, ends of groups, and errors."""

import datetime
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.levels import in_gate
from support.programs import python
from support.ranks import in_group, run_group
from support.sweeps.collectives import Call, differ_in_group, make_in_group, waited
from torch import nn
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.nn.parallel import DistributedDataParallel

from pipekernels import Communicator, PeerError

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)


MANY = range(1000, 2000)


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    in_gate([(3, range(120))], [(3, range(120)), *((ranks, MANY) for ranks in (2, 3, 4))]),
)
def test_random_calls_equal_the_oracle(ranks: int, seeds: range) -> None:
    run_group(ranks, random_calls, seeds)


@pytest.mark.parametrize("cases", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_random_calls_that_differ(cases: int) -> None:
    run_group(3, random_calls_that_differ, cases)


def random_calls_that_differ(rank: int, cases: int) -> None:
    differ_in_group(7, cases)


def random_calls(rank: int, seeds: range) -> None:
    ours: Any = dist.group.WORLD
    assert dist.get_backend() in ("pipekernels", "cpu:pipekernels") and ours.name() == "pipekernels"
    ours._gloo = ours._gloo_backend = None  # No call may be delegated to Gloo.
    for seed in seeds:
        call = Call.draw(seed, dist.get_world_size(), 3000, group=True)
        for async_op in (False, True):
            make_in_group(call, async_op)


@in_group(3)
def test_input_and_output_may_share_memory(rank: int) -> None:
    """As NCCL allows."""
    group, whole = dist.group.WORLD, torch.full((3, 2), rank + 5.0)
    for async_op in (False, True):
        whole[rank] = rank + 5
        if async_op:
            dist.all_gather_into_tensor(whole, whole[rank])
        else:
            group._allgather_base(whole, whole[rank], waited(AllgatherOptions)).wait()
        assert whole.tolist() == [[5.0] * 2, [6.0] * 2, [7.0] * 2]
        if async_op:
            dist.reduce_scatter_tensor(whole[rank], whole)
        else:
            options = waited(dist.ReduceScatterOptions)
            group._reduce_scatter_base(whole[rank], whole, options).wait()
        assert whole[rank].tolist() == [15.0 + 3 * rank] * 2


@in_group(3)
def test_scalars_and_coalesced_tensors(rank: int) -> None:
    group: Any = dist.group.WORLD
    group._gloo = group._gloo_backend = None
    tensors = [torch.full((n,), float(rank)) for n in (1, 5)]
    work = dist.all_reduce_coalesced(tensors, async_op=True)
    dist.barrier()
    dist.barrier(async_op=True).wait()
    work.wait()
    assert [x.tolist() for x in tensors] == [[3.0], [3.0] * 5]
    scalars = [torch.empty(()) for _ in range(3)]
    dist.all_gather(scalars, torch.tensor(float(rank)))
    assert [x.item() for x in scalars] == [0.0, 1.0, 2.0]
    x = torch.ones(2)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [1.5] * 2
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [x.tolist() for x in tensors] == [[9.0], [9.0] * 5]


@in_group(2)
def test_sparse_tensors_are_delegated_to_gloo(rank: int) -> None:
    sparse = torch.eye(2).to_sparse()
    dist.all_reduce(sparse)
    assert sparse.to_dense().equal(2 * torch.eye(2))
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


@in_group(2)
def test_works(rank: int) -> None:
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        y = x * 2
    work = dist.all_reduce(y, async_op=True)
    assert work.get_future().wait()[0] is y
    assert y.tolist() == [4.0] * 4
    assert work.is_success() and work.exception() is None and work.result()[0] is y
    dist.broadcast(x, 0)  # A leaf that requires a gradient.
    with torch.inference_mode():
        z = torch.ones(3).t()
        dist.all_reduce(z)
        rows = [torch.empty(3), torch.empty(3)]
        dist.all_gather(rows, z)
        assert rows[0].tolist() == [2.0] * 3
    with Communicator.from_process_group() as comm:
        assert comm.all_reduce(torch.ones(1)).item() == 2
    works = [dist.all_reduce(torch.full((50_000,), float(i)), async_op=True) for i in range(20)]
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # It runs after all of them.
    assert all(work.is_completed() for work in works)


@in_group(2)
def test_callbacks_may_call_collectives(rank: int) -> None:
    def add_again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    futures = []
    for count in range(20):
        work = dist.all_reduce(torch.ones(count), async_op=True)
        futures.append(work.get_future().then(add_again))
    for count, future in enumerate(futures):
        assert future.wait().tolist() == [4.0] * count


RESTARTED = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
import pipekernels.distributed

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
dist.init_process_group("pipekernels", timeout=datetime.timedelta(seconds=300))
x = torch.tensor([10.0**rank])
dist.all_reduce(x)
received = torch.empty(1)
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(received, 0)
    with open(f"{sys.argv[1]}/{attempt}", "w") as file:
        file.write(f"{x.item()} {received.item()}")
if attempt == 0:
    if rank == 1:
        os._exit(1)
    time.sleep(300)  # The agent kills this process in the meantime.
dist.destroy_process_group()
"""


@pytest.mark.full
def test_ranks_that_torchrun_restarts_join_again(tmp_path: Path) -> None:
    """The store belongs to torchrun's agent and still has the keys of the previous ranks."""
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    torchrun: list[str | Path] = ["-m", "torch.distributed.run", *options, script, tmp_path]
    python(*torchrun, env=environment)
    assert [(tmp_path / str(attempt)).read_text() for attempt in range(2)] == ["11.0 11.0"] * 2


@pytest.mark.parametrize("how", ["destroy", "abort"])
@in_group(2)
def test_works_of_a_destroyed_group_fail(rank: int, how: str, tmp_path: Path) -> None:
    if rank == 1:
        while not (tmp_path / "destroyed").exists():
            time.sleep(0.01)
        return
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(100)]
    dist.group.WORLD.abort() if how == "abort" else dist.destroy_process_group()
    (tmp_path / "destroyed").touch()
    for work in works:
        with pytest.raises(RuntimeError, match="closed"):
            work.wait()
        assert work.is_completed() and not work.is_success()


@in_group(2)
def test_different_calls_raise_on_all_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match="the ranks call different collectives"):
        dist.all_reduce(torch.ones(3 + rank))
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    with pytest.raises(ValueError, match="the ranks call different collectives"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), ValueError)
    with pytest.raises(RuntimeError, match="the ranks call different collectives"):
        work.get_future().wait()
    with pytest.raises(ValueError, match="the ranks call different collectives"):
        functional.all_reduce(torch.ones(3 + rank), "sum", dist.group.WORLD).sum()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@in_group(2, killed=(1,))
def test_a_lost_rank_is_an_error_everywhere(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    loss = model(torch.ones(2, 3)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="PeerError: rank 1 has died"):
        loss.backward()
    for async_op in (False, True):
        with pytest.raises(PeerError, match="rank 1 has died") as caught:
            (dist.all_reduce(torch.ones(1), async_op=async_op) or dist).wait()
        assert caught.value.rank == 1


@in_group(2)
def test_a_wait_can_have_a_timeout(rank: int) -> None:
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(TimeoutError, match=r"has not ended within 0:00:00\.3"):
            work.wait(datetime.timedelta(seconds=0.3))
        assert not work.is_completed() and work.exception() is None
        dist.send(torch.ones(1), 1)
        assert work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))


@in_group(2)
def test_methods_of_groups_without_options(rank: int) -> None:
    """The signatures of ``ProcessGroup``, which torch and users call from Python."""
    group = dist.group.WORLD
    x, second = torch.full((2,), rank + 1.0), torch.full((2,), 10.0 * rank)
    for call in (
        lambda y: group.allreduce(y),
        lambda y: group.allreduce([y]),
        lambda y: group.allreduce(y, op=dist.ReduceOp.SUM),
        lambda y: group.allreduce([y], dist.ReduceOp.SUM),
        lambda y: group.allreduce_coalesced([y]),
    ):
        y = x.clone()
        call(y).wait()
        assert y.tolist() == [3, 3]
    y = x.clone()
    group.allreduce(y, dist.ReduceOp.MAX, datetime.timedelta(seconds=9)).wait()
    assert y.tolist() == [2, 2]
    group.broadcast(y.copy_(x), 1).wait()
    assert y.tolist() == [2, 2]
    group.broadcast(y.copy_(x), root=0).wait()
    assert y.tolist() == [1, 1]
    group.barrier().wait()
    whole = torch.empty(4)
    group._allgather_base(whole, x).wait()
    assert whole.tolist() == [1, 1, 2, 2]
    rows = [torch.empty(2), torch.empty(2)]
    group.allgather(rows, x).wait()
    assert torch.cat(rows).tolist() == [1, 1, 2, 2]
    group.reduce_scatter(y, [x, second]).wait()
    assert y.tolist() == [[3, 3], [10, 10]][rank]
    uneven = torch.empty(rank + 1)
    group.reduce_scatter(uneven, [x[:1], second]).wait()
    assert uneven.tolist() == [[3], [10, 10]][rank]


@in_group(2)
def test_wrong_sizes(rank: int) -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="all_gather needs a list of 2 tensors.*got 1"):
        dist.all_gather([torch.empty(2)], x)
    with pytest.raises(ValueError, match="reduce_scatter needs a list of 2 tensors.*got 3"):
        dist.reduce_scatter(x, [x, x, x])
    with pytest.raises(ValueError, match="all_gather needs a list of tensors of the size.*got .3,"):
        dist.all_gather([x, torch.empty(3)], x)
    dist.barrier()
