"""Lists the resources of every kernel in a build log (ptxas -v); fails on spills and stack frames.

Also fails if no kernel was compiled for one of the required architectures.
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


def readable(mangled: str) -> str:
    """Demangles to the kernel's name and template arguments, without namespaces and parameters."""
    full = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    full = full.replace("(anonymous namespace)", "").replace("pipekernels::", "")
    plain = re.sub(r"\(\w+\)(?=\d)", "", full)  # Drop the types of template arguments.
    match = re.search(r"(\w+(<[^()]*>)?)\(", plain)
    return match[1] if match else mangled


def main() -> int:
    """Prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--require", nargs="+", default=[], metavar="ARCHITECTURE")
    args = parser.parse_args()
    in_memory, seen = 0, set()
    print(f"{'kernel':<44} {'arch':<7} registers  shared  spills   stack (bytes)")
    for kernel in KERNEL.finditer(args.log.read_text()):
        spilled = int(kernel["stores"]) + int(kernel["loads"])
        shared = re.search(r"(\d+) bytes smem", kernel["rest"])
        print(
            f"{readable(kernel['name']):<44} sm_{kernel['architecture']:<4} "
            f"{kernel['registers']:>9} {shared[1] if shared else 0:>7} {spilled:>7} "
            f"{kernel['stack']:>7}"
        )
        in_memory += spilled + int(kernel["stack"])
        seen.add(kernel["architecture"])
    missing = set(args.require) - seen
    if missing:
        print(f"no kernel was compiled for sm_{', sm_'.join(sorted(missing))}")
    if in_memory:
        print(
            "kernels keep registers or arrays in memory; give them fewer live values, larger "
            "launch bounds, or arrays that are indexed by constants"
        )
    return 1 if in_memory or missing else 0


if __name__ == "__main__":
    sys.exit(main())
