"""Ranks that call different collectives, or are late, killed, stopped or interrupted."""

import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import TIMEOUT
from support.programs import python
from support.ranks import on, on_ranks, run_processes, run_threads
from support.sweeps.collectives import differ
from support.sweeps.soak import lose_a_rank, signal_self_soon, stop_a_rank

from pipekernels import Communicator, PeerError


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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("device", "seed"),
    [*(("cpu", seed) for seed in range(4)), pytest.param("cuda", 4, marks=pytest.mark.cuda)],
    indirect=["device"],
)
def test_a_killed_rank_is_named_at_once_by_all_others(device: torch.device, seed: int) -> None:
    run_processes(3, lose_a_rank, device, seed, killed=(seed % 3,))


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_was_stopped_overwrites_nothing() -> None:
    run_processes(3, stop_a_rank, 1, timeout=1.0)


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
        signal_self_soon(0.2, signal.SIGINT)
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
