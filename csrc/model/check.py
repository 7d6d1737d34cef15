"""``python csrc/model/check.py [MODEL ...]``: search all states of the signal protocol's models.

Needs SPIN and a C compiler. SPIN must find no error in a model as it is, and must find one in each
of its broken variants, which break it in one place each; otherwise the exit status is 1. Without
names, ``check_ptx.py`` checks the device protocols under PTX's memory model first, which needs only
Python; and without names and SPIN, that is all.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import check_ptx

HERE = Path(__file__).resolve().parent
MEMORY = 2000  # MiB for one search.
DEPTH = 2_000_000


class Search(NamedTuple):
    """A model with its parameters; in a ``broken`` one SPIN must find an error."""

    model: str
    parameters: str
    broken: bool = False


class Outcome(NamedTuple):
    states: int
    depth: int
    seconds: float
    error: str  # Empty if none was found.
    complete: bool  # Whether all states were searched.


SEARCHES = [
    Search("signal", "RANKS=2 VALUES=4"),
    Search("signal", "RANKS=3 VALUES=4"),
    Search("signal", "RANKS=4 VALUES=4"),
    *(
        Search("signal", f"RANKS=2 BREAK_{b}", True)
        for b in ("WAKE", "STORE", "COMPARE", "SLEEPERS")
    ),
    Search("collectives", "RANKS=2 ROUNDS=4"),
    Search("collectives", "RANKS=3 ROUNDS=4"),
    Search("collectives", "RANKS=4 ROUNDS=2"),
    Search("collectives", "RANKS=2 ROUNDS=4 THREADS=2"),
    Search("collectives", "RANKS=2 ROUNDS=2 MISMATCH"),
    Search("collectives", "RANKS=3 ROUNDS=1 MISMATCH"),
    Search("collectives", "RANKS=2 SETS=2", True),
    Search("collectives", "RANKS=2 DESCRIPTORS=1", True),
    Search("collectives", "RANKS=2 BREAK_SIGNAL", True),
    Search("collectives", "RANKS=2 BREAK_LEAVE", True),
    Search("collectives", "RANKS=2 ROUNDS=1 BREAK_EITHER", True),
    Search("collectives", "RANKS=3 ROUNDS=1 MISMATCH BREAK_COMPARE", True),
    Search("collectives", "RANKS=2 THREADS=2 BREAK_MUTEX", True),
    Search("ring", "RANKS=2"),
    Search("ring", "RANKS=3"),
    Search("ring", "RANKS=4"),
    Search("ring", "RANKS=4 LAG=3"),
    Search("ring", "RANKS=4 SLOTS=8"),
    Search("ring", "RANKS=3 TREE"),
    Search("ring", "RANKS=4 TREE"),
    Search("ring", "RANKS=3 SLOTS=LAG", True),
    Search("ring", "RANKS=2 BREAK_RAISE", True),
    Search("ring", "RANKS=2 BREAK_SCHEDULE", True),
    Search("ring", "RANKS=4 TREE BREAK_TREE", True),
    Search("push", "RANKS=2"),
    Search("push", "RANKS=2 MISMATCH"),
    Search("push", "RANKS=2 INBOXES=1", True),
    *(
        Search("push", f"RANKS=2 BREAK_{b}", True)
        for b in ("SYNC", "EMPTY", "ATOMIC", "CLEAR", "MEETING", "RECHECK")
    ),
    *(
        Search("push", f"RANKS=2 MISMATCH BREAK_{b}", True)
        for b in ("COMPARE", "OTHERWISE", "NUMBER")
    ),
    Search("failure", "RANKS=2 CALLS=3 GIVE_UPS=2"),
    Search("failure", "RANKS=3 CALLS=2 GIVE_UPS=2"),
    Search("failure", "RANKS=4 CALLS=1 GIVE_UPS=0"),
    Search("failure", "RANKS=2 CALLS=3 KILL"),
    Search("failure", "RANKS=3 CALLS=2 KILL"),
    *(
        Search("failure", f"RANKS=2 BREAK_{b}", True)
        for b in ("FAIL", "CHECK", "STATUS", "ENTER", "FAILED_CALL", "ORDER", "LEAVE")
    ),
    Search("failure", "RANKS=2 KILL BREAK_ORDER", True),
    Search("failure", "RANKS=3 KILL BREAK_CULPRIT", True),
]


def run_search(search: Search) -> Outcome:
    """Generate the verifier, compile and run it."""
    parameters = search.parameters.split()
    options = ["-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY}"]
    if "KILL" in parameters:
        options.append("-DNOREDUCE")  # Partial order reduction does not support `unless`.
    with tempfile.TemporaryDirectory() as folder:
        for command in (
            ["spin", *(f"-D{p}" for p in parameters), "-a", str(HERE / f"{search.model}.pml")],
            ["cc", *options, "-o", "pan", "pan.c"],
        ):
            done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        begin = time.perf_counter()
        text = subprocess.run(
            ["./pan", f"-m{DEPTH}"], check=False, cwd=folder, capture_output=True, text=True
        ).stdout
    figures = re.search(r"depth reached (\d+), errors: (\d+)\s+(\d+) states, stored", text)
    if figures is None:
        raise RuntimeError(f"{search.model} {search.parameters}:\n{text}")
    error = re.search(r"^pan:1: (assertion violated|invalid end state)", text, re.MULTILINE)
    return Outcome(
        states=int(figures[3]),
        depth=int(figures[1]),
        seconds=time.perf_counter() - begin,
        error={"invalid end state": "deadlock"}.get(error[1], error[1]) if error else "",
        complete=figures[2] == "0" and not re.search("search depth too small|out of memory", text),
    )


def verdict(search: Search, outcome: Outcome) -> tuple[bool, str]:
    """Whether the outcome is as required, and its description for the table."""
    if search.broken:
        return bool(outcome.error), f"found: {outcome.error}" if outcome.error else "NOT FOUND"
    if outcome.error:
        return False, f"ERROR: {outcome.error}"
    return outcome.complete, "holds in all states" if outcome.complete else "NOT ALL SEARCHED"


def main() -> int:
    models = sorted({search.model for search in SEARCHES})
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[1])
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"one of {', '.join(models)}; default: all"
    )
    arguments = parser.parse_args()
    chosen = arguments.models or models
    if unknown := set(chosen) - set(models):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(models)}")
    passed = bool(arguments.models) or check_ptx.check()
    for tool, package in (("spin", "spin"), ("cc", "gcc")):
        if shutil.which(tool) is None:
            missing = f"{tool} is not installed: apt-get install {package} (Debian, Ubuntu)"
            if arguments.models:
                sys.exit(missing)
            print(f"The models for SPIN are NOT checked: {missing}")
            return 0 if passed else 1

    searches = [search for search in SEARCHES if search.model in chosen]
    print(f"{'model':12} {'parameters':42} {'states':>10} {'depth':>8} {'time':>8}  result")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for search, outcome in zip(searches, pool.map(run_search, searches), strict=True):
            good, result = verdict(search, outcome)
            passed = passed and good
            print(
                f"{search.model:12} {search.parameters:42} {outcome.states:>10,}"
                f" {outcome.depth:>8,} {outcome.seconds:>6.1f} s  {result}",
                flush=True,
            )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
