"""Different calls: one rank of three makes another call, or two calls in another order."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from bench.soak.calls import ALGORITHMS, Call
from bench.soak.workers import on_processes, on_threads, pool
from pipekernels import Communicator

RANKS = 3
BATCH = 50
CHANGES = ("shape", "dtype", "op", "order of sums", "algorithm", "src", "operation", "order")
DOMAINS: dict[str, tuple[Any, ...]] = {
    "operation": ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"),
    "shape": tuple((RANKS * count,) for count in (0, 1, 10, 11, 1000, 100_000, 300_001)),
    "dtype": (torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.int64),
    "op": ("sum", "max", "min"),
    "order": ("rank", "tree"),
    "algorithm": ALGORITHMS,
    "src": tuple(range(RANKS)),
}
# The fields in which calls of an operation differ, by name of the change.
FIELDS = {
    "all_reduce": ("shape", "dtype", "op", "order of sums", "algorithm"),
    "reduce_scatter": ("shape", "dtype", "op", "order of sums"),
    "all_gather": ("shape", "dtype"),
    "broadcast": ("shape", "dtype", "src"),
    "barrier": (),
}


def draw(generator: random.Random) -> tuple[list[list[Call]], str]:
    """The calls of each rank, which differ between ranks, and the name of the change."""
    fields = {name: generator.choice(domain) for name, domain in DOMAINS.items()}
    call = Call(**fields, kinds=("ordinary",), special=False, seed=0)
    change = generator.choice(sorted([*FIELDS[call.operation], "operation", "order"]))
    field = {"order of sums": "order", "order": "operation"}.get(change, change)
    if field == "order":
        call = replace(call, op="sum")  # An order is that of sums.
    others = [value for value in DOMAINS[field] if value != getattr(call, field)]
    other = replace(call, **{field: generator.choice(others)})
    calls = [[call, other] if change == "order" else [call] for _ in range(RANKS)]
    odd = generator.randrange(RANKS)
    calls[odd] = [other, call] if change == "order" else [other]
    return calls, change


def differ(comm: Communicator, seed: int, first: int, count: int) -> dict[str, int]:
    """The number of reported mismatches on this rank, by kind of change.

    Raises:
        AssertionError: a mismatch was not reported.
    """
    reported = dict.fromkeys(CHANGES, 0)
    for case in range(first, first + count):
        calls, change = draw(random.Random(f"{seed} {case}"))
        for call in calls[comm.rank]:
            try:
                call.run(comm, torch.ones(call.shape, dtype=call.dtype))
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


def run(seed: int, cases: int) -> dict[str, Any]:
    """A row for all cases.

    Raises:
        AssertionError: a mismatch was not reported on all ranks; the message names it.
    """
    total = 0
    with tempfile.TemporaryDirectory() as folder, pool(RANKS) as workers:
        for first in tqdm(range(0, cases, BATCH), desc="mismatches", unit="batch", mininterval=1):
            work = (differ, seed, first, min(BATCH, cases - first))
            if first // BATCH % 2 == 0:
                found = on_processes(workers, f"{folder}/{first}", *work)
            else:
                found = on_threads(workers[0], RANKS, *work)
            if any(each != found[0] for each in found):
                raise AssertionError(f"the ranks count different mismatches: {found}")
            total += sum(found[0].values())
    return {
        "trial": "different calls on 3 ranks",
        "runs": cases,
        "collectives": total,
        "outcome": "reported on all ranks, which go on",
    }
