"""Lost ranks: at a random moment of random collectives, one of 2 to 4 processes is killed, or
stopped for longer than the timeout."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from bench.soak.calls import ALGORITHMS, Call, check
from bench.soak.workers import (
    TIMEOUT,
    Worker,
    joined,
    no_names_left,
    now,
    pool,
    run_on_all,
    traces,
)
from pipekernels import Communicator, PeerError

WORLD_SIZES = (2, 3, 4)
ELEMENTS = 50_000
CALLS = 8  # Prepared ones, which are made over and over.
SPREAD = 0.02  # Seconds in which a rank is lost.
SPARE = max(WORLD_SIZES) + 1  # Workers, as one may be killed.
STOPPED_TIMEOUT = 1.0
SOON = 1.0  # Seconds within which survivors must hear of a death.


class Loss(NamedTuple):
    """The error that a survivor got."""

    error: str  # The name of its class.
    rank: int | None  # Its attribute ``rank``, if any.
    message: str
    time: float  # By now().
    calls: int  # Number of correct calls before.


class Member:
    """The state of a worker between tasks."""

    stack: contextlib.ExitStack
    before: dict[str, int]
    comm: Communicator
    calls: list[tuple[Call, Tensor]]
    held: Tensor


_me = Member()


def join(rank: int, world_size: int, store: str, timeout: float, seed: int) -> None:
    """Form a group, test it, and prepare random calls."""
    _me.before = traces()
    _me.stack = contextlib.ExitStack()
    _me.comm = _me.stack.enter_context(joined(rank, world_size, store, timeout))
    _me.calls = []
    for i in range(CALLS):
        call = Call.draw(seed * CALLS + i, world_size, ELEMENTS)
        call = replace(call, algorithm=random.Random(call.seed).choice(ALGORITHMS))
        _me.calls.append((call, call.expected(rank, world_size)))
    total = _me.comm.all_reduce(torch.ones(1000))
    if total.ne(world_size).any():
        raise AssertionError(f"a new group has a wrong sum: {total}")


def work(rank: int, _world_size: int, seed: int) -> Loss:
    """Make calls until one raises."""
    own = random.Random(f"{seed} {rank}")
    tensors = [call.tensor(_me.comm, own) for call, _ in _me.calls]
    inputs = [tensor.clone() for tensor in tensors]
    count = 0
    while True:
        i = count % CALLS
        call, expected = _me.calls[i]
        tensors[i].copy_(inputs[i])
        try:
            result = call.run(_me.comm, tensors[i])
        except (PeerError, TimeoutError) as error:
            raised = now()
            _me.held = tensors[i]
            return Loss(
                type(error).__name__, getattr(error, "rank", None), str(error), raised, count
            )
        check(result, expected, call.special)
        count += 1


def refill(_rank: int, _world_size: int) -> None:
    """Overwrite the tensor of the failed call, as a program may do after the error."""
    _me.held.fill_(7)


def leave(rank: int, _world_size: int, refilled: bool) -> None:
    """Leave the group, and check that no resources remain."""
    if refilled and _me.held.ne(7).any():
        raise AssertionError(f"a rank that came late has overwritten a tensor of rank {rank}")
    for attribute in ("held", "calls"):
        if hasattr(_me, attribute):
            delattr(_me, attribute)
    try:
        _me.comm.barrier()
    except RuntimeError as error:
        if "make a new one" not in str(error):
            raise
    else:
        raise AssertionError(f"rank {rank} can go on with a communicator that has failed")
    del _me.comm
    _me.stack.close()
    if (after := traces()) != _me.before:
        raise AssertionError(f"rank {rank} leaves something behind: {_me.before}, then {after}")


class Trial:
    """One lost rank: which one, and when."""

    def __init__(self, seed: int, number: int) -> None:
        generator = random.Random(f"{seed} {number}")
        self.seed = generator.randrange(1 << 40)
        self.world_size = generator.choice(WORLD_SIZES)
        self.victim = generator.randrange(self.world_size)
        self.delay = generator.uniform(0, SPREAD)

    def lose(self, workers: list[Worker], store: str, timeout: float, number: int) -> float:
        """Let the ranks work and send the victim a signal; returns the time of the signal."""
        run_on_all(workers, join, store, timeout, self.seed)
        for rank, worker in enumerate(workers):
            worker.start(work, rank, self.world_size, self.seed)
        time.sleep(self.delay)
        moment = now()
        os.kill(workers[self.victim].pid, number)
        return moment


def kill(seed: int, kills: int) -> dict[str, Any]:
    """A row for all kills.

    Raises:
        AssertionError: a check failed; the message has the number of the kill.
        WrongResult: a collective returned a wrong sum.
    """
    delays: list[float] = []
    collectives = 0
    with tempfile.TemporaryDirectory() as folder, no_names_left(), pool(SPARE) as workers:
        for number in tqdm(range(kills), desc="kills", unit="kill", mininterval=1):
            trial = Trial(seed, number)
            ranks = workers[: trial.world_size]
            killed = trial.lose(ranks, f"{folder}/{number}", TIMEOUT, signal.SIGKILL)
            victim = ranks.pop(trial.victim)
            for loss in [worker.result() for worker in ranks]:
                if loss.error != "PeerError" or loss.rank != trial.victim:
                    raise AssertionError(f"kill {number}: rank {trial.victim} was killed: {loss}")
                delays.append(loss.time - killed)
                collectives += loss.calls
            run_on_all(ranks, leave, False)
            victim.end()
            workers.remove(victim)
            workers.append(Worker())
    late = sum(delay >= SOON for delay in delays)
    return {
        "trial": "a rank of 2 to 4 is killed",
        "runs": kills,
        "collectives": collectives,
        "outcome": "named by all survivors, no wrong sum, nothing left behind"
        + (f"; {late} of {len(delays)} reports took {SOON} s or longer" if late else ""),
        **_times(delays),
        "late": late,
    }


def stop(seed: int, stops: int) -> dict[str, Any]:
    """A row for all stops; raises as :func:`kill` does."""
    delays: list[float] = []
    collectives = 0
    with tempfile.TemporaryDirectory() as folder, no_names_left(), pool(SPARE) as workers:
        for number in tqdm(range(stops), desc="stops", unit="stop", mininterval=1):
            trial = Trial(seed, number)
            ranks = workers[: trial.world_size]
            store = f"{folder}/{number}"
            stopped = trial.lose(ranks, store, STOPPED_TIMEOUT, signal.SIGSTOP)
            victim = ranks.pop(trial.victim)
            losses = [worker.result() for worker in ranks]
            run_on_all(ranks, refill)
            os.kill(victim.pid, signal.SIGCONT)
            losses.append(victim.result())
            for loss in losses:
                if loss.error != "TimeoutError":
                    raise AssertionError(f"stop {number}: rank {trial.victim} was stopped: {loss}")
                collectives += loss.calls
            delays += [loss.time - stopped for loss in losses[:-1]]
            run_on_all(ranks, leave, True)
            run_on_all([victim], leave, False)
    return {
        "trial": f"a rank of 2 to 4 is stopped, timeout {STOPPED_TIMEOUT:g} s",
        "runs": stops,
        "collectives": collectives,
        "outcome": "TimeoutError on all ranks, which then form a new group",
        **_times(delays),
    }


def _times(delays: list[float]) -> dict[str, float]:
    if len(delays) < 2:
        return {}
    return {
        "p50": statistics.median(delays),
        "p99": statistics.quantiles(delays, n=100, method="inclusive")[-1],
        "max": max(delays),
    }
