"""Measures which row-parallel products gain from overlap with their all-reduce, for several numbers
of ranks.

The ranks are processes, one per GPU. No two GPUs have run this yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from pipekernels.comm import Communicator
from pipekernels.comm.measure import by_world_size, median_of_slowest
from pipekernels.kernels import table
from pipekernels.kernels.config import kind_of
from pipekernels.kernels.table import Measurement, Shape
from pipekernels.local_ops.gemm_choice import Chosen, gpu_of, tf32_allowed
from pipekernels.local_ops.sharded_gemm import gemm_into
from pipekernels.tensor_parallel import overlap

CANDIDATES = (2, 4, 8, 16, 32)  # Thread blocks of the reduction.
GAIN = 1.05  # Least measured speedup for 'auto' to overlap.
LIMIT = 20.0  # Seconds per number of ranks.


def gpu_seconds(call: Callable[[], object]) -> float:
    """Seconds that the current stream takes for ``call``, of ten in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e4


def measure(
    comm: Communicator,
    device: torch.device,
    *,
    seconds: Callable[[Callable[[], object]], float] = gpu_seconds,
    rounds: int = 10,
) -> list[tuple[Shape, int]]:
    """Time products that ``pipekernels tune`` has measured, the longest first, and their sums, one
    after the other and overlapped. A collective, with the same result on all ranks.

    Args:
        comm: the communicator.
        device: of this rank.
        seconds: measures a call.
        rounds: how often each way is timed; the median of the slowest rank's times counts.

    Returns:
        Classes of products, and the thread blocks of their fastest reduction; 0 without a gain.
    """

    def median(call: Callable[[], object]) -> float:
        call()  # The first one may load and allocate.
        samples = []
        for _ in range(rounds):
            comm.barrier()
            samples.append(seconds(call))
        return median_of_slowest(comm, samples)

    def one_after_the_other() -> None:
        gemm_into(out, a, b)
        comm.all_reduce(out)

    known = table.for_gpu(gpu_of(device).name)
    entries = {} if known is None else known.entries
    found, begin = [], time.perf_counter()
    for shape, entry in sorted(entries.items(), key=lambda item: -item[0].m * item[0].n):
        spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        if comm.all_reduce(spent, "max").item() > LIMIT:
            break
        dtype = _dtype_of(shape, entry)
        if dtype is None:
            continue
        a, b = (torch.randn(rows, shape.k, device=device).to(dtype) for rows in (shape.m, shape.n))
        out = comm.empty(shape.m, shape.n, dtype=dtype, device=device)
        times = {}
        for blocks in CANDIDATES:
            chosen = Chosen(entry.config, reducing_blocks=blocks)
            times[blocks] = median(partial(overlap.gemm_all_reduce, a, b, out, comm, chosen))
        best = min(CANDIDATES, key=lambda blocks: times[blocks])
        gains = times[best] * GAIN < median(one_after_the_other)
        found.append((shape, best if gains else 0))
    return found


def _dtype_of(shape: Shape, entry: Measurement) -> torch.dtype | None:
    """The dtype of operands of ``shape``; None if products like it are never overlapped."""
    dtype: torch.dtype = getattr(torch, shape.kind.replace("tfloat32", "float32"))
    is_large = shape.m >= overlap.ROW_BLOCKS * entry.config.blocks.m
    is_reducible = shape.kind != "float8_e4m3fn" and kind_of(dtype, tf32_allowed()) == shape.kind
    overlaps = shape.layout == "forward" and entry.config.split_k == 1
    return dtype if is_large and is_reducible and overlaps else None


def tune() -> list[str]:
    """Measure the overlap on this host's GPUs, if there are several; save and report it."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return []
    gpu = torch.cuda.get_device_name(0)
    sizes = [2**exponent for exponent in range(1, 5) if 2**exponent < gpus] + [gpus]
    try:
        measured = by_world_size(_measure_on_own_gpu, sizes)
    except Exception as error:  # noqa: BLE001 (There may be no peer access.)
        return [f"overlap of products and all-reduces was not measured: {error}"]
    lines = [f"overlap of products and all-reduces ({gpu}):"]
    known = table.for_gpu(gpu)
    entries = {} if known is None else dict(known.entries)
    for ranks, products in measured.items():
        for key, blocks in products:
            entry = entries[Shape(*key)]
            overlaps = dict(entry.overlaps) | {ranks: blocks}
            kept = tuple(pair for pair in sorted(overlaps.items()) if pair[1] > 0)
            entries[Shape(*key)] = entry._replace(overlaps=kept)
        gains = sum(blocks > 0 for _, blocks in products)
        lines.append(f"  {ranks} ranks: {gains} of {len(products)} products gain")
    if known is not None:
        lines.append(f"written to {table.save(known._replace(entries=entries))}")
    return lines


def _measure_on_own_gpu(comm: Communicator) -> list[tuple[Shape, int]]:
    device = torch.device("cuda", comm.rank)
    torch.cuda.set_device(device)
    return measure(comm, device)
