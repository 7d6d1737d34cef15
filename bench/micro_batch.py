"""Splitting tensors into 8 microbatches and concatenating them, against torch's operations.

``torch`` is ``chunk(8, dim)`` with ``contiguous()`` of every part, and ``torch.cat``; if the batch
comes first in memory, its split copies nothing: that row shows the cost of a copy. For casts it is
``.to()`` of every part, and of the result of ``torch.cat``.

On a GPU the time is that of the kernels alone, beside a copy from device to device of as many
bytes; ``called`` is what a caller waits for, allocations and launches included, and ``one by one``
copies each microbatch to its place when it is there, as `Pipe` does with outputs. Tensors smaller
than the L2 cache stay there, for all candidates.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Options, Turns
from bench.timing import call_seconds, device_seconds, sampler
from pipekernels.ops import concat_micro_batches, split_micro_batches

CHUNKS = 8
BASE = "torch"
CONDITIONS = {
    "microbatches": CHUNKS,
    "threads": torch.get_num_threads(),
    "timing": "allocation included except for device time, candidates in turn, medians",
}
SAMPLE = 2e-3  # seconds that a sample lasts at least; short calls are repeated


class Case(NamedTuple):
    """What is split along ``dim``, and concatenated again."""

    dim: int
    shapes: list[tuple[int, ...]]
    dtype: str = "float32"
    order: tuple[int, ...] | None = None  # of dimensions, if that of memory is another
    cast: str | None = None  # the microbatches' dtype, if that is another


def sized(mib: int, dtype: str, *rest: int) -> tuple[int, ...]:
    """So many MiB, ``rest`` being the sizes of all dimensions but the first."""
    return (mib * 2**20 // (math.prod(rest) * getattr(torch, dtype).itemsize), *rest)


ON_CPU = {
    "1 MiB, batch first": Case(0, [(256, 1024)]),
    "1 MiB, batch last": Case(1, [(1024, 256)]),
    "3 x 64 KiB, batch second": Case(1, [(64, 16, 16)] * 3),
    "16 MiB, sequence before batch": Case(1, [(512, 64, 128)]),
    "16 MiB, transposed": Case(0, [(2048, 2048)], order=(1, 0)),
    "8 MiB bfloat16, transposed": Case(0, [(2048, 2048)], "bfloat16", (1, 0)),
    "16 MiB, channels last to first": Case(0, [(64, 32, 32, 64)], order=(0, 3, 1, 2)),
}
ON_GPU = {
    **{
        f"{mib} MiB, dim {len(rest) - 1}": Case(
            len(rest) - 1, [sized(mib, "bfloat16", *rest)], "bfloat16"
        )
        for mib in (64, 256, 1024)
        for rest in ((4096,), (64, 256))
    },
    "256 MiB, dim 1, runs of 512 bytes": Case(1, [sized(256, "float32", 32, 32)]),
    "256 MiB, dim 2": Case(2, [sized(256, "float32", 8, 64, 128)]),
    "256 MiB, dim 1, odd": Case(1, [sized(256, "bfloat16", 64, 255)], "bfloat16"),
    "8 x 64 MiB, dim 1": Case(1, [sized(64, "float32", 32, 1024)] * 8),
    "8 x 1 MiB, dim 1": Case(1, [sized(1, "float32", 32, 256)] * 8),
    "8 x 64 KiB, dim 1": Case(1, [(8, 32, 64)] * 8),
    "256 MiB, transposed": Case(0, [sized(256, "float32", 8192)], order=(1, 0)),
    "256 MiB of bfloat16, transposed": Case(
        0, [sized(256, "bfloat16", 8192)], "bfloat16", order=(1, 0)
    ),
    "256 MiB, dim 1, float32 to bfloat16 and back": Case(
        1, [sized(256, "float32", 64, 256)], cast="bfloat16"
    ),
}
CASES = ON_CPU | ON_GPU
WAYS = ("split", "concat")
CANDIDATES = {f"{name}: {way}": ("ours", "torch") for name in ON_CPU for way in WAYS}
QUICK = {
    case: CANDIDATES[case]
    for case in (
        "1 MiB, batch last: split",
        "1 MiB, batch last: concat",
        "16 MiB, transposed: split",
    )
}
GPU: dict[str, tuple[str, ...]] = {
    f"{name}: {way}": ("ours", "torch", "copy") for name in ON_GPU for way in WAYS
}
GPU |= {f"{name}: split, called": ("ours", "torch") for name in ON_GPU}
GPU |= {f"{name}: concat, called": ("ours", "torch", "one by one") for name in ON_GPU}
GPU_QUICK = GPU


def make(case: Case, options: Options) -> list[Tensor]:
    """The tensors, with random contents; on a GPU's stand-in they are short."""
    on_gpu = case not in ON_CPU.values()
    tensors = []
    for first, *rest in case.shapes:
        shape = (min(first, 8) if options.quick and on_gpu else first, *rest)
        tensor = torch.randn(shape, device=options.device).to(getattr(torch, case.dtype))
        tensors.append(tensor if case.order is None else tensor.permute(case.order))
    return tensors


def ways(case: Case, way: str, tensors: list[Tensor]) -> tuple[dict[str, Callable[[], Any]], int]:
    """What the candidates call, and how many bytes each of them reads."""
    dim = case.dim
    there = getattr(torch, case.cast) if case.cast else None
    back = tensors[0].dtype if case.cast else None
    parts = split_micro_batches(tensors, CHUNKS, dim, dtype=there)
    size = sum(t.nbytes for group in (tensors, *parts) for t in group) // 2

    def copy() -> Callable[[], Any]:
        source = torch.randint(256, (size,), dtype=torch.uint8, device=tensors[0].device)
        return functools.partial(torch.empty_like(source).copy_, source)

    def part_by_torch(part: Tensor) -> Tensor:
        if there is None:
            return part.contiguous()
        return part.to(there, memory_format=torch.contiguous_format)

    def split_by_torch() -> Any:
        return [[part_by_torch(part) for part in t.chunk(CHUNKS, dim)] for t in tensors]

    def concat_by_torch() -> Any:
        wholes = (torch.cat(group, dim) for group in zip(*parts, strict=True))
        return [whole if back is None else whole.to(back) for whole in wholes]

    def concat_one_by_one() -> Any:
        wholes = [torch.empty_like(tensor) for tensor in tensors]
        for whole, group in zip(wholes, zip(*parts, strict=True), strict=True):
            for place, part in zip(whole.chunk(CHUNKS, dim), group, strict=True):
                place.copy_(part)
        return wholes

    if way == "split":
        ours = functools.partial(split_micro_batches, tensors, CHUNKS, dim, dtype=there)
        return {"ours": ours, "torch": split_by_torch, "copy": copy()}, size
    joined = functools.partial(concat_micro_batches, parts, dim, dtype=back)
    others = {"torch": concat_by_torch, "one by one": concat_one_by_one, "copy": copy()}
    return {"ours": joined, **others}, size


def wrong_elements(ours: Any, theirs: Any, way: str) -> int:
    """Number of different elements. Torch's split results are by tensor, ours by microbatch."""
    if way == "split":
        ours = itertools.chain.from_iterable(zip(*ours, strict=True))
        theirs = itertools.chain.from_iterable(theirs)
    return sum(int((a != b).sum()) for a, b in zip(ours, theirs, strict=True))


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Ours, torch's, and a copy."""
    name, _, rest = case.partition(": ")
    way, _, called = rest.partition(", ")
    calls, size = ways(CASES[name], way, make(CASES[name], options))
    wrong = wrong_elements(calls["ours"](), calls["torch"](), way)
    seconds = call_seconds if called else device_seconds
    sample = 0.0 if options.quick and name in ON_GPU else SAMPLE
    runners = {each: sampler(calls[each], options.device, seconds, sample) for each in names}
    rounds = 5 if options.quick else 11 if name in ON_GPU else 41

    def more(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        found = {each: {"GB/s": 2 * size / medians[each] / 1e9} for each in names}
        found["ours"] |= {"wrong": wrong}
        return found

    return Turns(runners, 2, rounds, more)
