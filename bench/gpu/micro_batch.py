"""Splitting into 8 micro-batches and concatenating them on a GPU: torch's operations, and a plain copy.

Device time is that of the kernels alone. The bandwidth counts every byte read and written once; the bound
is a device-to-device copy of as many bytes between two tensors that exist. What is smaller than the L2
cache stays there, for all candidates. Call time is what a caller
waits for, allocations and launches included. ``torch`` is ``chunk(8, dim)`` with ``contiguous()`` of every
part, and ``torch.cat`` of every tensor's parts; along dimension 0 its split copies nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.gpu.timing import SAMPLE, Row, attempt, call_seconds, compare, errors
from bench.report import duration, markdown
from pipekernels.ops import concat_micro_batches, split_micro_batches

CHUNKS = 8
CONDITIONS = {
    "micro-batches": CHUNKS,
    "bandwidth": "2 x bytes / device time",
    "timing": "candidates in turn, medians; device time by events around queued work, call time until "
    "the device is idle",
}
MIB = 1 << 20


def cases(quick: bool) -> dict[str, tuple[int, list[tuple[int, ...]], str]]:
    """Batch dimension, shapes and dtype, by description."""

    def sized(mib: int, dtype: str, *rest: int) -> tuple[int, ...]:
        """So many MiB, ``rest`` being the sizes of all dimensions but the first."""
        rows = mib * MIB // (math.prod(rest) * getattr(torch, dtype).itemsize)
        return (min(rows, 8) if quick else rows, *rest)

    found: dict[str, tuple[int, list[tuple[int, ...]], str]] = {}
    for mib in (64, 256, 1024):
        found[f"{mib} MiB, dim 0"] = 0, [sized(mib, "bfloat16", 4096)], "bfloat16"
        found[f"{mib} MiB, dim 1"] = 1, [sized(mib, "bfloat16", 64, 256)], "bfloat16"
    return {
        **found,
        "256 MiB, dim 1, runs of 512 bytes": (1, [sized(256, "float32", 32, 32)], "float32"),
        "256 MiB, dim 2": (2, [sized(256, "float32", 8, 64, 128)], "float32"),
        "256 MiB, dim 1, odd": (1, [sized(256, "bfloat16", 64, 255)], "bfloat16"),
        "8 x 64 MiB, dim 1": (1, [sized(64, "float32", 32, 1024)] * 8, "float32"),
        "8 x 1 MiB, dim 1": (1, [sized(1, "float32", 32, 256)] * 8, "float32"),
        "8 x 64 KiB, dim 1": (1, [(8, 32, 64)] * 8, "float32"),
        "256 MiB, transposed": (-1, [sized(256, "float32", 8192)], "float32"),
        "256 MiB of bfloat16, transposed": (-1, [sized(256, "bfloat16", 8192)], "bfloat16"),
    }


def make(
    case: tuple[int, list[tuple[int, ...]], str], device: torch.device
) -> tuple[list[Tensor], int]:
    """The tensors, with random contents, and their batch dimension. A dimension of -1 stands for the
    first one of a tensor that lies in memory with its last dimension first."""
    dim, shapes, dtype = case
    tensors = [torch.randn(shape, device=device).to(getattr(torch, dtype)) for shape in shapes]
    if dim == -1:
        return [tensor.t() for tensor in tensors], 0
    return tensors, dim


def measure(
    case: tuple[int, list[tuple[int, ...]], str], direction: str, args: argparse.Namespace
) -> Row:
    """Device and call times of a case, ours, torch's and a copy's."""
    device = args.device
    tensors, dim = make(case, device)
    parts = split_micro_batches(tensors, CHUNKS, dim)
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    copy = torch.empty_like(whole)

    def by_torch() -> Any:
        if direction == "split":
            return [[part.contiguous() for part in t.chunk(CHUNKS, dim)] for t in tensors]
        return [torch.cat(group, dim) for group in zip(*parts, strict=True)]

    def ours() -> Any:
        if direction == "split":
            return split_micro_batches(tensors, CHUNKS, dim)
        return concat_micro_batches(parts, dim)

    mine = ours() if direction == "concat" else zip(*ours(), strict=True)
    theirs = by_torch()
    wrong = sum(
        int((a != b).sum())
        for one, other in zip(mine, theirs, strict=True)
        for a, b in ([(one, other)] if direction == "concat" else zip(one, other, strict=True))
    )
    del mine, theirs

    rounds, sample = (2, 0.0) if args.quick else (11, SAMPLE)
    candidates = {"ours": ours, "torch": by_torch, "copy": lambda: copy.copy_(whole)}
    found = compare(candidates, device, rounds=rounds, sample=sample)
    calls = compare(
        {"ours": ours, "torch": by_torch},
        device,
        rounds=rounds,
        seconds=call_seconds,
        sample=sample,
    )
    size = whole.numel() * whole.itemsize
    median = found["ours"]["median"]
    return {
        "bytes": size,
        "wrong": wrong,
        **found,
        "call": calls,
        "GB/s": 2 * size / median / 1e9,
        "of copy": found["copy"]["median"] / median,
        "ratio": found["torch"]["median"] / median,
        "call ratio": calls["torch"]["median"] / calls["ours"]["median"],
    }


def run(args: argparse.Namespace) -> Iterator[Row]:
    """A row per case and direction."""
    for name, case in cases(args.quick).items():
        for direction in ("split", "concat"):
            yield from attempt(
                {"case": name, "direction": direction},
                lambda case=case, direction=direction: measure(case, direction, args),
            )


def table(rows: list[Row]) -> str:
    """A row per case and direction."""
    header = ["case", "operation", "device time", "GB/s", "of a copy's", "torch / ours"]
    header += ["call", "torch / ours, call", "#wrong"]
    return markdown(
        header,
        [
            [
                *(row["case"], row["direction"], duration(row["ours"]["median"])),
                *(f"{row['GB/s']:.0f}", f"{row['of copy']:.0%}", f"{row['ratio']:.2f}"),
                duration(row["call"]["ours"]["median"]),
                *(f"{row['call ratio']:.2f}", str(row["wrong"])),
            ]
            for row in rows
            if "error" not in row
        ],
    ) + errors(rows, "case", "direction")
