"""Runs a file of tests in Triton's interpreter, in a process of its own: TRITON_INTERPRET must be
set when kernels are defined."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1]


def run_interpreted(file: str, limit: float = 110) -> None:
    """Run the tests in ``file`` of tests/support, for at most ``limit`` seconds; skip if the
    interpreter does not work here."""
    pytest.importorskip("triton", minversion="3.6")
    paths = [str(SUPPORT.parents[1]), str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=SUPPORT, capture_output=True, text=True, timeout=limit, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(paths)},
    )  # fmt: skip
    reason = re.search(r"SKIPPED .*: (.* does not work .*)", result.stdout)
    if result.returncode == 5 and reason:
        pytest.skip(reason[1])
    assert result.returncode == 0, result.stdout + result.stderr
