"""The quick tests start no process, and each level contains the one before."""

import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(["true"], check=False),
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda: os.fork(),  # Not os.fork itself, which the fixture patches later.
    ],
    ids=["subprocess", "multiprocessing", "fork"],
)
def test_a_test_without_a_marker_may_not_start_a_process(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match="starts a process; give it one of the markers"):
        start()


def test_the_quick_tests_are_in_the_gate_and_have_no_marker_but_cuda() -> None:
    makefile, project = ((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml"))
    quick, gate = (
        re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE)[0] for name in ("QUICK", "GATE")
    )
    registered = set(re.findall(r'^    "(\w+): ', project, re.MULTILINE))
    assert set(re.findall(r"not (\w+)", quick)) == registered - {"cuda"}
    assert gate == "not full"


def test_every_function_that_looks_like_a_test_is_one() -> None:
    """In a file that pytest collects, or that a collected test runs in another process."""
    tests = {path.name: path.read_text() for path in ROOT.glob("tests/**/*.py")}
    runs = re.compile(r'run_(?:interpreted|apart)\(\s*"(.*?)"')
    run = {name for text in tests.values() for name in runs.findall(text)}
    for name, text in tests.items():
        collected = name.startswith("test_") or name in run
        assert collected or not re.search(r"^(async )?def test_", text, re.MULTILINE), name
