"""Overhead of the engine: pipes of layers that do nothing, and micro-batches on one device.

``no pipe`` is the bare model: over the same micro-batches where layers do nothing, and on the whole
batch on one device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.harness import Measured
from bench.pipeline.pipe import build, data, loop, step
from bench.report.tables import duration, markdown, spread
from pipekernels import Pipe

STAGES = 2
CANDIDATES = {
    "no-op": ("no pipe", "8 chunks", "32 chunks"),
    "one device": ("no pipe", "1 chunks", "4 chunks"),
}
QUICK = CANDIDATES
BASE = "no pipe"
CONDITIONS = {
    "no-op": f"{STAGES} stages of nn.Identity, forward and backward, per (stage, micro-batch)",
    "one device": "1 stage of 8 x (Linear(512) + GELU), batch 2048, one thread, forward and "
    "backward; against 1 chunk",
    "timing": "candidates in turn, medians",
}


def _chunks(candidate: str) -> int:
    return int(candidate.split()[0])


def _step(pipe: Pipe, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        pipe.zero_grad()
        x.grad = None
        begin = time.perf_counter()
        pipe(x).backward(grad)
        return time.perf_counter() - begin

    return run


def _no_op(candidate: str) -> Callable[[], float]:
    """Seconds per stage and micro-batch."""
    layers = nn.Sequential(*(nn.Identity() for _ in range(STAGES)))
    x, grad = torch.zeros(64, 4, requires_grad=True), torch.ones(64, 4)
    if candidate == BASE:
        chunks, run = 8, loop(layers, x, grad, threads=torch.get_num_threads())
    else:
        chunks = _chunks(candidate)
        devices = ["cpu"] * STAGES
        run = _step(
            Pipe(layers, [1] * STAGES, devices=devices, chunks=chunks, checkpoint="never"), x, grad
        )
    return lambda: run() / (STAGES * chunks)


def _one_device(candidate: str) -> Callable[[], float]:
    x, grad = data(512, 2048)
    if candidate == BASE:
        return step(build(512), x, grad, threads=1)
    chunks = _chunks(candidate)
    pipe = Pipe(build(512), [16], devices=["cpu"], chunks=chunks, checkpoint="never")
    return step(pipe, x, grad, threads=1)


def measure(plan: Mapping[str, Sequence[str]], quick: bool) -> Iterator[Measured]:
    """Both kinds of pipes, beside none."""
    rounds = {"no-op": (15, 50 if quick else 400), "one device": (1, 4) if quick else (3, 33)}
    make = {"no-op": _no_op, "one device": _one_device}
    threads = torch.get_num_threads()
    for case, names in plan.items():
        warmup, count = rounds[case]
        turns = {name: make[case](name) for name in names}
        try:
            samples = harness.alternate(turns, warmup=warmup, rounds=count)
        finally:
            torch.set_num_threads(threads)
        found = {name: harness.summary(seconds) for name, seconds in samples.items()}
        one = found.get("1 chunks", {}).get("median")
        rows = [
            {
                "case": f"{case}, {name}",
                "candidate": name,
                **figures,
                "ratio": figures["median"] / one if one else None,
            }
            for name, figures in found.items()
        ]
        yield Measured(case, samples, rows)


def table(rows: list[dict[str, Any]]) -> str:
    """A row per case."""
    return markdown(
        ["case", "median", "p10 to p90", "over 1 chunk"],
        [
            [
                row["case"],
                duration(row["median"]),
                spread(row),
                "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
    )
