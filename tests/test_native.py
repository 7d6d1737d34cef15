"""The C++ tests of csrc/tests, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def tool(name: str) -> str:
    """Path of a tool that pip has installed beside Python, or else the system's."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_cpp_tests_under(sanitizers: str) -> None:
    build = ROOT / "build" / f"native-{sanitizers.replace(',', '-')}"
    options = {
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "PIPEKERNELS_CUDA": "0",
        "PIPEKERNELS_PYTHON": "OFF",
        "PIPEKERNELS_TESTS": "ON",
        "PIPEKERNELS_WERROR": "ON",
        "PIPEKERNELS_SANITIZE": sanitizers,
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    jobs = str(len(os.sched_getaffinity(0)))
    for command in (
        [tool("cmake"), "-G", "Ninja", "-S", ROOT / "csrc", "-B", build, *definitions],
        [tool("cmake"), "--build", build, "-j", jobs],
        [tool("ctest"), "--test-dir", build, "--output-on-failure"],
    ):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
