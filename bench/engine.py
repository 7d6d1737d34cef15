"""Overhead of the engine: pipes of layers that do nothing, and micro-batches on one device."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.pipe import build, data
from bench.report import duration, markdown, spread
from pipekernels import Pipe

STAGES = 2
CONDITIONS = {
    "no-op": f"{STAGES} stages of nn.Identity, forward and backward, per (stage, micro-batch)",
    "one device": "1 stage of 8 x (Linear(512) + GELU), batch 2048, one thread, forward and "
    "backward; against 1 chunk",
    "timing": "candidates in turn, medians",
}


def _step(pipe: Pipe, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        pipe.zero_grad()
        x.grad = None
        begin = time.perf_counter()
        pipe(x).backward(grad)
        return time.perf_counter() - begin

    return run


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time both kinds of pipes."""
    rounds = 50 if args.quick else 400
    runners = {}
    counts = (8, 32)
    for chunks in counts:
        layers = nn.Sequential(*(nn.Identity() for _ in range(STAGES)))
        pipe = Pipe(
            layers, [1] * STAGES, devices=["cpu"] * STAGES, chunks=chunks, checkpoint="never"
        )
        x = torch.zeros(64, 4, requires_grad=True)
        runners[f"no-op, {chunks} chunks"] = _step(pipe, x, torch.ones(64, 4))
    rows = []
    for (name, seconds), chunks in zip(
        harness.alternate(runners, warmup=15, rounds=rounds).items(), counts, strict=True
    ):
        per_task = harness.summary([s / (STAGES * chunks) for s in seconds])
        rows.append({"case": name, **per_task, "ratio": None})

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, grad = data(512, 2048)
        runners = {
            f"one device, {chunks} chunks": _step(
                Pipe(build(512), [16], devices=["cpu"], chunks=chunks, checkpoint="never"), x, grad
            )
            for chunks in (1, 4)
        }
        samples = harness.alternate(runners, warmup=3, rounds=max(8, rounds // 12))
    finally:
        torch.set_num_threads(threads)
    figures = {name: harness.summary(seconds) for name, seconds in samples.items()}
    base = next(iter(figures.values()))["median"]
    return rows + [
        {"case": name, **figure, "ratio": figure["median"] / base}
        for name, figure in figures.items()
    ]


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
