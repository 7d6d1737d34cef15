"""Runs a file of tests in Triton's interpreter, in a process of its own: TRITON_INTERPRET must be
set when kernels are defined."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run_interpreted(file: str, level: str) -> None:
    """Run the tests in ``file`` of this folder that have the markers of ``level``, in at most 280
    seconds; skip if the interpreter does not work here."""
    pytest.importorskip("triton", minversion="3.6")
    tests = FOLDER.parents[1]
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", level, file],
        cwd=FOLDER, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(paths)},
    )  # fmt: skip
    reason = re.search(r"SKIPPED .*: (.* does not work .*)", result.stdout)
    if result.returncode == 5 and reason:
        pytest.skip(reason[1])
    assert result.returncode == 0, result.stdout + result.stderr
