"""Lists the resources of every kernel in a build log, and the time that every file took.

Fails on spills and stack frames, on files that take too long, and if no kernel was compiled for one
of the required architectures.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<architecture>\w+)'"
    r"(?:(?!Compiling entry function).)*?"
    r"(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"(?:(?!Compiling entry function).)*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
# A line of compile_seconds.py.
COMPILED = re.compile(
    r"^(?P<file>\S+) took (?P<seconds>[\d.]+) CPU-seconds for (?P<count>\d+) architectures$",
    re.MULTILINE,
)
# CPU-seconds per architecture. The slowest file takes some 25, and all take some 150; processors
# differ in speed by a factor of two.
MOST_PER_FILE = 45
MOST_IN_ALL = 200


def readable(mangled: str) -> str:
    """Demangles to the kernel's name and template arguments, without namespaces and parameters."""
    full = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    full = full.replace("(anonymous namespace)", "").replace("pipekernels::", "")
    plain = re.sub(r"\(\w+\)(?=\d)", "", full)  # Drop the types of template arguments.
    match = re.search(r"(\w+(<[^()]*>)?)\(", plain)
    return match[1] if match else mangled


def broken_limits(log: str) -> list[str]:
    """Prints the CPU-seconds per architecture of every file; returns what is beyond its limit."""
    seconds = {
        "/".join(Path(compiled["file"]).parts[-2:]): float(compiled["seconds"])
        / int(compiled["count"])
        for compiled in COMPILED.finditer(log)
    }
    if not seconds:
        return ["the log has no compile times; configure with PIPEKERNELS_KERNEL_REPORT=ON"]
    limits = [(name, took, MOST_PER_FILE) for name, took in seconds.items()]
    limits.append(("all CUDA files", sum(seconds.values()), MOST_IN_ALL))
    print(f"\n{'file':<44} CPU-seconds per architecture")
    for name, took, _ in limits:
        print(f"{name:<44} {took:>11.1f}")
    broken = [
        f"{name} took {took:.1f} CPU-seconds per architecture to compile; the limit is {most}"
        for name, took, most in limits
        if took > most
    ]
    if broken:
        broken.append(
            "inline long functions in fewer places, instantiate fewer kernels, or split the file; "
            "a slow processor takes twice as long as others: compare with an earlier commit on it"
        )
    return broken


def main() -> int:
    """Prints the tables and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--require", nargs="+", default=[], metavar="ARCHITECTURE")
    args = parser.parse_args()
    log = args.log.read_text()
    in_memory, seen = 0, set()
    print(f"{'kernel':<44} {'arch':<7} registers  shared  spills   stack (bytes)")
    for kernel in KERNEL.finditer(log):
        spilled = int(kernel["stores"]) + int(kernel["loads"])
        shared = re.search(r"(\d+) bytes smem", kernel["rest"])
        print(
            f"{readable(kernel['name']):<44} sm_{kernel['architecture']:<4} "
            f"{kernel['registers']:>9} {shared[1] if shared else 0:>7} {spilled:>7} "
            f"{kernel['stack']:>7}"
        )
        in_memory += spilled + int(kernel["stack"])
        seen.add(kernel["architecture"])
    broken = broken_limits(log)
    missing = set(args.require) - seen
    if missing:
        print(f"no kernel was compiled for sm_{', sm_'.join(sorted(missing))}")
    if in_memory:
        print(
            "kernels keep registers or arrays in memory; give them fewer live values, larger "
            "launch bounds, or arrays that are indexed by constants"
        )
    for line in broken:
        print(line)
    return 1 if in_memory or missing or broken else 0


if __name__ == "__main__":
    sys.exit(main())
