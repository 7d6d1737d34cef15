"""``python -m bench [NAME ...] [--quick]``: run benchmarks, print tables, write result files.

By default all benchmarks on CPU ranks. A benchmark gets a result file if no case failed and no
candidate was wrong. Benchmarks of GPUs, ``gpu.NAME`` and ``nccl``, get one after every case, with a
row for each that failed, so that an interrupted run keeps its rows. ``nccl`` starts itself under
torchrun, a rank per GPU, unless it is there already. The exit status is 1 if anything failed or was
wrong.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

from bench import harness, records, registry
from bench.harness import Options, Row
from bench.report import pages, tables

RANK = int(os.environ.get("RANK", "0"))


def measured(name: str, options: Options, tell: Callable[[str], None]) -> Iterator[list[Row]]:
    """The rows of each case, as far as there is time for it: if a module has ``agreed(rows,
    options)``, those that all ranks agree on."""
    module, begin = registry.find(name), time.monotonic()
    agreed = getattr(module, "agreed", lambda rows, options: rows)
    plan = registry.plan(name, options.quick)
    left_out = 0
    for part in [plan] if hasattr(module, "measure") else [{case: plan[case]} for case in plan]:
        if time.monotonic() - begin > options.seconds:
            left_out += 1
            continue
        cases = ", ".join(part)
        tell(f"{name}: {cases}")
        for rows in harness.attempted(cases, harness.measure(module, part, options)):
            yield agreed(rows, options)
    if left_out:
        yield [{"note": f"{left_out} cases are left out: there was no time for them."}]


def run(name: str, options: Options) -> bool:
    """Measure a benchmark, print its table and keep its rows; returns whether all went well."""
    module, on_gpus = registry.find(name), name in registry.GPU
    tell = functools.partial(print, flush=True) if RANK == 0 else (lambda *text: None)
    save = functools.partial(records.save, name, conditions=module.CONDITIONS)
    rows: list[Row] = []
    tell(f"\n{name}: {(module.__doc__ or '').splitlines()[0]}")
    for found in measured(name, options, tell):
        rows += found
        if on_gpus and RANK == 0 and not options.quick:
            save(rows=rows)
    good = [row for row in rows if "error" not in row]
    wrong = sum(row.get("wrong", 0) for row in good)
    tell(f"\n{pages.body(name, good) if good else ''}{tables.errors(rows)}\n")
    tell(f"{wrong} elements are wrong; {len(rows) - len(good)} cases failed")
    well = bool(rows) and good == rows and not wrong
    if well and not options.quick and not on_gpus:
        tell(save(rows=rows))
    return well


def main() -> int:
    """Returns the exit status."""
    known = ", ".join(registry.CPU | registry.GPU)
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known}")
    parser.add_argument("--quick", action="store_true", help="five minutes; keeps nothing")
    parser.add_argument("--device", default="cuda:0", help="of GPUs; cpu with --quick alone")
    parser.add_argument("--seconds", default=120.0, type=float, help="on one GPU: %(default)s")
    args = parser.parse_args()
    if unknown := set(args.names) - (registry.CPU | registry.GPU).keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {known}")
    failed = False
    for name in args.names or registry.CPU:
        device, seconds = torch.device("cpu"), math.inf
        if name in registry.GPU:
            device, seconds = torch.device(args.device), args.seconds
            os.environ.setdefault("PIPEKERNELS_SYMMETRIC_BYTES", str(1 << 30))  # 256 MiB and more
            if device.type != "cuda" and not args.quick:
                parser.error(f"results on {device} mean nothing; add --quick to see that it runs")
        module = registry.find(name)
        if hasattr(module, "world"):
            if "RANK" not in os.environ:
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                torchrun += [f"--nproc-per-node={module.world(device)}", "-m", "bench", name]
                options = [each for each in sys.argv[1:] if each not in args.names]
                failed |= subprocess.run([*torchrun, *options], check=False).returncode != 0
                continue
            seconds = math.inf  # Ranks that wait for each other measure all cases.
        failed |= not run(name, Options(args.quick, device, seconds))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
