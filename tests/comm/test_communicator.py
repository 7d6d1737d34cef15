"""Communicators: construction and closing, threads, symmetric tensors."""

import datetime
import functools
import gc
import os
import pickle
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import TIMEOUT
from support.checks import assert_raises
from support.ranks import leakable_resources, on_ranks, own_stream, run_processes, run_threads

from pipekernels import CollectiveBarrier, Communicator, PeerError, _backend


def resident_bytes() -> int:
    """Resident memory of this process in the communicators' memory files."""
    text = Path("/proc/self/smaps").read_text()
    blocks = re.findall(r"memfd:pipekernels.*?\nRss: +(\d+) kB", text, re.DOTALL)
    return sum(int(kilobytes) for kilobytes in blocks) * 1024


@on_ranks(2, run_threads, run_processes, timeout=17.0)
def test_properties(comm: Communicator, device: torch.device) -> None:
    assert Communicator.from_handle(comm.handle) is comm
    ranks = comm.all_gather(torch.tensor([comm.rank], device=device))
    assert ranks.tolist() == [0, 1] and (comm.world_size, comm.timeout) == (2, 17.0)
    assert repr(comm) == f"Communicator(rank={comm.rank}, world_size=2)"


def check_no_leak(comm: Communicator) -> None:
    before = leakable_resources()
    for _ in range(3):
        with Communicator.from_process_group() as other:
            x = other.empty(1000).fill_(1)
            other.all_reduce(x)
            # A mapping, and a pidfd per peer.
            assert len(leakable_resources()) == len(before) + comm.world_size
        assert_raises(RuntimeError, "closed", other.barrier)
        assert x.eq(comm.world_size).all()  # Its memory stays valid after close().
        del x
        assert leakable_resources() == before
    comm.barrier()


@pytest.mark.processes
def test_close_leaks_nothing() -> None:
    run_processes(2, check_no_leak)
    gc.collect()  # Collect garbage of earlier tests.
    before = leakable_resources()
    run_threads(3, lambda comm: comm.all_reduce(torch.ones(3)))
    gc.collect()
    assert leakable_resources() == before


def test_close_is_idempotent_and_peers_notice(device: torch.device) -> None:
    @own_stream(device)
    def on_rank(comm: Communicator) -> None:
        x = torch.ones(1, device=device)
        comm.all_reduce(x)
        if comm.rank == 1:
            comm.close()
            comm.close()
            empty = functools.partial(comm.empty, 3, device=device)
            for call in (comm.barrier, empty, lambda: comm.all_reduce(x)):
                assert_raises(RuntimeError, "closed", call)
            with pytest.raises(RuntimeError, match=f"no communicator has handle {comm.handle}"):
                Communicator.from_handle(comm.handle)
        else:
            for _ in range(2):
                with pytest.raises(PeerError, match="rank 1 has closed") as caught:
                    comm.all_reduce(x)
                assert caught.value.rank == 1

    run_threads(3, on_rank)


def test_an_exception_in_a_with_block_reaches_the_peers(device: torch.device) -> None:
    @own_stream(device)
    def on_rank(comm: Communicator) -> None:
        x = torch.ones(1, device=device)
        comm.all_reduce(x)
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError), comm:
                _ = 1 / 0
        else:
            started = time.monotonic()
            assert_raises(PeerError, "rank 1 gave up after an error of its own", comm.all_reduce, x)
            assert time.monotonic() - started < TIMEOUT / 2  # Well before the timeout.

    run_threads(2, on_rank)


def test_close_ends_a_call_in_another_thread() -> None:
    comm, _absent = Communicator.threads(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(comm.barrier)
        time.sleep(0.1)
        comm.close()
        assert_raises(RuntimeError, "closed during the call", waiting.result, 5)


@on_ranks(3)
def test_communicators_of_subgroups(comm: Communicator, device: torch.device) -> None:
    """Which overlap, and are in use at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
    members = [[0, 1], [1, 2], [0, 2]]
    mine = [i for i, ranks in enumerate(members) if comm.rank in ranks]
    comms = {i: Communicator.from_process_group(groups[i]) for i in mine}
    other = groups[({0, 1, 2} - set(mine)).pop()]
    assert_raises(ValueError, "not a member", Communicator.from_process_group, other)
    x = torch.tensor([10**comm.rank], device=device)
    sums = [int(comms[i].all_reduce(x.clone())) for i in mine]
    assert sums == [[11, 101], [11, 110], [110, 101]][comm.rank]
    for each in comms.values():
        each.close()
    comm.barrier()


@pytest.mark.parametrize("backend", ["gloo", "pipekernels"])
@on_ranks(2)
def test_where_cuda_can_be_used_the_timeout_is_the_groups(comm: Communicator, backend: str) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=77), backend=backend)
    assert Communicator.from_process_group(group).timeout == 30
    torch.cuda.is_available = lambda: True
    assert Communicator.from_process_group(group).timeout == 77
    assert Communicator.from_process_group(group).split(0).timeout == 77
    assert Communicator.from_process_group(group, timeout=5).timeout == 5


def fail_to_join() -> str:
    """The error, after which nothing has leaked."""
    before = leakable_resources()
    with pytest.raises(RuntimeError) as caught:
        Communicator.from_process_group()
    assert leakable_resources() == before
    return str(caught.value)


def refusal(problem: Exception) -> Callable[..., int]:
    def refuse(*arguments: object) -> int:
        raise problem

    return refuse


@on_ranks(3)
def test_a_join_that_fails_on_one_rank_fails_on_all(comm: Communicator) -> None:
    for problem in (OSError("no more descriptors"), OverflowError("a bug")):
        if comm.rank == 1:
            vars(_backend.load())["open_pidfd"] = refusal(problem)
        what = f"{type(problem).__name__}: {problem}"
        assert fail_to_join() == f"the ranks cannot be joined: rank 1: {what}"


def test_bad_arguments() -> None:
    make, from_group = Communicator.threads, Communicator.from_process_group
    for size in (0, -1, 2.0):
        assert_raises(ValueError, f"world_size is {size}; it must be an integer", make, size)
    assert_raises(ValueError, "world_size must be in 1..1024, got 1025", make, 1025)
    message = "timeout must be a number of seconds, got timedelta"
    assert_raises(TypeError, message, make, 2, timeout=timedelta(seconds=1))
    for timeout in (0, -1.0, 1e10, float("inf"), float("nan")):
        assert_raises(ValueError, "timeout must be a positive number", make, 1, timeout=timeout)
        assert_raises(ValueError, "timeout must be a positive number", from_group, timeout=timeout)
    assert_raises(RuntimeError, r"call init_process_group\(\) first", from_group)
    assert_raises(TypeError, "cannot be pickled", pickle.dumps, make(1)[0])


@on_ranks(2)
def test_a_forked_child_cannot_use_the_communicator_but_make_its_own(
    comm: Communicator, tmp_path: Path, device: torch.device
) -> None:
    tensor = comm.empty(3, device=device).fill_(5)
    pid = os.fork()
    if pid == 0:
        refused = 0
        empty = functools.partial(comm.empty, 3, device=device)
        for call in (comm.barrier, empty, lambda: comm.all_reduce(tensor)):
            try:
                call()
            except RuntimeError as error:  # For CUDA tensors torch itself may raise.
                refused += "forked" in str(error)
        comm.close()
        try:
            store = dist.FileStore(str(tmp_path / "store"), 2)
            with Communicator.from_store(store, comm.rank, 2, timeout=TIMEOUT) as own:
                refused += own.all_reduce(torch.ones(1)).item() == 2
        finally:
            os._exit(refused)
    assert comm.all_reduce(torch.ones(1)).item() == 2
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert comm.all_reduce(tensor).tolist() == [5.0 * comm.world_size] * 3


@on_ranks(2)
def test_several_threads_share_a_communicator(comm: Communicator, device: torch.device) -> None:
    """All threads make the same calls, as their order may differ by rank."""

    def work(_: int) -> None:
        for _ in range(50):
            x = torch.ones(20_000, device=device)
            assert comm.all_reduce(x).eq(comm.world_size).all()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))


def test_waiting_for_another_threads_call_is_bounded() -> None:
    comm, _absent = Communicator.threads(2, timeout=0.5)
    with ThreadPoolExecutor(3) as threads:
        for waiting in [threads.submit(comm.barrier) for _ in range(3)]:  # Rank 1 never comes.
            with pytest.raises((TimeoutError, RuntimeError)):
                waiting.result(5)


def test_collective_barrier() -> None:
    barrier = CollectiveBarrier(3, timeout=5.0)
    assert barrier.world_size == 3
    assert [barrier.communicator(rank).rank for rank in range(3)] == [0, 1, 2]
    assert barrier.communicator(0).timeout == 5.0
    for rank in (-1, 3):
        assert_raises(ValueError, rf"rank must be in 0..2, got {rank}", barrier.communicator, rank)
    arrived: list[int] = []

    def meet(rank: int) -> None:
        arrived.append(rank)
        barrier.wait(rank)
        assert len(arrived) == 3

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(meet, range(3)))


def test_empty(device: torch.device) -> None:
    (comm,) = Communicator.threads(1)
    empty = functools.partial(comm.empty, device=device)
    assert empty(2, 3).shape == (2, 3)
    assert empty((2, 3), dtype=torch.int16).dtype == torch.int16
    assert empty([4]).shape == (4,)
    assert empty(()).shape == ()
    assert empty().shape == ()
    assert empty(2, 0).shape == (2, 0)
    assert empty(5).is_contiguous() and empty(5).data_ptr() % 64 == 0
    assert empty(5).device == device and empty(5)._base is None
    with torch.device("meta"):
        assert empty(2, 0).device == empty(5).device == device
    assert_raises(ValueError, r"negative, got \(2, -1\)", empty, 2, -1)
    not_a_dtype = "dtype must be a torch.dtype, got 'float32'"
    assert_raises(TypeError, not_a_dtype, empty, 3, dtype="float32")
    assert_raises(RuntimeError, "no room for .* bytes of symmetric memory", empty, 1 << 40)
    for sizes in ((1 << 62,), (1 << 62, 2), (1 << 32, (1 << 32) + 1)):  # Overflow 64 bits.
        assert_raises(RuntimeError, "no room for", comm.empty, sizes)
    for shape in ((1 << 62, 4, 0), (0, 1 << 62, 4)):
        assert_raises(RuntimeError, "overflow", comm.empty, shape)


@on_ranks(3, run_threads, run_processes)
def test_live_tensors_keep_their_contents(comm: Communicator, device: torch.device) -> None:
    """The memory of a live tensor is never reused, on any rank."""
    generator = random.Random(comm.rank)
    held = []
    for step in range(300):
        size = generator.choice([1, 100, 5000, 100_000])
        own = comm.empty(size, device=device).fill_(step)  # Used by this rank only.
        result = comm.all_reduce(comm.empty(1000, device=device).fill_(step))
        held.append((step, own, result[generator.randrange(1000) :]))
        if len(held) > 20:
            held.pop(generator.randrange(len(held)))
        if step % 50 == 0:
            for then, tensor, view in held:
                assert tensor.eq(then).all()
                assert view.eq(then * comm.world_size).all()


@on_ranks(2)
def test_memory_does_not_grow_and_large_blocks_are_returned(comm: Communicator) -> None:
    used = []
    for _ in range(4):
        for step in range(150):
            x = comm.empty(200_000 + 1000 * (step % 10))
            y = comm.all_reduce(x.fill_(1))
            x = comm.empty(50_000 * (1 + step % 3))
            del y
        used.append(resident_bytes())
    assert used[-1] == used[1]
    x = comm.empty(20_000_000).fill_(1)
    large = resident_bytes()
    assert large > 80_000_000
    del x
    for _ in range(200):
        comm.empty(1000)
    assert resident_bytes() < large - 60_000_000
    comm.barrier()
