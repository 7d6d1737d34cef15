"""Runs a CUDA compiler, and writes to stderr how much processor time that took.

A launcher for CMake (``CMAKE_CUDA_COMPILER_LAUNCHER``); kernel_report.py reads what it writes. A
compiler cache may stand between the two: what comes from a cache takes next to no time.
"""

from __future__ import annotations

import resource
import subprocess
import sys


def main() -> int:
    """Returns the exit code of the compiler."""
    command = sys.argv[1:]
    code = subprocess.run(command, check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    architectures = sum(argument.startswith("--generate-code=") for argument in command)
    print(
        f"{command[command.index('-c') + 1]} took {used.ru_utime + used.ru_stime:.1f} CPU-seconds "
        f"for {max(1, architectures)} architectures",
        file=sys.stderr,
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
