"""The report on the resources of CUDA kernels, from the compiler's log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

SCRIPT = Path(__file__).parents[2] / "csrc" / "cmake" / "kernel_report.py"
LOG = """\
ptxas info    : Compiling entry function '_ZN11pipekernels6kernelEv' for 'sm_90'
ptxas info    : Function properties for _ZN11pipekernels6kernelEv
    {stack} bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem
"""


@pytest.mark.parametrize(
    ("stack", "spills", "architecture", "code"),
    [(0, 0, "90", 0), (8, 0, "90", 1), (8, 8, "90", 1), (0, 0, "100", 1)],
)
def test_memory_per_thread_and_missing_architectures_are_failures(
    tmp_path: Path, stack: int, spills: int, architecture: str, code: int
) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG.format(stack=stack, spills=spills))
    done = subprocess.run(
        [sys.executable, SCRIPT, log, "--require", architecture],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    row = done.stdout.splitlines()[1].split()
    assert row == ["kernel", "sm_90", "40", "512", str(spills), str(stack)]
