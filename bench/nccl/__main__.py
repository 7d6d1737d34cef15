"""``python -m bench.nccl [--quick] [--device cpu]``, or under ``torchrun``: measure, save, print.

Without torchrun it starts itself under it, a rank per GPU. The exit status is 1 if an element was
wrong or a case failed; results are saved after every row.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from bench import harness
from bench.gpu.timing import attempt, reason
from bench.nccl import collectives, layer, pipe
from bench.nccl.collectives import Row
from bench.nccl.ranks import MOST_GPUS, Ranks, join, usable_gpus
from bench.nccl.tables import CONDITIONS, plot, table, wrong

CPU_RANKS = 2
CPU_STAGES = 2


def agreed(ranks: Ranks, case: dict[str, object], work: Callable[[], Row]) -> Row:
    """A row of all ranks: an error if any of them failed, which later cases survive."""
    (row,) = attempt(case, work)
    failed = ranks.sum(int("error" in row))
    if failed:
        ranks.renew()
    if failed and "error" not in row:
        row = {**case, "error": f"RuntimeError: {failed} other ranks failed"}
    return {**row, "ranks": ranks.ranks}


def by_rank_0(ranks: Ranks, work: Callable[[], Row]) -> Row:
    """What rank 0 alone measures; the others wait."""
    return work() if ranks.rank == 0 else {}


def run(ranks: Ranks, quick: bool) -> Iterator[Row]:
    """All rows, on all ranks."""
    if ranks.left_out:
        yield {"part": "left out", "left out": ranks.left_out}
    rounds = 2 if quick else collectives.ROUNDS
    sizes = collectives.QUICK_SIZES if quick else collectives.SIZES
    dtypes = collectives.DTYPES[:1] if quick else collectives.DTYPES
    for case in collectives.cases(sizes, dtypes):
        about = {"part": "collectives", **case._asdict()}
        yield agreed(ranks, about, functools.partial(collectives.measure, case, ranks, rounds))
    features = layer.TINY_SIZES if quick else layer.SIZES
    for tokens in layer.TINY_TOKENS if quick else layer.TOKENS:
        about = {"part": "layer", "tokens": tokens, "type": "bfloat16"}
        work = functools.partial(layer.measure, tokens, features, ranks, rounds)
        yield agreed(ranks, about, work)
    devices = [torch.device("cpu")] * CPU_STAGES
    if ranks.device.type == "cuda":
        devices = [
            torch.device("cuda", i) for i in range(min(torch.cuda.device_count(), MOST_GPUS))
        ]
    width = pipe.TINY_WIDTH if quick else pipe.WIDTH
    for rows in pipe.TINY_ROWS if quick else pipe.ROWS:
        about = {"part": "pipe", "stages": len(devices), "rows": rows, "type": "bfloat16"}
        work = functools.partial(pipe.measure, rows, width, devices, rounds)
        yield agreed(ranks, about, functools.partial(by_rank_0, ranks, work))


def keep(rows: list[Row]) -> Path:
    """Save the rows; returns the path."""
    return harness.save("nccl", rows, CONDITIONS)


def draw(rows: list[Row], path: Path) -> str:
    """Plot the rows beside ``path``; returns where, or why not."""
    try:
        plot(rows, path.with_suffix(".svg"))
    except ImportError as error:
        return f"no plot: {error}"
    return str(path.with_suffix(".svg"))


def measure(args: argparse.Namespace) -> int:
    """On one rank; returns the exit status."""
    ranks = join(args.device)
    rows = []
    path: Path | None = None
    for row in run(ranks, args.quick):
        rows.append(row)
        if ranks.rank == 0:
            print({key: row[key] for key in row if key not in ("candidates", "error")}, flush=True)
            if not args.quick:
                path = keep(rows)
    failed = [row for row in rows if "error" in row]
    bad = ranks.sum(wrong(rows) if ranks.rank == 0 else 0)
    if ranks.rank == 0:
        print(f"\n{table(rows)}\n", flush=True)
        if path is not None:
            print(f"{path}\n{draw(rows, path)}", flush=True)
        print(f"{bad} elements are wrong; {len(failed)} of {len(rows)} cases failed", flush=True)
        if failed:
            print(f"the first with: {reason(failed[0]['error'])}", flush=True)
    if ranks.communicator is not None:
        ranks.communicator.close()
    dist.destroy_process_group()
    return 1 if bad or failed else 0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.nccl", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny cases, to see that it runs; nothing is kept"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda",
        help=f"a GPU for each rank, {MOST_GPUS} at most; or the CPU, with Gloo and --quick alone",
    )  # fmt: skip
    args = parser.parse_args()
    if args.device == "cpu" and not args.quick:
        parser.error("results of Gloo on a CPU are not those of NCCL; add --quick to see it run")
    if "RANK" in os.environ:
        return measure(args)
    count = CPU_RANKS if args.device == "cpu" else usable_gpus()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={count}", "-m", "bench.nccl", *sys.argv[1:]]
    return subprocess.run(torchrun, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
