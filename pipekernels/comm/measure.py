"""Measures on this host, for several world sizes, from which size ``two_shot`` is faster than
``one_shot``.

The ranks are processes, started once. The first 2, 4, 8, ... of them make a communicator, while the
others sleep.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from pipekernels import _cache
from pipekernels.comm.all_reduce_limits import Limits
from pipekernels.comm.communicator import Communicator

SIZES: list[int] = [2**exponent for exponent in range(8, 19)]  # bytes
ALGORITHMS = ["one_shot", "two_shot"]
KINDS = ["ordinary", "symmetric"]
TIME_LIMIT = 120.0  # seconds for all of it

# Seconds by (algorithm, kind of tensor, size).
Times = dict[tuple[str, str, int], float]


def by_world_size(measure: Callable[[Communicator], Any], sizes: list[int]) -> dict[int, Any]:
    """What ``measure`` returns on the first ranks, as JSON, for each of ``sizes``.

    Raises:
        TimeoutError: it takes more than two minutes.
        Exception: a rank raised it.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        processes = torch.multiprocessing.start_processes(
            measure_on_rank, (measure, folder, sizes), nprocs=sizes[-1],
            join=False, daemon=True, start_method="forkserver",
        )  # fmt: skip
        deadline = time.monotonic() + TIME_LIMIT
        while not processes.join(timeout=1):
            if time.monotonic() > deadline:
                for process in processes.processes:
                    process.kill()
                raise TimeoutError(
                    f"measuring took more than {TIME_LIMIT:.0f} s; is the machine busy?"
                )
        measured = json.loads((Path(folder) / "measured").read_text())
    return {int(size): result for size, result in measured.items()}


def measure_on_rank(
    rank: int, measure: Callable[[Communicator], Any], folder: str, sizes: list[int]
) -> None:
    """The process of a rank: measures with the first ranks, of each size in turn."""
    measured = {}
    store = dist.FileStore(f"{folder}/store", sizes[-1])
    with Communicator.from_store(store, rank, sizes[-1], timeout=TIME_LIMIT) as everyone:
        for size in sizes:
            some = everyone.split(0 if rank < size else None)
            if some is not None:
                with some:
                    measured[size] = measure(some)
            everyone.barrier()
    if rank == 0:
        (Path(folder) / "measured").write_text(json.dumps(measured))


def median_of_slowest(communicator: Communicator, seconds: list[float]) -> float:
    """The median of the slowest rank's times, the same on all ranks."""
    slowest = communicator.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max")
    return float(statistics.median(slowest.tolist()))


def measure_limits(*, quick: bool = False) -> Limits:
    """Measure for a few seconds; ``quick``: with few calls, as a test that it works. Errors as
    those of :func:`by_world_size`."""
    cores = sorted(os.sched_getaffinity(0))
    measure = functools.partial(measure_limit, cores=cores, rounds=10 if quick else 100)
    return Limits(by_world_size(measure, world_sizes(len(cores))), _cache.now())


def world_sizes(cores: int) -> list[int]:
    """Powers of two up to the number of cores, and at least up to 8."""
    return [2**exponent for exponent in range(1, max(3, cores.bit_length() - 1) + 1)]


def best_limit(times: Times) -> int:
    """The best limit for ``one_shot``, one for both kinds of tensor.

    It minimises the sum of squared logarithms of slowdowns relative to the faster algorithm, so
    that one large slowdown counts more than several small ones.
    """

    def loss(limit: int) -> float:
        total = 0.0
        for kind in KINDS:
            for size in SIZES:
                taken = times["one_shot" if size <= limit else "two_shot", kind, size]
                best = min(times[algorithm, kind, size] for algorithm in ALGORITHMS)
                total += math.log(taken / best) ** 2
        return total

    return min(SIZES, key=loss)


def measure_limit(communicator: Communicator, cores: list[int], rounds: int) -> int:
    """:func:`best_limit` of the ranks of ``communicator``, on ``cores``; algorithms alternate."""
    torch.set_num_threads(1)
    # Pin ranks evenly to cores: two that start on one may stay there, as each yields to the other.
    os.sched_setaffinity(0, {cores[communicator.rank % len(cores)]})
    times = {}
    for size in SIZES:
        count = size // torch.float32.itemsize
        source = torch.ones(count)
        tensors = dict(zip(KINDS, [torch.empty(count), communicator.empty(count)], strict=True))
        samples: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            for kind, tensor in tensors.items():
                for algorithm in ALGORITHMS:
                    tensor.copy_(source)
                    communicator.barrier()
                    begin = time.perf_counter()
                    communicator.all_reduce(tensor, algorithm=algorithm)
                    samples.setdefault((algorithm, kind), []).append(time.perf_counter() - begin)
        for (algorithm, kind), seconds in samples.items():
            times[algorithm, kind, size] = median_of_slowest(communicator, seconds)
    return best_limit(times)
