"""Random collectives on 2 to 8 ranks: results must equal the oracle's and each other's.

A case is one call with random contents. It is made by every algorithm, the first one twice, each
time with other kinds of memory; on ranks that are processes, and again on ranks that are threads.
"""

from __future__ import annotations

import random
import tempfile
import zlib
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from bench.soak.calls import ALGORITHMS, Call, WrongResult, bits, check
from bench.soak.workers import on_processes, on_threads, pool
from pipekernels import Communicator

WORLD_SIZES = range(2, 9)
ELEMENTS = 300_000
BATCH = 50  # Cases that share a communicator.


def agree(comm: Communicator, seed: int, cases: list[int]) -> list[int]:
    """Make the calls of these cases in all ways; returns the checksums that all results have."""
    return [_agree(comm, seed, case) for case in cases]


def _agree(comm: Communicator, seed: int, case: int) -> int:
    call = Call.draw(seed * 1_000_000 + case, comm.world_size, ELEMENTS)
    expected = call.expected(comm.rank, comm.world_size)
    own = random.Random(f"{call.seed} {comm.rank}")
    checksums = set()
    for algorithm in ways(call):
        try:
            result = replace(call, algorithm=algorithm).run(comm, call.tensor(comm, own))
            check(result, expected, call.special)
            checksums.add(zlib.crc32(bits(result).numpy()))
            if len(checksums) > 1:
                raise WrongResult("the bits differ from those of another run or algorithm")
        except WrongResult as error:
            raise WrongResult(
                f"case {case}, {algorithm}, rank {comm.rank} of {comm.world_size}: {error}; {call}"
            ) from None
    return checksums.pop()


def ways(call: Call) -> tuple[str, ...]:
    """The algorithms by which a call is made."""
    return (*ALGORITHMS, "auto") if call.operation == "all_reduce" else ("auto", "auto")


def run(seed: int, cases: list[int]) -> dict[str, Any]:
    """A row for all of them.

    Raises:
        WrongResult: the first result that is not what it should be; its message names the case.
    """
    collectives = 0
    sizes = {n: [case for case in cases if case % len(WORLD_SIZES) + 2 == n] for n in WORLD_SIZES}
    batches = [
        (n, own[first : first + BATCH])
        for n, own in sizes.items()
        for first in range(0, len(own), BATCH)
    ]
    with tempfile.TemporaryDirectory() as folder, pool(max(WORLD_SIZES)) as workers:
        for world_size, batch in tqdm(batches, desc="sums", unit="batch", mininterval=1):
            store = f"{folder}/{world_size}-{batch[0]}"
            by_processes = on_processes(workers[:world_size], store, agree, seed, batch)
            by_threads = on_threads(workers[0], world_size, agree, seed, batch)
            for position, case in enumerate(batch):
                call = Call.draw(seed * 1_000_000 + case, world_size, ELEMENTS)
                collectives += 2 * len(ways(call))
                found = [[sums[position] for sums in by] for by in (by_processes, by_threads)]
                same = found[0] == found[1]
                if call.operation != "reduce_scatter":
                    same = same and len(set(found[0])) == 1
                if not same:
                    raise WrongResult(f"case {case}: the bits differ between ranks; {call}")
    return {
        "trial": "one sum on 2 to 8 ranks",
        "runs": len(cases),
        "collectives": collectives,
        "outcome": "all bits equal, on all ranks, and to the oracle",
    }
