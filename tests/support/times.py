"""``python tests/support/times.py REPORT``: where the time of a test session went, file by file.

REPORT is what pytest writes with ``--junit-xml``. A test's seconds are those of its worker: setup,
call and teardown, which includes waiting for processes that the test started.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree


class File(NamedTuple):
    """The tests of one file in one session."""

    name: str
    tests: int
    seconds: float
    slowest: str  # Name of its slowest test.
    slowest_seconds: float


def read(report: str) -> tuple[float, list[File]]:
    """The session's wall-clock seconds, and its files from the slowest to the fastest."""
    root = ElementTree.fromstring(report)
    [suite] = root.iter("testsuite")
    cases: dict[str, list[tuple[float, str]]] = {}
    for case in suite.iter("testcase"):
        name = case.attrib["classname"].replace(".", "/")
        cases.setdefault(name, []).append((float(case.attrib["time"]), case.attrib["name"]))
    files = []
    for name, found in cases.items():
        longest, slowest = max(found)
        files.append(File(name, len(found), sum(each for each, _ in found), slowest, longest))
    return float(suite.attrib["time"]), sorted(files, key=lambda file: -file.seconds)


def table(wall: float, files: list[File], most: int) -> str:
    """One line per file, for the ``most`` slowest; then the rest, the total and the wall clock."""
    total = sum(file.seconds for file in files)
    lines = [f"{'seconds':>8} {'share':>6} {'tests':>6}  file (its slowest test)"]

    def line(name: str, tests: int, seconds: float) -> None:
        lines.append(f"{seconds:8.1f} {seconds / max(total, 1e-9):6.1%} {tests:6d}  {name}")

    for file in files[:most]:
        name = f"{file.name} ({file.slowest} {file.slowest_seconds:.1f})"
        line(name, file.tests, file.seconds)
    rest = files[most:]
    if rest:
        seconds = sum(file.seconds for file in rest)
        line(f"{len(rest)} more files", sum(file.tests for file in rest), seconds)
    line("all workers together", sum(file.tests for file in files), total)
    lines.append(f"{wall:8.1f} seconds by the wall clock, {total / max(wall, 1e-9):.1f} workers")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("report", type=Path, help="what pytest --junit-xml has written")
    parser.add_argument("--most", type=int, default=40, help="files to list")
    options = parser.parse_args(arguments)
    if not options.report.is_file():
        parser.error(f"{options.report} does not exist: run `make test` first")
    print(table(*read(options.report.read_text()), options.most))
    return 0


if __name__ == "__main__":
    sys.exit(main())
