"""``python -m bench.nccl [--quick] [--device cpu]``, or under ``torchrun``: measure, save, print.

Without torchrun it starts itself under it, a rank per GPU. The exit status is 1 if an element was
wrong or a case failed; results are saved after every case.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from bench import records
from bench.nccl import BASE, COLUMNS, CONDITIONS, collectives, layer, pipe
from bench.nccl.ranks import MOST_GPUS, WARMUP, Ranks, Row, Work, join, measure
from bench.processes import repeated
from bench.report.tables import reason, table

CPU_RANKS = 2
CPU_STAGES = 2
ROUNDS = 9


def agreed(ranks: Ranks, case: Row, rows: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a case on all ranks: an error if any of them failed, which later cases
    survive."""
    error = ""
    try:
        found = [{**case, **row} for row in rows()]
    except Exception:  # noqa: BLE001 - recorded in the result
        error = traceback.format_exc()
        print(error, flush=True)
    if failed := ranks.sum(int(bool(error))):
        ranks.renew()
        return [{**case, "error": error or f"RuntimeError: {failed} other ranks failed"}]
    return found


def run(ranks: Ranks, quick: bool) -> Iterator[list[Row]]:
    """The rows of all cases, on all ranks."""
    if ranks.left_out:
        yield [{"note": ranks.left_out}]
    rounds = 2 if quick else ROUNDS

    def by_all(work: Callable[[], Work]) -> Callable[[], list[Row]]:
        return lambda: measure(work(), ranks.turn, rounds)

    def by_rank_0(work: Callable[[], Work]) -> Callable[[], list[Row]]:
        """The others wait."""
        turn = functools.partial(repeated, count=1, warmup=WARMUP)
        return lambda: measure(work(), turn, rounds) if ranks.rank == 0 else []

    over = f"; {ranks.ranks} ranks"
    for case in collectives.cases(quick):
        about = {"part": case.part + over, "case": f"{case.size} bytes, {case.type}"}
        yield agreed(ranks, about, by_all(functools.partial(collectives.work, case, ranks)))
    features = layer.TINY_SIZES if quick else layer.SIZES
    for tokens in layer.TINY_TOKENS if quick else layer.TOKENS:
        about = {"part": f"Row-parallel layer; size of its result{over}", "case": f"{tokens} rows"}
        work = functools.partial(layer.work, tokens, features, ranks)
        yield agreed(ranks, about, by_all(work))
    devices = [torch.device("cpu")] * CPU_STAGES
    if ranks.device.type == "cuda":
        gpus = min(torch.cuda.device_count(), MOST_GPUS)
        devices = [torch.device("cuda", i) for i in range(gpus)]
    width = pipe.TINY_WIDTH if quick else pipe.WIDTH
    for rows in pipe.TINY_ROWS if quick else pipe.ROWS:
        part = f"Pipe of {len(devices)} stages; size of what a micro-batch hands on"
        about = {"part": part, "case": f"{rows} rows"}
        yield agreed(ranks, about, by_rank_0(functools.partial(pipe.work, rows, width, devices)))


def measured(args: argparse.Namespace) -> int:
    """On one rank; returns the exit status."""
    ranks = join(args.device)
    found: list[list[Row]] = []
    path = None
    conditions = dict(CONDITIONS)
    if ranks.peer == "NCCL":
        conditions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for rows in run(ranks, args.quick):
        found.append(rows)
        if ranks.rank == 0:
            for row in rows:
                print({key: row[key] for key in row if key != "error"}, flush=True)
            if not args.quick:
                path = records.save("nccl", [row for each in found for row in each], conditions)
    rows = [row for each in found for row in each]
    failed = [row for row in rows if "error" in row]
    bad = ranks.sum(sum(row.get("wrong", 0) for row in rows) if ranks.rank == 0 else 0)
    if ranks.rank == 0:
        print(f"\n{table(rows, [], BASE, columns=COLUMNS)}\n\n{path or ''}", flush=True)
        print(f"{bad} elements are wrong; {len(failed)} of {len(found)} cases failed", flush=True)
        if failed:
            print(f"the first with: {reason(failed[0]['error'])}", flush=True)
    if ranks.communicator is not None:
        ranks.communicator.close()
    dist.destroy_process_group()
    return 1 if bad or failed else 0


def usable_gpus() -> int:
    """The number of GPUs to use.

    Raises:
        SystemExit: there are too few.
    """
    count = torch.cuda.device_count()
    if count < 2:
        raise SystemExit(
            f"bench-nccl compares over 2 to {MOST_GPUS} GPUs, and torch {torch.__version__} sees "
            f"{count}. `make gpu-check` measures on one GPU; `python -m bench.nccl --device cpu "
            "--quick` shows on a CPU that this runs, with Gloo in NCCL's place."
        )
    return min(count, MOST_GPUS)


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
        return measured(args)
    count = CPU_RANKS if args.device == "cpu" else usable_gpus()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={count}", "-m", "bench.nccl", *sys.argv[1:]]
    return subprocess.run(torchrun, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
