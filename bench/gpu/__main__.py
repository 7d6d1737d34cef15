"""``python -m bench.gpu NAME [--quick] [--device cpu]``: run a GPU benchmark, save its results.

A case that fails becomes a row with its error; the other cases still run. Results are saved after
every case, so that an interrupted run keeps its rows. ``nccl`` starts itself under torchrun, a rank
per GPU, unless it is there already. The exit status is 1 if a case failed or an element was wrong.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from bench import harness, records, registry
from bench.harness import Options, Row
from bench.report import pages


def run(module: ModuleType, options: Options) -> Iterator[list[Row]]:
    """The rows of each case, as far as there is time for it: a module's ``before(options)`` gives
    rows as well, and ``agreed(rows, options)`` those that all ranks agree on."""
    begin = time.monotonic()
    agreed = getattr(module, "agreed", lambda rows, options: rows)
    if hasattr(module, "before"):
        yield harness.attempt("before", lambda: module.before(options))
    left_out = 0
    for case, names in (module.GPU_QUICK if options.quick else module.GPU).items():
        if time.monotonic() - begin > options.seconds:
            left_out += 1
            continue
        measure = harness.measure(module, {case: names}, options)
        yield agreed(harness.attempt(case, functools.partial(next, measure)), options)
    if left_out:
        yield [{"note": f"{left_out} cases are left out: there was no time for them."}]


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    names = {name.removeprefix("gpu."): name for name in registry.GPU}
    parser.add_argument("name", choices=names)
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
    name, rank = names[args.name], int(os.environ.get("RANK", "0"))
    module = registry.find(name)
    if hasattr(module, "world") and "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={module.world(args.device)}", "-m", "bench.gpu"]
        return subprocess.run([*torchrun, *sys.argv[1:]], check=False).returncode
    rows: list[Row] = []
    path: Path | None = None
    tell = functools.partial(print, flush=True) if rank == 0 else (lambda *text: None)
    tell(f"{args.name}: {(module.__doc__ or '').splitlines()[0]}\n")
    # Ranks that wait for each other measure all cases, however long it takes.
    seconds = math.inf if hasattr(module, "world") else args.seconds
    for found in run(module, Options(args.quick, args.device, seconds)):
        rows += found
        for row in found:
            tell({key: row[key] for key in row if key != "error"})
        if rank == 0 and not args.quick:
            path = records.save(name, rows, module.CONDITIONS)
    failed = [row for row in rows if "error" in row]
    wrong = sum(row.get("wrong", 0) for row in rows)
    tell(f"\n{pages.body(name, rows)}\n\n{path or ''}")
    tell(f"{wrong} elements are wrong; {len(failed)} cases failed")
    if failed:
        tell(f"the first with: {failed[0]['error']}")
    return 1 if failed or wrong or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
