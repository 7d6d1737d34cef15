"""Launches of the Triton kernels, checked by a driver without a GPU: runs
tests/support/kernels/launched.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.compile
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_all_launches_keep_the_drivers_rules(level: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", minversion="3.6")
    compiler = shutil.which("gcc") or shutil.which("clang")  # As Triton's launcher needs.
    if compiler is None:
        pytest.skip("there is no C compiler")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = TESTS / "support" / "cuda" / "stub_driver.c"
    warnings = ["-Wall", "-Werror", "-Wno-sign-compare"]
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run([compiler, *warnings, f"-I{headers}", source, *library], check=True, timeout=60)
    paths = [TESTS.parent, TESTS, os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", level,
         TESTS / "support" / "kernels" / "launched.py"],
        cwd=TESTS, capture_output=True, text=True, timeout=880, check=False,
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths)),
             "TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path),
             "TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
