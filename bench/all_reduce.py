"""Communicator.all_reduce against Gloo, called from Python: in two processes.

Candidates take turns on the same sizes. Before every call each rank rewrites its whole tensor and
the ranks meet at a barrier, outside the timed region; a call takes as long as its slowest rank.

* ``gloo``: ``torch.distributed.all_reduce``, TCP over loopback.
* ``ordinary``: any tensor.
* ``symmetric``: a tensor from ``Communicator.empty``, which the peer reads in place.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench import harness
from bench.report import duration, markdown
from pipekernels import Communicator, reference

RANKS = 2
SIZES = [2**exponent for exponent in range(10, 27, 2)]  # bytes
DTYPES = [torch.float32, torch.bfloat16]
LIMIT = 600.0  # seconds
CONDITIONS = {
    "ranks": f"{RANKS} processes of one intra-op thread, free to run on any core",
    "timing": "candidates in turn, tensors rewritten before each call, slowest rank, medians",
}


def rounds_for(size: int, quick: bool) -> int:
    """Fewer where a call takes long."""
    rounds = 300 if size <= 1 << 18 else 100 if size <= 1 << 22 else 30
    return rounds // 10 if quick else rounds


def measure(
    comm: Communicator, dtype: torch.dtype, size: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Every candidate at one size: its times by the slowest rank, and how many elements are wrong."""
    count = size // dtype.itemsize
    inputs = [
        torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(RANKS)
    ]
    expected, source = reference.all_reduce(inputs, "sum"), inputs[comm.rank]
    ordinary = torch.empty_like(source)
    tensors = {"gloo": ordinary, "ordinary": ordinary, "symmetric": comm.empty(count, dtype=dtype)}

    def sample(name: str) -> float:
        tensor = tensors[name]
        tensor.copy_(source)
        comm.barrier()
        begin = time.perf_counter()
        if name == "gloo":
            dist.all_reduce(tensor)
        else:
            comm.all_reduce(tensor)
        return time.perf_counter() - begin

    wrong = {}
    for name, tensor in tensors.items():
        sample(name)
        wrong[name] = int((tensor != expected).sum())
    samples = harness.alternate(
        {name: lambda name=name: sample(name) for name in tensors}, warmup=3, rounds=rounds
    )
    return {
        name: {
            "times": comm.all_reduce(torch.tensor(times, dtype=torch.float64), "max").tolist(),
            "wrong": wrong[name],
        }
        for name, times in samples.items()
    }


def _rank(rank: int, folder: str, quick: bool) -> None:
    # Not pinned to a core: Gloo has a thread beside the caller's, and is many times slower then.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    rows = []
    with Communicator.from_process_group() as comm:
        for dtype in DTYPES:
            for size in SIZES:
                found = measure(comm, dtype, size, rounds_for(size, quick))
                medians = {n: harness.summary(f["times"])["median"] for n, f in found.items()}
                for name, figures in found.items():
                    seconds = medians[name]
                    rows.append(
                        {
                            "size": size,
                            "count": size // dtype.itemsize,
                            "type": str(dtype).removeprefix("torch."),
                            "redop": "sum",
                            "candidate": name,
                            **harness.summary(figures["times"]),
                            "algbw": size / seconds / 1e9,
                            "busbw": size / seconds / 1e9 * 2 * (RANKS - 1) / RANKS,
                            "wrong": figures["wrong"],
                            "gloo / this": medians["gloo"] / seconds,
                        }
                    )
        dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        torch.save(rows, Path(folder) / "rows")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per type, size and candidate; bandwidths in GB/s, as nccl-tests defines them."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(_rank, args=(folder, args.quick), nprocs=RANKS, join=False)
        deadline = time.monotonic() + LIMIT
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"the ranks did not finish in {LIMIT} s")
        return torch.load(Path(folder) / "rows")


def table(rows: list[dict[str, Any]]) -> str:
    """A row per type and size; bus bandwidths in GB/s, and how many times Gloo's speed that is."""
    grouped: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["type"], row["size"]), {})[row["candidate"]] = row
    lines = []
    for (dtype, size), found in grouped.items():
        line = [str(size), str(found["gloo"]["count"]), dtype, found["gloo"]["redop"]]
        line.append(duration(found["gloo"]["median"]))
        for name in ("ordinary", "symmetric"):
            row = found[name]
            line += [duration(row["median"]), f"{row['busbw']:.2f}", f"{row['gloo / this']:.1f}"]
        line.append(str(sum(row["wrong"] for row in found.values())))
        lines.append(line)
    return markdown(
        [
            *("size (B)", "count", "type", "redop", "Gloo"),
            *("ordinary", "busbw", "x Gloo", "symmetric", "busbw", "x Gloo", "#wrong"),
        ],
        lines,
    )
