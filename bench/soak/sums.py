"""Random collectives on 2 to 8 ranks: results must equal the oracle's and each other's.

A case is one call with random contents. It is made by every algorithm, the first one twice, each
time with other kinds of memory; on ranks that are processes, and again on ranks that are threads.
"""

from __future__ import annotations

import random
import tempfile
import time
import zlib
from typing import Any

from tqdm import tqdm

from bench.soak.calls import ALGORITHMS, Call, WrongResult, bits, check
from bench.soak.workers import Pool, joined, run_on_all, run_threads
from pipekernels import Communicator

WORLD_SIZES = range(2, 9)
ELEMENTS = 300_000
BATCH = 50  # Cases that share a communicator.
TIMEOUT = 120.0  # Seconds.


def world_size_of(case: int) -> int:
    """How many ranks take part."""
    return WORLD_SIZES[case % len(WORLD_SIZES)]


def agree(comm: Communicator, seed: int, case: int) -> int:
    """Make the call of this case in all ways; returns the checksum that all results have."""
    call = Call.draw(seed * 1_000_000 + case, comm.world_size, ELEMENTS)
    expected = call.expected(comm.rank, comm.world_size)
    own = random.Random(f"{call.seed} {comm.rank}")
    algorithms = ALGORITHMS if call.operation == "all_reduce" else ("auto",)
    checksums = set()
    for algorithm in (*algorithms, algorithms[0]):
        try:
            result = call.run(comm, call.tensor(comm, own), algorithm)
            check(result, expected, call.special)
            checksums.add(zlib.crc32(bits(result).numpy()))
            if len(checksums) > 1:
                raise WrongResult("the bits differ from those of another run or algorithm")
        except WrongResult as error:
            raise WrongResult(
                f"case {case}, {algorithm}, rank {comm.rank} of {comm.world_size}: {error}; {call}"
            ) from None
    return checksums.pop()


def on_processes(rank: int, world_size: int, store: str, seed: int, cases: list[int]) -> list[int]:
    """The checksums of this rank."""
    with joined(rank, world_size, store, TIMEOUT) as comm:
        return [agree(comm, seed, case) for case in cases]


def on_threads(_rank: int, _world_size: int, seed: int, cases: list[int]) -> list[list[int]]:
    """The checksums of all ranks."""
    return run_threads(
        world_size_of(cases[0]), lambda comm: [agree(comm, seed, case) for case in cases], TIMEOUT
    )


def run(seed: int, cases: list[int]) -> list[dict[str, Any]]:
    """A row for all of them.

    Raises:
        WrongResult: the first result that is not what it should be; its message names the case.
    """
    collectives = 0
    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(max(WORLD_SIZES)) as pool,
        tqdm(total=len(cases), desc="sums", unit="case", mininterval=1) as bar,
    ):
        for world_size in WORLD_SIZES:
            own = [case for case in cases if world_size_of(case) == world_size]
            for first in range(0, len(own), BATCH):
                batch = own[first : first + BATCH]
                workers = pool.take(world_size)
                store = f"{folder}/{world_size}-{first}"
                by_processes = run_on_all(workers, on_processes, store, seed, batch)
                (by_threads,) = run_on_all(workers[:1], on_threads, seed, batch)
                for position, case in enumerate(batch):
                    call = Call.draw(seed * 1_000_000 + case, world_size, ELEMENTS)
                    ways = len(ALGORITHMS) if call.operation == "all_reduce" else 1
                    collectives += 2 * (ways + 1)
                    found = [[sums[position] for sums in by] for by in (by_processes, by_threads)]
                    same = found[0] == found[1]
                    if call.operation != "reduce_scatter":
                        same = same and len(set(found[0])) == 1
                    if not same:
                        raise WrongResult(f"case {case}: the bits differ between ranks; {call}")
                bar.update(len(batch))
    return [
        {
            "trial": "one sum on 2 to 8 ranks",
            "runs": len(cases),
            "collectives": collectives,
            "outcome": "all bits equal, on all ranks, and to the oracle",
            "seconds": time.perf_counter() - begin,
        }
    ]
