"""Splitting CPU tensors into 8 micro-batches and concatenating them, against torch's operations.

Candidates return contiguous micro-batches. If the batch comes first in memory, ``torch.chunk``
returns views without a copy: that row shows the cost of a copy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import harness
from bench.report import duration, markdown, spread
from pipekernels.ops import concat_micro_batches, split_micro_batches

CHUNKS = 8
CONDITIONS = {
    "micro-batches": CHUNKS,
    "threads": torch.get_num_threads(),
    "timing": "allocation included, candidates in turn, medians",
}
SAMPLE = 2e-3  # seconds that a sample lasts at least; short calls are repeated


def cases() -> dict[str, tuple[list[Tensor], int]]:
    """Tensors and their batch dimension, by description."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape).to(dtype)

    return {
        "1 MiB, batch first": ([make(256, 1024)], 0),
        "1 MiB, batch last": ([make(1024, 256)], 1),
        "3 x 64 KiB, batch second": ([make(64, 16, 16) for _ in range(3)], 1),
        "16 MiB, sequence before batch": ([make(512, 64, 128)], 1),
        "16 MiB, transposed": ([make(2048, 2048).t()], 0),
        "8 MiB bfloat16, transposed": ([make(2048, 2048, dtype=torch.bfloat16).t()], 0),
        "16 MiB, channels last to first": ([make(64, 32, 32, 64).permute(0, 3, 1, 2)], 0),
    }


def sampler(function: Callable[[], Any]) -> Callable[[], float]:
    """A candidate that repeats ``function`` for long enough and returns seconds per call."""

    def repeated(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            function()
        return time.perf_counter() - begin

    repeated(3)
    count = max(1, int(SAMPLE * 3 / repeated(3)))
    return lambda: repeated(count) / count


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per case and direction; seconds, and torch's median over ours."""
    rows = []
    for case, (tensors, dim) in cases().items():
        parts = split_micro_batches(tensors, CHUNKS, dim)

        def split_by_torch(tensors: list[Tensor] = tensors, dim: int = dim) -> list[list[Tensor]]:
            return [[part.contiguous() for part in t.chunk(CHUNKS, dim)] for t in tensors]

        def cat(parts: Any = parts, dim: int = dim) -> list[Tensor]:
            return [torch.cat(group, dim) for group in zip(*parts, strict=True)]

        def split(tensors: list[Tensor] = tensors, dim: int = dim) -> Any:
            return split_micro_batches(tensors, CHUNKS, dim)

        def concat(parts: Any = parts, dim: int = dim) -> Any:
            return concat_micro_batches(parts, dim)

        for direction, ours, theirs in (("split", split, split_by_torch), ("concat", concat, cat)):
            candidates = {"ours": sampler(ours), "torch": sampler(theirs)}
            rounds = 5 if args.quick else 41
            samples = harness.alternate(candidates, warmup=2, rounds=rounds)
            summaries = {name: harness.summary(times) for name, times in samples.items()}
            rows.append(
                {
                    "case": case,
                    "direction": direction,
                    **summaries,
                    "ratio": summaries["torch"]["median"] / summaries["ours"]["median"],
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A row per case and direction."""

    def median(times: dict[str, float]) -> str:
        return f"{duration(times['median'])} ({spread(times)})"

    return markdown(
        ["case", "operation", "pipekernels (p10 to p90)", "torch (p10 to p90)", "torch / ours"],
        [
            [
                row["case"],
                row["direction"],
                median(row["ours"]),
                median(row["torch"]),
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
    )
