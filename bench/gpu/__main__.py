"""``python -m bench.gpu NAME [--quick] [--device cpu]``: run a GPU benchmark, save its results.

A case that fails becomes a row with its error; the other cases still run. Results are saved after
every row, so that an interrupted run keeps its rows.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import torch

from bench import harness
from bench.gpu.timing import reason

NAMES = ["micro_batch", "pipe", "all_reduce", "p2p_copy", "soak", "sharded_gemm"]


def main() -> int:
    """Returns the exit status: 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument(
        "--quick", action="store_true", help="tiny cases, to see that it runs; nothing is kept"
    )
    parser.add_argument(
        "--device", default="cuda:0", type=torch.device, help="cpu with --quick alone"
    )
    parser.add_argument(
        "--seconds", default=120.0, type=float, help="for what takes as long as it may: %(default)s"
    )
    args = parser.parse_args()
    if args.device.type != "cuda" and not args.quick:
        parser.error(f"results on {args.device.type} mean nothing; add --quick to see that it runs")
    # For the largest tensors, of 256 MiB.
    os.environ.setdefault("PIPEKERNELS_SYMMETRIC_BYTES", str(1 << 30))
    module = importlib.import_module(f"bench.gpu.{args.name}")
    print(f"{args.name}: {module.__doc__.splitlines()[0]}\n", flush=True)
    rows = []
    path: Path | None = None
    for row in module.run(args):
        rows.append(row)
        told = {k: v for k, v in row.items() if k != "error" and not isinstance(v, (dict, list))}
        print(told, flush=True)
        if not args.quick:
            path = harness.save(f"gpu.{args.name}", rows, module.CONDITIONS)
    failed = [row for row in rows if "error" in row]
    print(f"\n{module.table(rows)}\n\n{path or ''}", flush=True)
    if failed:
        first = reason(failed[0]["error"])
        print(f"{len(failed)} of {len(rows)} cases failed, the first with: {first}", flush=True)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
