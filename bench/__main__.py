"""``python -m bench [NAME ...] [--quick]``: run benchmarks, print tables, write result files.

A benchmark gets a result file if none of its cases failed and no candidate was wrong. The quick
form, a look in five minutes, keeps nothing. The exit status is 1 if anything failed or was wrong.
"""

from __future__ import annotations

import argparse
import itertools

from bench import harness, records, registry
from bench.harness import Options
from bench.report import pages, tables


def run(name: str, options: Options) -> bool:
    """Measure a benchmark, print its table and keep its rows; returns whether all went well."""
    module = registry.find(name)
    plan = module.QUICK if options.quick else module.CANDIDATES
    print(f"\n{name}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
    rows: list[harness.Row] = []
    for part in [plan] if hasattr(module, "measure") else [{case: plan[case]} for case in plan]:
        cases = ", ".join(part)
        print(f"{name}: {cases}", flush=True)
        measure = harness.measure(module, part, options)
        rows += harness.attempt(cases, lambda rows=measure: list(itertools.chain(*rows)))
    measured = [row for row in rows if "error" not in row]
    print(f"\n{pages.body(name, measured) if measured else ''}{tables.errors(rows)}", flush=True)
    good = measured == rows and not any(row.get("wrong") for row in rows)
    if good and not options.quick:
        print(records.save(name, rows, module.CONDITIONS), flush=True)
    return good


def main() -> int:
    """Returns the exit status."""
    known = ", ".join(registry.CPU)
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {known}")
    parser.add_argument("--quick", action="store_true", help="few cases, candidates and rounds")
    args = parser.parse_args()
    if unknown := set(args.names) - set(registry.CPU):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {known}")
    failed = [name for name in args.names or registry.CPU if not run(name, Options(args.quick))]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
