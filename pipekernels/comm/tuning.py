"""Measures from which size ``two_shot`` is faster than ``one_shot``, for several world sizes.

The ranks are processes on this host, started once. The first 2, 4, 8, ... of them make a
communicator, while the others sleep.
"""

from __future__ import annotations

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
from pipekernels.comm.communicator import Communicator
from pipekernels.comm.limits import Tuning

SIZES: list[int] = [2**exponent for exponent in range(8, 19)]  # bytes
ALGORITHMS = ["one_shot", "two_shot"]
KINDS = ["ordinary", "symmetric"]
LIMIT = 120.0  # seconds for all of it

# Seconds by (algorithm, kind of tensor, size).
Times = dict[tuple[str, str, int], float]


def measure(*, quick: bool = False) -> Tuning:
    """Measure for a few seconds; ``quick``: with few calls, as a test that it works.

    Raises:
        TimeoutError: the measurement takes more than two minutes.
        Exception: a rank raised it.
    """
    sizes = world_sizes(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_rank, (folder, sizes, 10 if quick else 100), sizes[-1])
        limits = measured(folder)
    return Tuning({int(size): limit for size, limit in limits.items()}, _cache.now())


def run_ranks(body: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run ``body(rank, *arguments)`` in a process per rank.

    Raises:
        TimeoutError: they take more than two minutes.
        Exception: a rank raised it.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    processes = torch.multiprocessing.start_processes(
        body, args=arguments, nprocs=ranks, join=False, daemon=True, start_method="forkserver"
    )
    deadline = time.monotonic() + LIMIT
    while not processes.join(timeout=1):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            raise TimeoutError(f"measuring took more than {LIMIT:.0f} s; is the machine busy?")


def measure_by_size(
    rank: int, folder: str, sizes: list[int], measure: Callable[[Communicator], Any]
) -> None:
    """On each of the last of ``sizes`` ranks: measure with the first ranks, of each size in turn,
    while the others sleep. :func:`measured` then has the results."""
    found = {}
    store = dist.FileStore(f"{folder}/store", sizes[-1])
    with Communicator.from_store(store, rank, sizes[-1], timeout=LIMIT) as everyone:
        for size in sizes:
            some = everyone.split(0 if rank < size else None)
            if some is not None:
                with some:
                    found[size] = measure(some)
            everyone.barrier()
    if rank == 0:
        (Path(folder) / "measured").write_text(json.dumps(found))


def measured(folder: str) -> dict[str, Any]:
    """What :func:`measure_by_size` has found, by size."""
    found: dict[str, Any] = json.loads((Path(folder) / "measured").read_text())
    return found


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


def _rank(rank: int, folder: str, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    # Pin ranks evenly to cores: two that start on one may stay there, as each yields to the other.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    measure_by_size(rank, folder, sizes, lambda comm: best_limit(_measure(comm, rounds)))


def _measure(communicator: Communicator, rounds: int) -> Times:
    """Medians of the slowest rank's times, the same on all ranks; algorithms alternate."""
    medians = {}
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
            slowest = communicator.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max")
            medians[algorithm, kind, size] = statistics.median(slowest.tolist())
    return medians
