"""Splitting CPU tensors into 8 micro-batches and concatenating them, against torch's operations.

Candidates return contiguous micro-batches. If the batch comes first in memory, ``torch.chunk``
returns views without a copy: that row shows the cost of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import harness
from bench.harness import Measured
from bench.report.tables import duration, markdown, spread
from pipekernels.ops import concat_micro_batches, split_micro_batches

CHUNKS = 8
TENSORS: dict[str, Callable[[], tuple[list[Tensor], int]]] = {  # and their batch dimension
    "1 MiB, batch first": lambda: ([make(256, 1024)], 0),
    "1 MiB, batch last": lambda: ([make(1024, 256)], 1),
    "3 x 64 KiB, batch second": lambda: ([make(64, 16, 16) for _ in range(3)], 1),
    "16 MiB, sequence before batch": lambda: ([make(512, 64, 128)], 1),
    "16 MiB, transposed": lambda: ([make(2048, 2048).t()], 0),
    "8 MiB bfloat16, transposed": lambda: ([make(2048, 2048, dtype=torch.bfloat16).t()], 0),
    "16 MiB, channels last to first": lambda: ([make(64, 32, 32, 64).permute(0, 3, 1, 2)], 0),
}
DIRECTIONS = ("split", "concat")
CANDIDATES = {f"{name}: {way}": ("ours", "torch") for name in TENSORS for way in DIRECTIONS}
QUICK = {
    case: CANDIDATES[case]
    for case in (
        "1 MiB, batch last: split",
        "1 MiB, batch last: concat",
        "16 MiB, transposed: split",
    )
}
BASE = "torch"
CONDITIONS = {
    "micro-batches": CHUNKS,
    "threads": torch.get_num_threads(),
    "timing": "allocation included, candidates in turn, medians",
}
SAMPLE = 2e-3  # seconds that a sample lasts at least; short calls are repeated


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values."""
    return torch.randn(*shape).to(dtype)


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


def functions(tensors: list[Tensor], dim: int, direction: str) -> dict[str, Callable[[], Any]]:
    """What the candidates call."""
    parts = split_micro_batches(tensors, CHUNKS, dim)
    if direction == "concat":
        return {
            "ours": lambda: concat_micro_batches(parts, dim),
            "torch": lambda: [torch.cat(group, dim) for group in zip(*parts, strict=True)],
        }
    return {
        "ours": lambda: split_micro_batches(tensors, CHUNKS, dim),
        "torch": lambda: [[part.contiguous() for part in t.chunk(CHUNKS, dim)] for t in tensors],
    }


def measure(plan: Mapping[str, Sequence[str]], quick: bool) -> Iterator[Measured]:
    """A row per case; seconds, and torch's median over ours."""
    for case in plan:
        name, direction = case.split(": ")
        calls = functions(*TENSORS[name](), direction)
        candidates = {name: sampler(function) for name, function in calls.items()}
        samples = harness.alternate(candidates, warmup=2, rounds=5 if quick else 41)
        found: dict[str, Any] = {name: harness.summary(times) for name, times in samples.items()}
        ratio = found["torch"]["median"] / found["ours"]["median"]
        row = {"case": name, "direction": direction, **found, "ratio": ratio}
        yield Measured(case, samples, [row])


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
