"""Different calls: one rank of three makes another call, or two calls in another order."""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from bench.soak.calls import ALGORITHMS
from bench.soak.workers import Pool, joined, run_on_all, run_threads
from pipekernels import Communicator

RANKS = 3
TIMEOUT = 120.0  # Seconds.
BATCH = 50
CHANGES = ("shape", "dtype", "op", "algorithm", "src", "operation", "order")


@dataclass(frozen=True)
class Plan:
    """Everything in which two calls can differ."""

    operation: str
    count: int
    dtype: torch.dtype
    op: str
    algorithm: str
    src: int

    def run(self, comm: Communicator) -> object:
        """Make the call."""
        x = torch.ones(self.count * RANKS, dtype=self.dtype)
        op, order = ("sum", "tree") if self.op == "tree sum" else (self.op, "rank")
        if self.operation == "all_reduce":
            return comm.all_reduce(x, op, algorithm=self.algorithm, order=order)
        if self.operation == "reduce_scatter":
            return comm.reduce_scatter(x, op, order=order)
        if self.operation == "all_gather":
            return comm.all_gather(x)
        if self.operation == "broadcast":
            return comm.broadcast(x, self.src)
        return comm.barrier()


DOMAINS: dict[str, tuple[Any, ...]] = {
    "operation": ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"),
    "count": (0, 1, 10, 11, 1000, 100_000, 300_001),
    "dtype": (torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.int64),
    "op": ("sum", "tree sum", "max", "min"),
    "algorithm": ALGORITHMS,
    "src": tuple(range(RANKS)),
}
# The fields of each operation, by name of the change.
FIELDS = {
    "all_reduce": {"shape": "count", "dtype": "dtype", "op": "op", "algorithm": "algorithm"},
    "reduce_scatter": {"shape": "count", "dtype": "dtype", "op": "op"},
    "all_gather": {"shape": "count", "dtype": "dtype"},
    "broadcast": {"shape": "count", "dtype": "dtype", "src": "src"},
    "barrier": {},
}


def draw(generator: random.Random) -> tuple[list[list[Plan]], str]:
    """The calls of each rank, which differ between ranks, and the name of the change."""
    plan = Plan(**{name: generator.choice(domain) for name, domain in DOMAINS.items()})
    fields = FIELDS[plan.operation] | {"operation": "operation"}
    change = generator.choice(sorted([*fields, "order"]))
    field = fields.get(change, "operation")
    others = [value for value in DOMAINS[field] if value != getattr(plan, field)]
    other = replace(plan, **{field: generator.choice(others)})
    calls = [[plan, other] if change == "order" else [plan] for _ in range(RANKS)]
    odd = generator.randrange(RANKS)
    calls[odd] = [other, plan] if change == "order" else [other]
    return calls, change


def differ(comm: Communicator, seed: int, first: int, count: int) -> dict[str, int]:
    """The number of reported mismatches on this rank, by kind of change.

    Raises:
        AssertionError: a mismatch was not reported.
    """
    reported = dict.fromkeys(CHANGES, 0)
    for case in range(first, first + count):
        calls, change = draw(random.Random(f"{seed} {case}"))
        for plan in calls[comm.rank]:
            try:
                plan.run(comm)
            except ValueError as error:
                message = str(error)
                told = all(f"rank {rank} {calls[rank][0].operation}" in message or change == "order"
                           for rank in range(RANKS))  # fmt: skip
                if "the ranks call different collectives" not in message or not told:
                    raise AssertionError(f"case {case}: {error}") from error
                reported[change] += 1
            else:
                raise AssertionError(
                    f"case {case}: rank {comm.rank} did not notice a different {change}: {calls}"
                )
        if comm.all_reduce(torch.ones(5)).tolist() != [RANKS] * 5:
            raise AssertionError(f"case {case}: a wrong sum after a mismatch")
    return reported


def on_processes(
    rank: int, world_size: int, store: str, seed: int, first: int, count: int
) -> dict[str, int]:
    """A group of processes."""
    with joined(rank, world_size, store, TIMEOUT) as comm:
        return differ(comm, seed, first, count)


def on_threads(_rank: int, _world_size: int, seed: int, first: int, count: int) -> list[Any]:
    """Threads of one process."""
    return run_threads(RANKS, lambda comm: differ(comm, seed, first, count), TIMEOUT)


def run(seed: int, cases: int) -> list[dict[str, Any]]:
    """A row for all cases.

    Raises:
        AssertionError: a mismatch was not reported on all ranks; the message names it.
    """
    begin = time.perf_counter()
    total = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(RANKS) as pool,
        tqdm(total=cases, desc="mismatches", unit="case", mininterval=1) as bar,
    ):
        for first in range(0, cases, BATCH):
            count = min(BATCH, cases - first)
            workers = pool.take(RANKS)
            if first // BATCH % 2 == 0:
                found = run_on_all(workers, on_processes, f"{folder}/{first}", seed, first, count)
            else:
                (found,) = run_on_all(workers[:1], on_threads, seed, first, count)
            if any(each != found[0] for each in found):
                raise AssertionError(f"the ranks count different mismatches: {found}")
            total += sum(found[0].values())
            bar.update(count)
    return [
        {
            "trial": "different calls on 3 ranks",
            "runs": cases,
            "collectives": total,
            "outcome": "reported on all ranks, which go on",
            "seconds": time.perf_counter() - begin,
        }
    ]
