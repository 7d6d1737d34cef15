"""Ranks that call different collectives, or are late, killed, stopped or interrupted."""

import functools
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import TIMEOUT
from support.programs import python
from support.ranks import leakable_resources, on, on_ranks, run_processes, run_threads
from support.sweeps.collectives import differ

from pipekernels import Communicator, PeerError


def kill_self_soon(seconds: float, signal_number: int = signal.SIGKILL) -> None:
    """Send this process a signal from another thread, at any point of what it does."""

    def fire() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal_number)

    threading.Thread(target=fire, daemon=True).start()


def call_differently(comm: Communicator, device: torch.device) -> None:
    assert differ(comm, 1, range(60), device) >= 60
    if device.type == "cuda":
        x = torch.ones(10, device=device)
        with pytest.raises(ValueError, match="different collectives: .*not all of them on CUDA"):
            comm.all_reduce(x if comm.rank == 1 else x.cpu())


@pytest.mark.processes
def test_different_calls_raise_on_all_ranks_and_the_communicator_stays_usable(
    device: torch.device,
) -> None:
    run_threads(3, on(device, call_differently, device))
    if device.type == "cpu":  # On a GPU, processes detect it too late: their communicator fails.
        run_processes(3, on(device, call_differently, device))


def lose_a_rank(comm: Communicator, device: torch.device, folder: Path, seed: int) -> None:
    """Rank ``seed % world_size`` is killed in a collective; the others make a new communicator."""
    ones, on_cpu = functools.partial(torch.ones, device=device), device.type == "cpu"
    generator = random.Random(seed)
    victim = seed % comm.world_size
    delay = generator.uniform(0, 0.05)
    comm.close()
    before = leakable_resources()
    comm = Communicator.from_process_group()
    x, symmetric = ones(1_000_000), comm.empty(300_000, device=device).fill_(1)
    comm.barrier()
    if comm.rank == victim:
        (folder / "killed").write_text(str(time.monotonic() + delay))
        kill_self_soon(delay)
    with pytest.raises(PeerError, match=f"rank {victim} has died") as caught:
        while True:
            comm.all_reduce(x.fill_(1))
            comm.synchronize()
            assert x[-1] == comm.world_size
            for algorithm in ("one_shot", "two_shot", "ring"):
                comm.all_reduce(symmetric.fill_(1), algorithm=algorithm)
                comm.synchronize()
                assert symmetric.eq(comm.world_size).all()  # Never a partial sum.
            comm.reduce_scatter(ones(3 * 5000))
            comm.all_gather(x)
            comm.broadcast(x)
            comm.barrier()
    killed = float((folder / "killed").read_text())
    assert time.monotonic() - killed < TIMEOUT / 2  # Well before the timeout.
    assert caught.value.rank == victim
    del caught  # Its traceback holds the tensors.
    with pytest.raises(PeerError, match="cannot be used after a failure.*make a new one"):
        comm.barrier()
    comm.close()
    del symmetric
    assert not on_cpu or leakable_resources() == before  # CUDA opens files itself.

    # The remaining ranks form a new group.
    rank = comm.rank - (comm.rank > victim)
    dist.destroy_process_group()
    store, left = f"file://{folder}/store", comm.world_size - 1
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=left)
    with Communicator.from_process_group() as survivors:
        assert survivors.all_reduce(ones(1)).item() == left


@pytest.mark.processes
@pytest.mark.parametrize(
    ("device", "seed"),
    [*(("cpu", seed) for seed in range(4)), pytest.param("cuda", 4, marks=pytest.mark.cuda)],
    indirect=["device"],
)
def test_a_killed_rank_is_named_at_once_by_all_others(
    device: torch.device, seed: int, tmp_path: Path
) -> None:
    run_processes(3, lose_a_rank, device, tmp_path, seed, killed=(seed % 3,))


@pytest.mark.processes
@pytest.mark.slow
def test_a_thread_that_calls_for_all_ranks_is_told_so() -> None:
    program = """if True:
        from concurrent.futures import ThreadPoolExecutor
        import torch
        from pipekernels import Communicator
        ranks, x = Communicator.threads(2, timeout=1), torch.ones(2)
        for call in (ranks[0].barrier, lambda: ranks[1].all_reduce(x)):
            try:
                call()
            except RuntimeError as error:
                print(error)
        with ThreadPoolExecutor(2) as pool:  # Nobody has waited, so the ranks are still usable.
            print(list(pool.map(lambda rank: rank.all_gather(x).sum().item(), ranks)))
        try:
            ranks[1].barrier()
        except TimeoutError as error:
            print(error)
    """
    told = "each rank of Communicator.threads() calls from a thread of its own"
    first, second, sums, late = python("-c", program).stdout.splitlines()
    for rank, line in enumerate([first, second]):
        assert told in line and f"this is rank {rank}, called by thread MainThread, the on" in line
    assert sums == "[4.0, 4.0]"
    assert "rank(s) 0 of 2 did not arrive" in late and f"; {told}" in late


@pytest.mark.slow
@on_ranks(3, run_threads, run_processes, timeout=1.0)
def test_a_late_rank_is_named(comm: Communicator, tmp_path: Path) -> None:
    comm.barrier()
    if comm.rank == 2:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        with pytest.raises(TimeoutError, match="rank 2 did not arrive in time"):
            comm.barrier()
        return
    expected = (
        r"rank\(s\) 2 of 3 did not arrive at all_reduce\(5 x float32, sum, auto\), "
        r"collective number 2 .* within 1 s|rank 2 did not arrive in time, as rank"
    )
    with pytest.raises(TimeoutError, match=expected):
        comm.all_reduce(torch.ones(5))
    (tmp_path / f"{comm.rank} gave up").touch()
    with pytest.raises(
        RuntimeError, match=r"cannot be used after a failure \(.*rank.*2.*\); make a new"
    ) as later:
        comm.all_reduce(torch.ones(5))
    assert not isinstance(later.value, PeerError)  # No rank has died or left.


@on_ranks(2)
def test_control_c_ends_a_wait(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 0:
        kill_self_soon(0.2, signal.SIGINT)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
        assert 0.1 < time.monotonic() - started < TIMEOUT / 2
        with pytest.raises(RuntimeError, match="a call was interrupted"):
            comm.barrier()
        dist.barrier()
        return
    dist.barrier()  # Until rank 0 has given up.
    with pytest.raises(PeerError, match="rank 0 gave up"):
        comm.barrier()
