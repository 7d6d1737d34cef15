"""Random collectives of ranks that agree, differ, are killed, or are stopped: ``make soak``.

Ten thousand sums, a thousand different calls, a thousand kills and some stops; prints a table, and
saves it as a result file if nothing was left out.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipekernels import Communicator, PeerError
from support.ranks import context_of, leakable_resources
from support.sweeps.collectives import ALGORITHMS, Call, check, mismatches, row, sums

FEW = (2, 3, 4)  # Ranks.
CALLS = 8  # Prepared ones, which are made over and over.
SPREAD = 0.02  # Seconds in which a rank is lost.
SOON = 1.0  # Seconds within which survivors must hear of a death.


def survive(end: Connection, store: str, rank: int, ranks: int, timeout: float, seed: int) -> None:
    """A rank: makes random calls until one raises, tells of it, and leaves nothing behind."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    before = own_resources()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    with Communicator.from_process_group(timeout=timeout) as comm:
        calls, own = [Call.draw(seed * CALLS + i, ranks, 50_000) for i in range(CALLS)], seed + rank
        calls = [replace(c, algorithm=random.Random(c.seed).choice(ALGORITHMS)) for c in calls]
        wanted = [call.expected(rank, ranks) for call in calls]
        tensors = [call.tensor(comm, random.Random(own)) for call in calls]
        inputs = [tensor.clone() for tensor in tensors]
        for i in range(CALLS):  # The first calls take longer.
            calls[i].run(comm, tensors[i])
        end.send("ready")
        end.recv()
        count = 0
        try:
            while True:
                i = count % CALLS
                tensors[i].copy_(inputs[i])
                check(calls[i].run(comm, tensors[i]), wanted[i], calls[i].special)
                count += 1
        except (PeerError, TimeoutError) as error:
            lost = getattr(error, "rank", None)
            end.send((type(error).__name__, lost, str(error), time.monotonic(), count))
        refill = end.recv()
        if refill:  # As a program may do after the error.
            tensors[i].fill_(7)
            end.send("refilled")
            end.recv()
            late = f"a rank that came late has overwritten a tensor of rank {rank}"
            assert tensors[i].eq(7).all(), late
        with pytest.raises(RuntimeError, match="make a new one"):
            comm.barrier()
        del tensors
    dist.destroy_process_group()
    del comm
    assert own_resources() == before, f"{before}, then {own_resources()}"
    end.send("left")
    os._exit(0)


def own_resources() -> list[str]:
    """What this process could leak, without what other programs have in /dev/shm."""
    return [each for each in leakable_resources() if not each.startswith("/dev/shm")]


class Trial:
    """Ranks of which one gets a signal at a random moment; killed at the end."""

    def __init__(self, store: Path, seed: str, timeout: float, number: int) -> None:
        generator = random.Random(seed)
        own, ranks = generator.randrange(1 << 40), generator.choice(FEW)
        self.victim = generator.randrange(ranks)
        context = context_of("forkserver")
        pairs = [context.Pipe() for _ in range(ranks)]
        self.processes = [
            context.Process(
                target=survive, args=(other, str(store), rank, ranks, timeout, own), daemon=True
            )
            for rank, (_, other) in enumerate(pairs)
        ]
        for process, (_, other) in zip(self.processes, pairs, strict=True):
            process.start()
            other.close()
        self.ends = [end for end, _ in pairs]
        self.told("ready")
        self.tell(False)
        time.sleep(generator.uniform(0, SPREAD))
        self.signalled = time.monotonic()
        os.kill(self.processes[self.victim].pid or 0, number)
        self.others = [end for rank, end in enumerate(self.ends) if rank != self.victim]

    def tell(self, what: bool, ends: Sequence[Connection] = ()) -> None:
        for end in ends or self.ends:
            end.send(what)

    def told(self, what: str | None = None, ends: Sequence[Connection] = ()) -> list[Any]:
        """What these ranks send; a rank that fails prints why and closes its end."""
        answers = []
        for end in ends or self.ends:
            assert end.poll(300.0), "a rank did not answer"
            answers.append(end.recv())
        assert what is None or set(answers) == {what}, answers
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def kills(seed: int, count: int) -> dict[str, Any]:
    """A row for all kills.

    Raises:
        AssertionError: a check failed; the message has the number of the kill.
    """
    delays: list[float] = []
    collectives = 0
    names = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            trial = Trial(Path(folder, str(number)), f"{seed} {number}", 120.0, signal.SIGKILL)
            for error, lost, message, moment, calls in trial.told(ends=trial.others):
                named = (error, lost) == ("PeerError", trial.victim)
                assert named, f"kill {number}: rank {trial.victim} was killed: {error}, {message}"
                delays.append(moment - trial.signalled)
                collectives += calls
            trial.tell(False, trial.others)
            trial.told("left", trial.others)
            trial.end()
    deadline = time.monotonic() + 20  # For other programs to remove theirs.
    while (left := set(os.listdir("/dev/shm")) - names) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"left in /dev/shm, if not by another program: {sorted(left)}"
    late = sum(delay >= SOON for delay in delays)
    outcome = "named by all survivors, no wrong sum, nothing left behind"
    outcome += f"; {late} of {len(delays)} reports took {SOON} s or longer" * bool(late)
    return {**row("a rank of 2 to 4 is killed", count, collectives, outcome, delays), "late": late}


def stops(seed: int, count: int) -> dict[str, Any]:
    """A row for all ranks that are stopped for longer than the timeout; raises as kills do."""
    delays: list[float] = []
    collectives = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            trial = Trial(Path(folder, str(number)), f"{seed} {number}", 1.0, signal.SIGSTOP)
            losses = trial.told(ends=trial.others)
            delays += [moment - trial.signalled for *_, moment, _ in losses]
            trial.tell(True, trial.others)
            trial.told("refilled", trial.others)
            os.kill(trial.processes[trial.victim].pid or 0, signal.SIGCONT)
            losses += trial.told(ends=[trial.ends[trial.victim]])
            for error, _, message, _, calls in losses:
                told = f"stop {number}: rank {trial.victim} was stopped: {error}, {message}"
                assert error == "TimeoutError", told
                collectives += calls
            trial.tell(False)  # It is not to refill, and they are to look.
            trial.told("left")
            trial.end()
    outcome = "TimeoutError on all ranks, which leave nothing behind"
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
