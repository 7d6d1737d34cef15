"""Runs a file of tests in a process of its own, such as in Triton's interpreter: TRITON_INTERPRET
must be set when kernels are defined."""

import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from support.programs import python

FOLDER = Path(__file__).parent


def skip_unless_it_works(launch: Callable[[], object]) -> None:
    """Skip a file of such tests unless a launch of a kernel works."""
    try:
        launch()
    except Exception as error:  # noqa: BLE001
        versions = f"triton {version('triton')}'s interpreter does not work with numpy"
        pytest.skip(f"{versions} {version('numpy')}: {error}", allow_module_level=True)


def run_apart(file: str, level: str, **variables: str) -> None:
    """Run the tests in ``file`` of this folder that have the markers of ``level``, in a process
    with these environment variables; skip if the interpreter does not work."""
    pytest.importorskip("triton", minversion="3.6")
    tests = FOLDER.parents[1]
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **variables, "PYTHONPATH": ":".join(paths)}
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", level, file]
    result = python(*options, code=None, cwd=FOLDER, env=environment)
    reason = re.search(r"SKIPPED .*: (.* does not work .*)", result.stdout)
    if result.returncode == 5 and reason:
        pytest.skip(reason[1])
    assert result.returncode == 0, result.stdout + result.stderr
