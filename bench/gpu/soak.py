"""All-reduces of random sizes by ranks that share one GPU: none may hang, no bit may be wrong.

A hundred thousand for each number of ranks, or as many as fit in ``--seconds``.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.all_reduce import ALGORITHMS, RANKS, Threads, contents, expected
from bench.gpu.timing import Row, attempt, errors, synchronize
from bench.report.tables import markdown

CALLS = 100_000
SHARES = {2: 0.2, 4: 0.3, 8: 0.5}  # of the time there is, by number of ranks
BATCH = 50  # calls between two looks at the clock and at the results
LARGEST = 1 << 18  # elements
CONDITIONS = {
    "ranks": "threads of one process, on one GPU",
    "calls": f"random sizes up to {LARGEST} elements, random dtypes and algorithms; {CALLS} or as "
    "many as there was time for; every element is compared",
}


def soak(ranks: int, limit: int, seconds: float, device: torch.device) -> Row:
    """Make ``limit`` calls, or as many as fit in ``seconds``."""
    deadline = time.monotonic() + seconds
    dtypes = (torch.float32, torch.bfloat16, torch.int32)
    with contextlib.closing(Threads(ranks, device)) as threads:
        sources = [{d: contents(rank, LARGEST, d, device) for d in dtypes} for rank in range(ranks)]
        sums = {d: expected(ranks, LARGEST, d, device) for d in dtypes}
        tensors = [{d: torch.empty_like(sums[d]) for d in dtypes} for _ in range(ranks)]
        wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(ranks)]

        def compare(rank: int, tensor: torch.Tensor) -> None:
            wrong[rank] += (tensor != sums[tensor.dtype][: len(tensor)]).sum()

        def body(rank: int, batch: list[tuple[int, torch.dtype, str, str]]) -> None:
            for count, dtype, algorithm, order in batch:
                tensor = tensors[rank][dtype][:count]
                tensor.copy_(sources[rank][dtype][:count])
                threads.communicators[rank].all_reduce(tensor, algorithm=algorithm, order=order)
                compare(rank, tensor)

        synchronize(device)
        # Warm up torch's allocator for the comparisons: a rank must not allocate device memory
        # while another one waits for it on the device.
        for rank in range(ranks):
            with torch.cuda.stream(threads.streams[rank]):
                for dtype in dtypes:
                    for count in (1, 1 << 12, LARGEST):
                        compare(rank, sums[dtype][:count])

        generator = random.Random(ranks)
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
            threads.run(lambda rank, batch=batch: body(rank, batch))
            calls += len(batch)
        return {"calls": calls, "wrong": sum(int(count) for count in wrong)}


def run(args: argparse.Namespace) -> Iterator[Row]:
    """A row per number of ranks."""
    for ranks in RANKS[:1] if args.quick else RANKS:
        limit, seconds = 2 * BATCH if args.quick else CALLS, SHARES[ranks] * args.seconds
        begin = time.monotonic()
        for row in attempt(
            {"ranks": ranks},
            lambda ranks=ranks, limit=limit, seconds=seconds: soak(
                ranks, limit, seconds, args.device
            ),
        ):
            yield row | {"seconds": time.monotonic() - begin}


def table(rows: list[dict[str, Any]]) -> str:
    """A row per number of ranks."""
    return markdown(
        ["ranks", "all-reduces", "wrong elements", "time (s)"],
        [
            [str(row["ranks"]), str(row["calls"]), str(row["wrong"]), f"{row['seconds']:.0f}"]
            for row in rows
            if "error" not in row
        ],
    ) + errors(rows, "ranks")
