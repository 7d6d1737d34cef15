"""``python -m bench.gpu NAME [--quick] [--device cpu]``: run a GPU benchmark, save its results.

A case that fails becomes a row with its error; the other cases still run. Results are saved after
every case, so that an interrupted run keeps its rows.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench import harness, records, registry
from bench.harness import Options
from bench.report.tables import reason, table

Row = dict[str, Any]


def attempt(case: Row, measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of ``measure``, or one with the traceback of its error."""
    try:
        return measure()
    except Exception:  # noqa: BLE001 - recorded in the result
        print(traceback.format_exc(), flush=True)
        return [{**case, "error": traceback.format_exc()}]


def run(module: ModuleType, options: Options) -> Iterator[list[Row]]:
    """The rows of each case, as far as there is time for it: a module's ``SHARES`` are what cases
    that begin so may take; its ``before(options)`` gives rows as well, and ``rows(case, options)``
    those of a case without turns."""
    begin = time.monotonic()
    shares = getattr(module, "SHARES", {})
    if hasattr(module, "before"):
        yield attempt({"case": "before"}, lambda: module.before(options))
    left_out = 0
    for case, names in (module.GPU_QUICK if options.quick else module.GPU).items():
        share = next((shares[start] for start in shares if case.startswith(start)), 1.0)
        if time.monotonic() - begin > share * options.seconds:
            left_out += 1
        elif hasattr(module, "rows"):
            yield attempt({"case": case}, lambda case=case: module.rows(case, options))
        else:
            plan = {case: names}
            yield attempt(
                {"case": case},
                lambda plan=plan: next(harness.measure(module, plan, options)).rows,
            )
    if left_out:
        yield [{"note": f"{left_out} cases are left out: there was no time for them."}]


def main() -> int:
    """Returns the exit status: 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    names = [name.removeprefix("gpu.") for name in registry.GPU]
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
    name = f"gpu.{args.name}"
    module = registry.find(name)
    print(f"{args.name}: {(module.__doc__ or '').splitlines()[0]}\n", flush=True)
    rows: list[Row] = []
    path: Path | None = None
    for found in run(module, Options(args.quick, args.device, args.seconds)):
        rows += found
        for row in found:
            print({key: row[key] for key in row if key != "error"}, flush=True)
        if not args.quick:
            path = records.save(name, rows, module.CONDITIONS)
    failed = [row for row in rows if "error" in row]
    columns = getattr(module, "COLUMNS", ())
    print(f"\n{table(rows, [], module.BASE, columns=columns)}\n\n{path or ''}", flush=True)
    if failed:
        first = reason(failed[0]["error"])
        print(f"{len(failed)} cases failed, the first with: {first}", flush=True)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
