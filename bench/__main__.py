"""``python -m bench [NAME ...] [OPTION ...]``: run benchmarks, print ratios, write result files.

By default all of them. Options are those of pytest and pytest-benchmark, such as -k all_reduce,
--benchmark-json=PATH or --benchmark-compare, and --quick: a look in five minutes, which keeps
nothing.
"""

from __future__ import annotations

import sys
from itertools import takewhile

import pytest

from bench import registry


def main() -> int:
    """Run pytest on the named benchmarks; returns its exit status."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nBenchmarks: {', '.join(registry.CPU)}")
        return 0
    names = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    unknown = set(names) - set(registry.CPU)
    if unknown:
        known = ", ".join(registry.CPU)
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    file = str(registry.FOLDER / "test_benchmarks.py")
    tests = [f"{file}::test_{registry.operation(name)}" for name in names] or [file]
    return int(
        pytest.main(
            [*tests, "-q", "-rfE", "--tb=short", "--keep-results", *arguments[len(names) :]]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
