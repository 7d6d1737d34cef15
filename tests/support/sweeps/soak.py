"""Random collectives of ranks that agree, differ, are killed, or are stopped: ``make soak``.

Ten thousand sums, a thousand different calls, a thousand kills and some stops; prints a table, and
saves it as a result file if nothing was left out.
"""

import argparse
import functools
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels import Communicator, PeerError
from support import TIMEOUT
from support.ranks import leakable_resources, run_processes
from support.sweeps.collectives import ALGORITHMS, CPU, mismatches, row, sums

FEW = (2, 3, 4)  # Ranks.
SPREAD = 0.02  # Seconds in which a rank is lost.
SOON = 1.0  # Seconds within which survivors must hear of a death.
Loss = tuple[float, int]  # Seconds from the signal to the error, and collectives until then.


def signal_self_soon(seconds: float, number: int) -> None:
    """Send this process a signal from another thread, at any point of what it does."""

    def fire() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    threading.Thread(target=fire, daemon=True).start()


def lose_itself(store: dist.Store, seed: int, number: int) -> None:
    delay = random.Random(seed).uniform(0, SPREAD)
    store.set("lost", str(time.monotonic() + delay))
    signal_self_soon(delay, number)


def lose_a_rank(comm: Communicator, device: torch.device, seed: int) -> Loss:
    """Rank ``seed % world_size`` is killed in a collective; the others make a new communicator."""
    ones, on_cpu = functools.partial(torch.ones, device=device), device.type == "cpu"
    victim, count = seed % comm.world_size, 0
    store = dist.distributed_c10d._get_default_store()
    comm.close()
    before = leakable_resources()
    comm = Communicator.from_process_group()
    x, symmetric = ones(100_000), comm.empty(30_000, device=device)
    sums = [functools.partial(comm.all_reduce, algorithm=algorithm) for algorithm in ALGORITHMS]
    calls: list[Any] = [*((one, memory) for memory in (x, symmetric) for one in sums)]
    calls += [(comm.reduce_scatter, x[:30_000]), (comm.all_gather, x), (comm.broadcast, x)]

    def check(call: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
        result = call(tensor.fill_(1))
        comm.synchronize()
        added = 1 if call in (comm.all_gather, comm.broadcast) else comm.world_size
        assert result.eq(added).all()  # Never a partial sum.

    comm.barrier()
    if comm.rank == victim:
        lose_itself(store, seed, signal.SIGKILL)
    with pytest.raises(PeerError, match=f"rank {victim} has died") as caught:
        for call, tensor in itertools.cycle(calls):
            check(call, tensor)
            count += 1
    seconds = time.monotonic() - float(store.get("lost"))
    assert seconds < TIMEOUT / 2  # Well before the timeout.
    assert caught.value.rank == victim
    del caught  # Its traceback holds the tensors.
    with pytest.raises(PeerError, match="cannot be used after a failure.*make a new one"):
        comm.barrier()
    comm.close()
    del symmetric, calls, tensor
    assert not on_cpu or leakable_resources() == before  # CUDA opens files itself.

    # The remaining ranks form a new group.
    rank, left = comm.rank - (comm.rank > victim), comm.world_size - 1
    dist.destroy_process_group()
    store = dist.PrefixStore("left", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=left)
    with Communicator.from_process_group() as survivors:
        assert survivors.all_reduce(ones(1)).item() == left
    return seconds, count


def stop_a_rank(comm: Communicator, seed: int) -> Loss:
    """Rank ``seed % world_size`` stops in a collective for longer than the communicator's timeout,
    and then overwrites nothing that the others have filled again, as a program may do."""
    victim, count = seed % comm.world_size, 0
    store = dist.distributed_c10d._get_default_store()
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    others = [rank for rank in range(comm.world_size) if rank != victim]
    x = comm.empty(30_000)
    comm.barrier()
    if comm.rank == victim:
        lose_itself(store, seed, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        for algorithm in itertools.cycle(ALGORITHMS):
            assert comm.all_reduce(x.fill_(1), algorithm=algorithm).eq(comm.world_size).all()
            count += 1
    seconds = time.monotonic() - float(store.get("lost"))
    if comm.rank == victim:
        store.set("it goes on", "")
    else:
        x.fill_(7)
        store.set(f"{comm.rank} has filled", "")
        if comm.rank == others[0]:
            store.wait([f"{rank} has filled" for rank in others])
            os.kill(pids[victim], signal.SIGCONT)
        store.wait(["it goes on"])
        assert x.eq(7).all(), f"a rank that came late has overwritten a tensor of rank {comm.rank}"
    with pytest.raises(RuntimeError, match="make a new one"):
        comm.barrier()
    return seconds, count


def losses(
    seed: int, count: int, lose: Callable[..., Loss], *args: Any, dies: bool, timeout: float
) -> tuple[list[float], int]:
    """Delays until survivors knew, and the number of their collectives, of so many losses."""
    delays: list[float] = []
    collectives = 0
    for number in range(count):
        generator = random.Random(f"{seed} {number}")
        own, ranks = generator.randrange(1 << 40), generator.choice(FEW)
        victim = own % ranks
        killed = (victim,) if dies else ()
        try:
            found = run_processes(ranks, lose, *args, own, timeout=timeout, killed=killed)
        except BaseException:
            print(f"{lose.__name__}, seed {own} on {ranks} ranks", file=sys.stderr)
            raise
        found.pop(victim)
        delays += [seconds for seconds, _ in found]
        collectives += sum(calls for _, calls in found)
    return delays, collectives


def kills(seed: int, count: int) -> dict[str, Any]:
    """A row for all kills."""
    delays, collectives = losses(seed, count, lose_a_rank, CPU, dies=True, timeout=TIMEOUT)
    late = sum(delay >= SOON for delay in delays)
    outcome = "named by all survivors, no wrong sum, nothing left behind"
    outcome += f"; {late} of {len(delays)} reports took {SOON} s or longer" * bool(late)
    return {**row("a rank of 2 to 4 is killed", count, collectives, outcome, delays), "late": late}


def stops(seed: int, count: int) -> dict[str, Any]:
    """A row for all ranks that are stopped for longer than the timeout."""
    delays, collectives = losses(seed, count, stop_a_rank, dies=False, timeout=1.0)
    outcome = "TimeoutError on all ranks, of which none is overwritten"
    return row("a rank of 2 to 4 is stopped, timeout 1 s", count, collectives, outcome, delays)


TRIALS: dict[str, tuple[int, Any]] = {
    "sums": (10_000, lambda seed, count: sums(seed, range(count))),
    "mismatches": (1_000, mismatches),
    "kills": (1_000, kills),
    "stops": (30, stops),
}


def main() -> int:
    """The exit status: 1 if a survivor noticed a death too late; other failures raise."""
    from bench import records
    from bench.report.soak import table

    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (%(default)s)")
    for name, (full, _) in TRIALS.items():
        parser.add_argument(f"--{name}", type=int, default=full, metavar="N", help="(%(default)s)")
    args = parser.parse_args()
    rows = []
    for name, (_, run) in TRIALS.items():
        begin = time.monotonic()
        if (count := getattr(args, name)) > 0:
            rows.append({**run(args.seed, count), "seconds": time.monotonic() - begin})
    print(table(rows), flush=True)
    if all(getattr(args, name) >= full for name, (full, _) in TRIALS.items()):
        conditions = {
            "ranks": "processes and threads, of one intra-op thread each",
            "times": "from the signal to the error on a survivor",
            "seed": args.seed,
        }
        print(f"\n{records.save('soak', rows, conditions)}")
    return int(any(found.get("late") for found in rows))


if __name__ == "__main__":
    sys.exit(main())
