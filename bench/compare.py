"""``python -m bench.compare REV NAME ...``: the benchmarks of this tree and of a commit, in turn.

The commit is checked out and built in ``build/compare/REV``, and measured by its own benchmarks.
For each row that both have: the commit's median over this tree's, so that above 1 this tree is
faster; the median and the range over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report.tables import between, markdown

ROOT = Path(__file__).parents[1]
FIELDS = "part", "case", "candidate"


def checked_out(revision: str) -> Path:
    """The tree of a commit, with its extension."""
    folder = ROOT / "build" / "compare" / revision
    if not folder.exists():
        command = ["git", "worktree", "add", "--detach", str(folder), revision]
        subprocess.run(command, cwd=ROOT, check=True)
    subprocess.run([sys.executable, "csrc/cmake/build_extension.py"], cwd=folder, check=True)
    return folder


def medians(tree: Path, name: str) -> dict[tuple[str, ...], float]:
    """Run a benchmark in its tree: the medians of its rows."""
    with tempfile.TemporaryDirectory() as out:
        # Candidates in processes of their own import the package of this tree too.
        environment = os.environ | {"OUT": out, "PYTHONPATH": str(tree)}
        command = [sys.executable, "-m", "bench", name]
        subprocess.run(command, cwd=tree, env=environment, check=True)
        rows = json.loads((Path(out) / f"{name}.json").read_text())["rows"]
    measured = [row for row in rows if "median" in row]
    return {tuple(str(row.get(key, "")) for key in FIELDS): row["median"] for row in measured}


def main() -> None:
    """Measure, and print a table for each benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("revision", metavar="REV")
    parser.add_argument("names", nargs="+", metavar="NAME", help="as for python -m bench")
    parser.add_argument("--rounds", default=3, type=int)
    args = parser.parse_args()
    other = checked_out(args.revision)
    for name in args.names:
        ratios: dict[tuple[str, ...], list[float]] = {}
        for _ in range(args.rounds):
            theirs, ours = medians(other, name), medians(ROOT, name)
            for key in theirs.keys() & ours.keys():
                ratios.setdefault(key, []).append(theirs[key] / ours[key])
        lines = [
            [*key, f"{statistics.median(found):.2f}", between(found)]
            for key, found in sorted(ratios.items())
        ]
        print(markdown([*FIELDS, f"{args.revision} / this", "range"], lines))


if __name__ == "__main__":
    main()
