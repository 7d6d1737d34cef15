"""Communicators: how they start and end, lost and late ranks, mismatches, threads, memory."""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes, run_threads, traces

from pipekernels import CollectiveBarrier, Communicator, PeerError
from pipekernels.comm import bootstrap


def kill_self_soon(seconds: float, signal_number: int = signal.SIGKILL) -> None:
    """Send this process a signal from a thread, so that it hits in the middle of anything."""

    def fire() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal_number)

    threading.Thread(target=fire, daemon=True).start()


def resident_bytes() -> int:
    """Memory of all memory files of communicators that this process has touched."""
    text = Path("/proc/self/smaps").read_text()
    blocks = re.findall(r"memfd:pipekernels.*?\nRss: +(\d+) kB", text, re.DOTALL)
    return sum(int(kilobytes) for kilobytes in blocks) * 1024


# ---- start and end ---------------------------------------------------------------------------------


def properties(comm: Communicator) -> tuple[int, int, float, str]:
    assert Communicator.from_handle(comm.handle) is comm
    assert comm.all_reduce(torch.ones(3)).tolist() == [comm.world_size] * 3
    return comm.rank, comm.world_size, comm.timeout, repr(comm)


def test_properties() -> None:
    expected = [(rank, 2, 7.0, f"Communicator(rank={rank}, world_size=2)") for rank in range(2)]
    assert run_processes(2, properties, timeout=7.0) == expected
    assert run_threads(2, properties, timeout=7.0) == expected


def leave_no_trace(comm: Communicator) -> None:
    before = traces()
    for _ in range(3):
        with Communicator.from_process_group() as other:
            x = other.empty(1000).fill_(1)
            other.all_reduce(x)
            assert len(traces()) == len(before) + comm.world_size  # A mapping, and pidfds.
        with pytest.raises(RuntimeError, match="closed"):
            other.barrier()
        assert x.eq(comm.world_size).all()  # Still ours.
        del x
        assert traces() == before
    comm.barrier()


def test_nothing_is_left_after_close() -> None:
    run_processes(2, leave_no_trace)
    gc.collect()  # What earlier tests left.
    before = traces()
    run_threads(3, properties)
    gc.collect()
    assert traces() == before


def test_close_is_idempotent_and_peers_notice() -> None:
    def on_rank(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            comm.close()
            comm.close()
            for call in (
                comm.barrier,
                lambda: comm.empty(3),
                lambda: comm.all_reduce(torch.ones(1)),
            ):
                with pytest.raises(RuntimeError, match="closed"):
                    call()
            with pytest.raises(RuntimeError, match=f"no communicator has handle {comm.handle}"):
                Communicator.from_handle(comm.handle)
        else:
            for _ in range(2):
                with pytest.raises(PeerError, match="rank 1 has closed") as caught:
                    comm.barrier()
                assert caught.value.rank == 1

    run_threads(3, on_rank)


def test_an_exception_in_a_with_block_reaches_the_peers() -> None:
    def on_rank(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError), comm:
                _ = 1 / 0
        else:
            started = time.monotonic()
            with pytest.raises(PeerError, match="rank 1 gave up after an error of its own"):
                comm.barrier()
            assert time.monotonic() - started < 10  # Not by the timeout of 30 s.

    run_threads(2, on_rank)


def test_close_ends_a_call_in_another_thread() -> None:
    comm, _absent = Communicator.threads(2)
    errors = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="closed by another thread") as caught:
            comm.barrier()
        errors.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    comm.close()
    thread.join(5)
    assert len(errors) == 1


def subgroups(comm: Communicator) -> list[int]:
    """Several communicators at once, over overlapping groups."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
    members = [[0, 1], [1, 2], [0, 2]]
    mine = [i for i, ranks in enumerate(members) if comm.rank in ranks]
    comms = {i: Communicator.from_process_group(groups[i]) for i in mine}
    other = groups[({0, 1, 2} - set(mine)).pop()]
    with pytest.raises(ValueError, match="not a member"):
        Communicator.from_process_group(other)
    sums = [int(comms[i].all_reduce(torch.tensor([10**comm.rank]))) for i in mine]
    for each in comms.values():
        each.close()
    comm.barrier()
    return sums


def test_communicators_of_subgroups() -> None:
    assert run_processes(3, subgroups) == [[11, 101], [11, 110], [110, 101]]


def broken_start(comm: Communicator) -> str:
    before = traces()
    if comm.rank == 1:

        def refuse(pid: int) -> int:
            raise OSError("no more descriptors")

        os.pidfd_open = refuse
    with pytest.raises(RuntimeError) as caught:
        Communicator.from_process_group()
    assert traces() == before
    return str(caught.value)


def test_a_start_that_fails_on_one_rank_fails_on_all() -> None:
    for message in run_processes(2, broken_start):
        assert message == "the ranks cannot be joined: rank 1: OSError: no more descriptors"


def test_the_memory_is_for_members_alone() -> None:
    processes = [
        bootstrap._Process((), os.getpid(), ""),
        bootstrap._Process((), 1, ""),  # Is awaited, and will not come.
    ]
    address = "\0pipekernels-test-of-strangers"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as stranger:
        listener.bind(address)
        listener.listen()
        stranger.connect(address)
        before = traces()
        with pytest.raises(TimeoutError):
            bootstrap._hand_out(listener, processes, 0.2)
        assert traces() == before
        assert socket.recv_fds(stranger, 1, 1)[:2] == (b"", [])


def test_bad_arguments() -> None:
    for world_size in (0, -1):
        with pytest.raises(ValueError, match=f"world_size must be at least 1, got {world_size}"):
            Communicator.threads(world_size)
    for timeout in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            Communicator.threads(1, timeout=timeout)
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            Communicator.from_process_group(timeout=timeout)
    with pytest.raises(RuntimeError, match=r"call init_process_group\(\) first"):
        Communicator.from_process_group()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Communicator.threads(1)[0])


# ---- ranks that call different things ------------------------------------------------------------------


def call_differently(comm: Communicator) -> None:
    odd, x = comm.rank == 1, torch.ones(10)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: comm.all_reduce(x[: 9 + odd]), r"rank 0 all_reduce\(9 x float32, sum, auto\), rank 1 all_reduce\(10"),
        (lambda: comm.all_reduce(x.to(torch.int32 if odd else torch.float16)), "10 x float16.*10 x int32"),
        (lambda: comm.all_reduce(x, "max" if odd else "sum"), "sum, auto.* max, auto"),
        (lambda: comm.all_reduce(x, algorithm="ring" if odd else "auto"), "sum, auto.* sum, ring"),
        (lambda: comm.broadcast(x, int(odd)), "src=0.* src=1"),
        (lambda: comm.barrier() if odd else comm.all_reduce(x), r"rank 0 all_reduce.* rank 1 barrier\(\)"),
        (lambda: comm.all_reduce(x.view(2, 5) if odd else x), r"10 x float32.*10 x float32.*but of different shapes"),
        (lambda: comm.broadcast(x.view(2, 5) if odd else x.view(5, 2)), "but of different shapes"),
        (lambda: comm.all_gather(x.view(1, 10) if odd else x), "but of different shapes"),
        (lambda: comm.reduce_scatter(torch.ones((6, 2) if odd else (3, 4))), "but of different shapes"),
        (lambda: comm.all_gather(x) if odd else comm.reduce_scatter(x[:9]), "reduce_scatter.* all_gather"),
    ]  # fmt: skip
    for call, message in calls:
        with pytest.raises(ValueError, match=f"the ranks call different collectives: .*{message}"):
            call()
        assert comm.all_reduce(torch.ones(2)).tolist() == [comm.world_size] * 2


def test_different_calls_raise_on_all_ranks_and_the_communicator_stays_usable() -> None:
    run_threads(3, call_differently)
    run_processes(3, call_differently)


# ---- ranks that are lost ------------------------------------------------------------------------------


def lose_a_rank(comm: Communicator, folder: str, seed: int) -> tuple[str, float]:
    """Rank ``seed % world_size`` is killed in a row of collectives; the others go on without it."""
    generator = random.Random(seed)
    victim = seed % comm.world_size
    delay = generator.uniform(0, 0.05)
    group_store = f"{folder}/store-{seed}"
    comm.close()
    before = traces()
    comm = Communicator.from_process_group()
    x, symmetric = torch.ones(1_000_000), comm.empty(300_000).fill_(1)
    comm.barrier()
    if comm.rank == victim:
        Path(f"{folder}/{seed}").write_text(str(time.monotonic() + delay))
        kill_self_soon(delay)
    with pytest.raises(PeerError) as caught:
        while True:
            assert comm.all_reduce(x.fill_(1))[-1] == comm.world_size
            for algorithm in ("one_shot", "two_shot", "ring"):
                comm.all_reduce(symmetric.fill_(1), algorithm=algorithm)
                assert symmetric.eq(comm.world_size).all()  # Never a part of the sum.
            comm.reduce_scatter(torch.ones(3 * 5000))
            comm.all_gather(x)
            comm.broadcast(x)
            comm.barrier()
    raised = time.monotonic()
    message = str(caught.value)
    assert caught.value.rank == victim
    del caught  # Its traceback holds the tensors.
    with pytest.raises(PeerError, match="cannot be used after a failure.*make a new one"):
        comm.barrier()
    comm.close()
    del symmetric
    assert traces() == before

    # Those that are left form a new group.
    rank = comm.rank - (comm.rank > victim)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{group_store}", rank=rank, world_size=comm.world_size - 1
    )
    with Communicator.from_process_group() as survivors:
        assert survivors.all_reduce(torch.ones(1)).item() == comm.world_size - 1
    return message, raised


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_rank_is_named_at_once_by_all_others(seed: int, tmp_path: Path) -> None:
    victim = seed % 3
    results = run_processes(3, lose_a_rank, str(tmp_path), seed, killed=(victim,))
    killed = float((tmp_path / str(seed)).read_text())
    for rank, result in enumerate(results):
        if rank != victim:
            message, raised = result
            assert f"rank {victim} has died" in message
            assert raised - killed < 10  # Not by the timeout of 30 s.


def wait_for_a_late_rank(comm: Communicator) -> str:
    comm.barrier()
    if comm.rank == 2:
        time.sleep(2.5)
        with pytest.raises(TimeoutError, match="rank 2 did not arrive in time"):
            comm.barrier()
        return ""
    with pytest.raises(TimeoutError) as caught:
        comm.all_reduce(torch.ones(5))
    with pytest.raises(
        RuntimeError, match=r"cannot be used after a failure \(.*rank.*2.*\); make a new"
    ):
        comm.all_reduce(torch.ones(5))
    return str(caught.value)


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_a_late_rank_is_named(run: Callable[..., list[str]]) -> None:
    for message in run(3, wait_for_a_late_rank, timeout=1.0)[:2]:
        assert "2" in message
        assert re.search(r"rank\(s\) 2 of 3 did not arrive at all_reduce\(5 x float32, sum, auto\), "
                         r"collective number 2 .* within 1 s|rank 2 did not arrive in time, as rank",
                         message)  # fmt: skip


def survive_a_stopped_rank(comm: Communicator) -> str:
    pids = [int(pid) for pid in comm.all_gather(torch.tensor([os.getpid()]))]
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # Until a peer wakes it.
        with pytest.raises(TimeoutError, match="rank 1 did not arrive in time"):
            comm.barrier()
        return ""
    with pytest.raises(TimeoutError) as caught:
        comm.barrier()
    os.kill(pids[1], signal.SIGCONT)
    return str(caught.value)


def test_a_stopped_rank_is_named() -> None:
    assert (
        "1 of 2 did not arrive at barrier()"
        in run_processes(2, survive_a_stopped_rank, timeout=1.0)[0]
    )


def interrupt(comm: Communicator) -> float:
    comm.barrier()
    if comm.rank == 0:
        kill_self_soon(0.2, signal.SIGINT)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
        waited = time.monotonic() - started
        with pytest.raises(RuntimeError, match="a call was interrupted"):
            comm.barrier()
        return waited
    time.sleep(0.5)
    with pytest.raises(PeerError, match="rank 0 gave up"):
        comm.barrier()
    return 0.0


def test_control_c_ends_a_wait() -> None:
    assert 0.1 < run_processes(2, interrupt)[0] < 10


def use_in_a_forked_child(comm: Communicator) -> None:
    tensor = comm.empty(3).fill_(5)
    pid = os.fork()
    if pid == 0:
        status = 1
        for call in (comm.barrier, lambda: comm.empty(3), lambda: comm.all_reduce(tensor)):
            try:
                call()
            except RuntimeError as error:
                status = 0 if "cannot be used in a forked child" in str(error) else 2
        comm.close()
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert comm.all_reduce(tensor).tolist() == [5.0 * comm.world_size] * 3


def test_a_forked_child_cannot_use_it_nor_spoil_it() -> None:
    run_processes(2, use_in_a_forked_child)


# ---- threads ----------------------------------------------------------------------------------------


def use_from_threads(comm: Communicator) -> None:
    """Calls of several threads are ordered; they are equal, since the order may differ by rank."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                assert comm.all_reduce(torch.ones(20_000)).eq(comm.world_size).all()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_several_threads_share_a_communicator() -> None:
    run_processes(2, use_from_threads)


def test_waiting_for_another_threads_call_is_bounded() -> None:
    comm, _absent = Communicator.threads(2, timeout=0.5)
    errors: list[str] = []

    def work() -> None:
        with pytest.raises((TimeoutError, RuntimeError)) as caught:
            comm.barrier()  # Rank 1 never comes.
        errors.append(str(caught.value))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(errors) == 3


def test_collective_barrier() -> None:
    barrier = CollectiveBarrier(3, timeout=5.0)
    assert barrier.world_size == 3
    assert [barrier.communicator(rank).rank for rank in range(3)] == [0, 1, 2]
    assert barrier.communicator(0).timeout == 5.0
    for rank in (-1, 3):
        with pytest.raises(ValueError, match=rf"rank must be in 0..2, got {rank}"):
            barrier.communicator(rank)
    arrived: list[int] = []
    threads = []
    for rank in range(3):

        def meet(rank: int = rank) -> None:
            arrived.append(rank)
            barrier.wait(rank)
            assert len(arrived) == 3

        threads.append(threading.Thread(target=meet))
        threads[-1].start()
    for thread in threads:
        thread.join(5)
    assert sorted(arrived) == [0, 1, 2]


# ---- symmetric tensors ---------------------------------------------------------------------------------


def test_empty() -> None:
    comm = Communicator.threads(1)[0]
    assert comm.empty(2, 3).shape == (2, 3)
    assert comm.empty((2, 3), dtype=torch.int16).dtype == torch.int16
    assert comm.empty([4]).shape == (4,)
    assert comm.empty(()).shape == ()
    assert comm.empty().shape == ()
    assert comm.empty(2, 0).shape == (2, 0)
    assert comm.empty(5).is_contiguous() and comm.empty(5).data_ptr() % 64 == 0
    with pytest.raises(ValueError, match=r"negative, got \(2, -1\)"):
        comm.empty(2, -1)
    with pytest.raises(RuntimeError, match="no room for .* bytes of symmetric memory"):
        comm.empty(1 << 40)


def hold_results(comm: Communicator) -> None:
    """A tensor that is held is never given to another, on any rank, whatever else goes on."""
    generator = random.Random(comm.rank)
    held = []
    for step in range(300):
        size = generator.choice([1, 100, 5000, 100_000])
        own = comm.empty(size).fill_(step)  # Of this rank alone.
        result = comm.all_reduce(comm.empty(1000).fill_(step))
        held.append((step, own, result[generator.randrange(1000) :]))
        if len(held) > 20:
            held.pop(generator.randrange(len(held)))
        if step % 50 == 0:
            for then, tensor, view in held:
                assert tensor.eq(then).all()
                assert view.eq(then * comm.world_size).all()


def test_tensors_that_are_held_keep_their_contents() -> None:
    run_processes(2, hold_results)
    run_threads(3, hold_results)


def work_in_a_loop(comm: Communicator) -> list[int]:
    """Bytes of shared memory in use after more and more steps, and when large ones are gone."""
    used = []
    for _ in range(4):
        for step in range(150):
            x = comm.empty(200_000 + 1000 * (step % 10))
            y = comm.all_reduce(x.fill_(1))
            x = comm.empty(50_000 * (1 + step % 3))
            del y
        used.append(resident_bytes())
    x = comm.empty(20_000_000).fill_(1)
    used.append(resident_bytes())
    del x
    for _ in range(200):
        comm.empty(1000)
    used.append(resident_bytes())
    comm.barrier()
    return used


def test_memory_does_not_grow_and_large_blocks_are_returned() -> None:
    for used in run_processes(2, work_in_a_loop):
        *steady, large, after = used
        assert steady[-1] == steady[1]
        assert large > 80_000_000
        assert after < large - 60_000_000
