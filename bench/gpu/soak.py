"""All-reduces of random sizes by ranks that share one GPU: none may hang, no bit may be wrong.

Fifty thousand for each number of ranks, or as many as fit in ``--seconds``.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterator

import torch

from bench.gpu.threads import ALGORITHMS, Threads, contents, expected
from bench.harness import Options, Plan, Row
from bench.timing import synchronize

CALLS = 50_000
PARTS = {"2 ranks": 0.2, "4 ranks": 0.3, "8 ranks": 0.5}  # of the time there is
BATCH = 50  # calls between two looks at the clock and at the results
LARGEST = 1 << 18  # elements
GPU = dict.fromkeys(PARTS, ("all_reduce",))
GPU_QUICK = {"2 ranks": GPU["2 ranks"]}
BASE = "all_reduce"
CONDITIONS = {
    "ranks": "threads of one process, on one GPU",
    "calls": f"random sizes up to {LARGEST} elements, random dtypes and algorithms; {CALLS} or as "
    "many as there was time for; every element is compared",
}


def measure(plan: Plan, options: Options) -> Iterator[list[Row]]:
    """What each number of ranks has done."""
    for case in plan:
        limit, begin = 2 * BATCH if options.quick else CALLS, time.monotonic()
        with contextlib.closing(Threads(int(case.split()[0]), options.device)) as threads:
            calls, wrong = soak(threads, limit, begin + PARTS[case] * options.seconds)
        took = time.monotonic() - begin
        note = f"{case}: {calls} all-reduces in {took:.0f} s, {wrong} wrong elements."
        yield [{"case": case, "calls": calls, "wrong": wrong, "seconds": took, "note": note}]


def soak(threads: Threads, limit: int, deadline: float) -> tuple[int, int]:
    """Make ``limit`` calls, or as many as there is time for; how many, and the number of wrong
    elements."""
    ranks, device = range(threads.ranks), threads.device
    dtypes = (torch.float32, torch.bfloat16, torch.int32)
    sources = [{d: contents(rank, LARGEST, d, device) for d in dtypes} for rank in ranks]
    sums = {d: expected(threads.ranks, LARGEST, d, device) for d in dtypes}
    tensors = [{d: torch.empty_like(sums[d]) for d in dtypes} for _ in ranks]
    wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in ranks]

    def compare(rank: int, tensor: torch.Tensor) -> None:
        wrong[rank] += (tensor != sums[tensor.dtype][: len(tensor)]).sum()

    def body(rank: int, batch: list[tuple[int, torch.dtype, str, str]]) -> None:
        for count, dtype, algorithm, order in batch:
            tensor = tensors[rank][dtype][:count]
            tensor.copy_(sources[rank][dtype][:count])
            threads.communicators[rank].all_reduce(tensor, algorithm=algorithm, order=order)
            compare(rank, tensor)

    synchronize(device)
    # Warm up torch's allocator for the comparisons: a rank must not allocate device memory while
    # another one waits for it on the device.
    for rank in ranks:
        with torch.cuda.stream(threads.streams[rank]):
            for dtype in dtypes:
                for count in (1, 1 << 12, LARGEST):
                    compare(rank, sums[dtype][:count])

    generator = random.Random(threads.ranks)
    calls = 0
    while calls < limit and time.monotonic() < deadline:
        # Sizes are uniform on a logarithmic scale.
        batch = [
            (
                int(2 ** generator.uniform(0, LARGEST.bit_length() - 1)),
                generator.choice(dtypes),
                generator.choice(ALGORITHMS),
                generator.choice(("rank", "tree")),
            )
            for _ in range(BATCH)
        ]
        threads.run(functools.partial(body, batch=batch))
        calls += len(batch)
    return calls, sum(int(count) for count in wrong)
