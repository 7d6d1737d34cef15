"""Splitting into 8 micro-batches and concatenating them on a GPU, against torch and a plain copy.

Device time is that of the kernels only. The bandwidth counts every byte read and written once; the
bound is a device-to-device copy of as many bytes between two existing tensors. Tensors smaller than
the L2 cache stay there, for all candidates. Call time is what a caller waits for, allocations and
launches included. ``torch`` is ``chunk(8, dim)`` with ``contiguous()`` of every part, and
``torch.cat`` of every tensor's parts; along dimension 0 its split copies nothing. For casts it is
``.to()`` of every part, and ``.to()`` of the result of ``torch.cat``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu.timing import SAMPLE, Row, attempt, call_seconds, compare, errors
from bench.report.tables import duration, markdown
from pipekernels.ops import concat_micro_batches, split_micro_batches

CHUNKS = 8
CONDITIONS = {
    "micro-batches": CHUNKS,
    "bandwidth": "bytes read and written / device time",
    "timing": "candidates in turn, medians; device time by events around queued work, call time "
    "until the device is idle",
}
MIB = 1 << 20


class Case(NamedTuple):
    """What is split, and concatenated again."""

    dim: int  # -1: the first one of tensors that lie in memory with their last dimension first
    shapes: list[tuple[int, ...]]
    dtype: str
    cast: str | None = None  # the micro-batches' dtype, if that is another


def cases(quick: bool) -> dict[str, Case]:
    """By description."""

    def sized(mib: int, dtype: str, *rest: int) -> tuple[int, ...]:
        """So many MiB, ``rest`` being the sizes of all dimensions but the first."""
        rows = mib * MIB // (math.prod(rest) * getattr(torch, dtype).itemsize)
        return (min(rows, 8) if quick else rows, *rest)

    found: dict[str, Case] = {}
    for mib in (64, 256, 1024):
        found[f"{mib} MiB, dim 0"] = Case(0, [sized(mib, "bfloat16", 4096)], "bfloat16")
        found[f"{mib} MiB, dim 1"] = Case(1, [sized(mib, "bfloat16", 64, 256)], "bfloat16")
    return {
        **found,
        "256 MiB, dim 1, runs of 512 bytes": Case(1, [sized(256, "float32", 32, 32)], "float32"),
        "256 MiB, dim 2": Case(2, [sized(256, "float32", 8, 64, 128)], "float32"),
        "256 MiB, dim 1, odd": Case(1, [sized(256, "bfloat16", 64, 255)], "bfloat16"),
        "8 x 64 MiB, dim 1": Case(1, [sized(64, "float32", 32, 1024)] * 8, "float32"),
        "8 x 1 MiB, dim 1": Case(1, [sized(1, "float32", 32, 256)] * 8, "float32"),
        "8 x 64 KiB, dim 1": Case(1, [(8, 32, 64)] * 8, "float32"),
        "256 MiB, transposed": Case(-1, [sized(256, "float32", 8192)], "float32"),
        "256 MiB of bfloat16, transposed": Case(-1, [sized(256, "bfloat16", 8192)], "bfloat16"),
        "256 MiB, dim 1, float32 to bfloat16 and back": Case(
            1, [sized(256, "float32", 64, 256)], "float32", "bfloat16"
        ),
    }


def make(case: Case, device: torch.device) -> tuple[list[Tensor], int]:
    """The tensors, with random contents, and their batch dimension."""
    dtype = getattr(torch, case.dtype)
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in case.shapes]
    if case.dim == -1:
        return [tensor.t() for tensor in tensors], 0
    return tensors, case.dim


def ways(
    case: Case, direction: str, device: torch.device
) -> tuple[dict[str, Callable[[], Any]], int]:
    """Ours, torch's, and a copy of as many bytes as they read; and that number."""
    tensors, dim = make(case, device)
    there = getattr(torch, case.cast) if case.cast else None
    back = tensors[0].dtype if case.cast else None
    parts = split_micro_batches(tensors, CHUNKS, dim, dtype=there)
    size = sum(t.nbytes for group in (tensors, *parts) for t in group) // 2
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)

    def part_by_torch(part: Tensor) -> Tensor:
        if there is None:
            return part.contiguous()
        return part.to(there, memory_format=torch.contiguous_format)

    def whole_by_torch(group: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(group, dim)
        return whole if back is None else whole.to(back)

    def split_by_torch() -> Any:
        return [[part_by_torch(part) for part in t.chunk(CHUNKS, dim)] for t in tensors]

    def concat_by_torch() -> Any:
        return [whole_by_torch(group) for group in zip(*parts, strict=True)]

    found: dict[str, Callable[[], Any]]
    if direction == "split":
        ours = functools.partial(split_micro_batches, tensors, CHUNKS, dim, dtype=there)
        found = {"ours": ours, "torch": split_by_torch}
    else:
        ours = functools.partial(concat_micro_batches, parts, dim, dtype=back)
        found = {"ours": ours, "torch": concat_by_torch}
    return found | {"copy": lambda: copy.copy_(source)}, size


def wrong_elements(ours: Any, theirs: Any, direction: str) -> int:
    """Number of different elements. Torch's split results are by tensor, ours by micro-batch."""
    if direction == "split":
        ours = itertools.chain.from_iterable(zip(*ours, strict=True))
        theirs = itertools.chain.from_iterable(theirs)
    return sum(int((a != b).sum()) for a, b in zip(ours, theirs, strict=True))


def measure(case: Case, direction: str, args: argparse.Namespace) -> Row:
    """Device and call times of a case, ours, torch's and a copy's."""
    candidates, size = ways(case, direction, args.device)
    wrong = wrong_elements(candidates["ours"](), candidates["torch"](), direction)
    rounds, sample = (2, 0.0) if args.quick else (11, SAMPLE)
    found = compare(candidates, args.device, rounds=rounds, sample=sample)
    calls = compare(
        {name: candidates[name] for name in ("ours", "torch")},
        args.device,
        rounds=rounds,
        seconds=call_seconds,
        sample=sample,
    )
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
                functools.partial(measure, case, direction, args),
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
