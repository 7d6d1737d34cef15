"""``python -m bench [NAME ...] [--quick]``: run benchmarks, print tables, save the results."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bench import harness

NOT_BENCHMARKS = {"__init__", "__main__", "harness", "processes", "report"}


def names() -> list[str]:
    """All benchmarks: the modules of this folder."""
    files = {path.stem for path in Path(__file__).parent.glob("*.py")}
    return sorted(files - NOT_BENCHMARKS)


def main() -> None:
    """Run the named benchmarks, by default all, one after another."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, to see that it runs; nothing is kept"
    )
    args = parser.parse_args()
    unknown = set(args.names) - set(names())
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    for name in args.names or names():
        module = importlib.import_module(f"bench.{name}")
        print(f"\n{name}: {module.__doc__.splitlines()[0]}\n", flush=True)
        rows = module.run(args)
        print(module.table(rows), flush=True)
        if not args.quick:
            print(f"\n{harness.save(name, rows, module.CONDITIONS)}", flush=True)


if __name__ == "__main__":
    main()
