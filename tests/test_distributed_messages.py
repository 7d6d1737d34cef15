"""Messages and all_to_all of the backend of torch.distributed, and of communicators."""

import datetime
import os
import signal
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.levels import in_gate
from support.ranks import in_group, on_ranks, run_group, run_processes, run_threads
from support.sweeps.messages import messages_in_group

from pipekernels import Communicator, PeerError

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)

MANY = range(1000, 1400)
LARGE = 2_000_000  # Elements of a message that does not fit into shared memory at once.


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    in_gate([(3, range(60))], [(3, range(60)), *((ranks, MANY) for ranks in (2, 3, 4))]),
)
def test_random_messages(ranks: int, seeds: range) -> None:
    run_group(ranks, messages_in_group, seeds)


@in_group(2)
def test_messages_that_differ_in_size(rank: int) -> None:
    says = "rank 0 sends 12 bytes with tag 4 to rank 1, which receives 8 bytes"
    with pytest.raises(ValueError, match=says):
        dist.recv(torch.empty(2), 0, tag=4) if rank else dist.send(torch.empty(3), 1, tag=4)
    sent, received = torch.empty(2 if rank else 3), torch.empty(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="rank 0 sends 4 bytes to rank 1, which receives 8"):
            dist.all_to_all_single(received, sent, [2, 1], [1, 1] if rank else [2, 1])
    with pytest.raises(ValueError, match="cuts 3 rows into parts of .1, 1."):
        dist.all_to_all_single(torch.empty(3), torch.empty(2))
    dist.barrier()


@in_group(2)
def test_works_of_messages(rank: int) -> None:
    group, peer = cast(Any, dist.group.WORLD), 1 - rank
    x, got = torch.full((LARGE,), float(rank)), torch.zeros(2, LARGE).t()
    # In both directions at once, and nobody waits while they arrive.
    works = [dist.isend(x, peer), dist.irecv(got[:, 0], peer)]
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    assert got[:, 0].eq(peer).all() and got[:, 1].eq(0).all()
    dist.irecv(torch.empty(LARGE), peer, tag=1)  # Nobody keeps these works, nor their tensors.
    dist.isend(torch.ones(LARGE), peer, tag=1)
    deadline = time.monotonic() + 60
    while any(not message.has_ended for message, _ in group._dropped):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    objects: list[Any] = [None, None]
    if rank:
        dist.send_object_list([{"a": 1}, "b"], 0)
        dist.send(x[:3], 0)
    else:
        dist.recv_object_list(objects, 1)
        assert objects == [{"a": 1}, "b"]
        work = dist.irecv(first := torch.empty(3))
        work.wait(datetime.timedelta(seconds=60))
        assert work._source_rank() == 1 and first.eq(1).all() and first._version == 1
        work = dist.irecv(torch.empty(1), 1, tag=9)
        with pytest.raises(TimeoutError, match="has not ended within 0:00:00.05"):
            work.wait(datetime.timedelta(seconds=0.05))
    for call in (lambda: dist.send(x.to("meta"), peer), lambda: dist.recv(x.to("meta"), peer)):
        with pytest.raises(NotImplementedError, match="needs a group of that device"):
            call()
    with pytest.raises(ValueError, match="tag must be in 0"):
        dist.isend(x, peer, tag=-1)
    dist.barrier()


@in_group(3)
def test_messages_of_a_subgroup(rank: int) -> None:
    group = dist.new_group([2, 0])
    if rank == 1:
        return
    x = torch.full((4,), float(rank))
    dist.send(x, 2, group) if rank == 0 else dist.recv(x, 0, group)
    assert x.tolist() == [0.0] * 4
    received = torch.empty(4)
    assert (dist.recv(received, None, group) if rank else dist.send(x + 3, 2, group)) in (0, None)


@in_group(2)
def test_a_message_that_nobody_takes_ends_by_the_timeout(rank: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        says = "rank 1 has not received the 20 bytes with tag 3 that rank 0 sends within 1 s"
        with pytest.raises(TimeoutError, match=says):
            dist.send(torch.ones(5), 1, group, tag=3)
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(TimeoutError, match="rank 1 did not arrive in time, as rank 0 has"):
            dist.recv(torch.ones(5), 0, group, tag=4)


def die(rank: int) -> None:
    if rank == 0:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    works = [
        dist.irecv(torch.empty(3), 0),
        dist.irecv(torch.empty(3)),
        dist.isend(torch.ones(3), 0),
    ]
    dist.barrier()
    for work in works:
        begin = time.monotonic()
        with pytest.raises(PeerError, match="rank 0 has died") as caught:
            work.wait()
        assert caught.value.rank == 0 and time.monotonic() - begin < 1


def test_a_dead_rank_is_named() -> None:
    run_group(3, die, killed=(0,))


@on_ranks(3, run_threads, run_processes)
def test_messages_of_communicators(comm: Communicator) -> None:
    rank = comm.rank
    if rank == 0:
        comm.send(torch.arange(6.0).view(2, 3).t(), 1)
        comm.send(torch.arange(LARGE), 2, tag=5)
    else:
        got = torch.empty(3, 2) if rank == 1 else torch.empty(LARGE, dtype=torch.int64)
        assert comm.recv(got, *((0,) if rank == 1 else (None, 5))) == 0
        assert got.equal(torch.arange(6.0).view(2, 3).t() if rank == 1 else torch.arange(LARGE))
    rows = torch.arange(6).view(6, 1) + 10 * rank
    assert comm.all_to_all(rows).flatten().tolist() == [
        10 * r + 2 * rank + i for r in range(3) for i in range(2)
    ]
    sizes = [1, 2, 3]
    out = torch.empty(3 * sizes[rank], 1, dtype=torch.int64)
    result = comm.all_to_all(rows, input_sizes=sizes, output_sizes=[sizes[rank]] * 3, out=out)
    first = [0, 1, 3][rank]
    assert result is out and result.flatten().tolist() == [
        10 * r + first + i for r in range(3) for i in range(sizes[rank])
    ]
    for call, says in (
        (lambda: comm.send(rows, 3), "dst must be a rank in 0..2, got 3"),
        (lambda: comm.recv(rows, -1), "src must be a rank in 0..2, got -1"),
        (lambda: comm.all_to_all(rows[:5]), "cuts 5 rows into parts of"),
        (lambda: comm.send(rows.to("meta"), 1), "are for CPU tensors, got one on meta"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
