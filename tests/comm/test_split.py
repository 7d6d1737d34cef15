"""Splitting communicators, many of them at once, and every start method of processes."""

import functools
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import (
    leakable_resources,
    on,
    on_ranks,
    own_stream,
    run_processes,
    run_threads,
)

from pipekernels import Communicator, PeerError


@on_ranks(4, run_threads, run_processes)
def test_members_and_order(comm: Communicator, device: torch.device) -> None:
    """As MPI_Comm_split: by colour, then key, then rank."""
    answers: list[Any] = []
    mine = torch.tensor([comm.rank], device=device)
    for color, key in [
        (0, None),
        (comm.rank % 2, None),
        (comm.rank % 2, -comm.rank),
        (-5, comm.rank % 2),
        (None if comm.rank == 1 else 7, None),
        (comm.rank, 3),
        (comm.rank % 2 == 0, -comm.rank << 100),
    ]:
        child = comm.split(color, key)
        if child is None:
            answers.append(None)
            continue
        with child:
            ranks = child.all_gather(mine).tolist()
            assert ranks[child.rank] == comm.rank and child.world_size == len(ranks)
            assert child.timeout == comm.timeout and Communicator.from_handle(child.handle) is child
            answers.append(ranks)
    assert (
        answers
        == [
            [[0, 1, 2, 3], [0, 2], [2, 0], [0, 2, 1, 3], [0, 2, 3], [0], [2, 0]],
            [[0, 1, 2, 3], [1, 3], [3, 1], [0, 2, 1, 3], None, [1], [3, 1]],
            [[0, 1, 2, 3], [0, 2], [2, 0], [0, 2, 1, 3], [0, 2, 3], [2], [2, 0]],
            [[0, 1, 2, 3], [1, 3], [3, 1], [0, 2, 1, 3], [0, 2, 3], [3], [3, 1]],
        ][comm.rank]
    )
    assert comm.split(None) is None
    assert comm.all_reduce(torch.ones(1, device=device)).item() == comm.world_size


def fail_apart(device: torch.device, comm: Communicator) -> None:
    with own_stream(device):
        pair = comm.split(comm.rank // 2)
        grandchild = pair.split(0)
        x = torch.ones(2, device=device)
        assert pair.all_reduce(x.clone()).tolist() == [2.0, 2.0]
        if comm.rank == 1:
            pair.close()
        elif comm.rank == 0:
            with pytest.raises(PeerError, match="rank 1 has closed"):
                pair.all_reduce(x.clone())
                pair.synchronize()
        else:
            pair.all_reduce(x.clone())
        assert grandchild.all_reduce(x.clone()).tolist() == [2.0, 2.0]
        comm.barrier()
        comm.close()
        if comm.rank >= 2:
            assert pair.all_reduce(x).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "run", [run_threads, pytest.param(run_processes, marks=pytest.mark.processes)]
)
def test_parent_and_children_are_independent(run: Callable[..., Any], device: torch.device) -> None:
    run(4, functools.partial(fail_apart, device))


@on_ranks(2, run_threads)
def test_bad_arguments(comm: Communicator) -> None:
    wrong: list[Any] = [("a", None, "color"), (0.5, None, "color"), (0, 1.5, "key")]
    for color, key, name in wrong:
        with pytest.raises(TypeError, match=f"{name} must be an int or None, got"):
            comm.split(color, key)
    with pytest.raises(ValueError, match="different collectives: .*all_gather.*barrier"):
        comm.split(0) if comm.rank == 0 else comm.barrier()


@on_ranks(4, run_threads, run_processes)
def test_no_room_is_an_error_on_all_ranks(comm: Communicator) -> None:
    if comm.rank == 0:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    comm.barrier()
    try:
        with pytest.raises(RuntimeError, match=r"rank 0: .* GiB in memory \(see ulimit -f\)"):
            comm.split(0)
    finally:
        if comm.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    comm.barrier()
    child = comm.split(comm.rank % 2)
    assert child.all_reduce(torch.tensor([comm.rank])).item() == 2 + 2 * (comm.rank % 2)


@on_ranks(2)
def test_many_at_once_leak_nothing(comm: Communicator) -> None:
    """50 communicators at once, used out of order; half are closed, half garbage-collected."""
    before = leakable_resources()
    comms = [comm.split(0) for _ in range(50)]
    assert len(leakable_resources()) >= len(before) + 50
    for number, each in reversed(list(enumerate(comms))):
        assert each.all_reduce(torch.tensor([number])).item() == comm.world_size * number
    held = comms[7].empty(10).fill_(comm.rank)
    for each in comms[::2]:
        each.close()
    assert comms[7].all_reduce(held).eq(1).all()
    comm.barrier()  # Before any rank drops one that others may still need.
    del comms, each, held
    comm.barrier()
    assert leakable_resources() == before


def rank_and_parent(comm: Communicator, device: torch.device) -> tuple[int, int]:
    assert comm.all_reduce(comm.empty(10, device=device).fill_(1)).eq(comm.world_size).all()
    return comm.rank, os.getppid()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("device", "method"),
    # A forked child cannot use CUDA if its parent has initialized it.
    [("cpu", "fork"), ("cpu", "spawn"), pytest.param("cuda", "spawn", marks=pytest.mark.cuda)],
    indirect=["device"],
)
def test_start_methods_when_the_parent_has_a_communicator(
    method: str, device: torch.device
) -> None:
    (own,) = Communicator.threads(1)
    x = own.empty(3, device=device).fill_(1)
    expected = [(rank, os.getpid()) for rank in range(2)]
    assert run_processes(2, on(device, rank_and_parent, device), start_method=method) == expected
    assert own.all_reduce(x).tolist() == [1.0] * 3


@pytest.mark.slow
def test_a_store_without_all_ranks() -> None:
    for rank, world_size in ((-1, 1), (1, 1)):
        with pytest.raises(ValueError, match=f"got {rank} of {world_size}"):
            Communicator.from_store(dist.HashStore(), rank, world_size)
    with pytest.raises(TimeoutError, match=r"rank\(s\) 1, 2 did not join within 0\.3 s"):
        Communicator.from_store(dist.HashStore(), 0, 3, timeout=0.3)
