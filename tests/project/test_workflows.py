"""The version in other files, the levels of tests, and functions that pytest would not collect."""

import re
from pathlib import Path

import pytest

from pipekernels import __version__

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
MARKERS = set(re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def test_the_version_is_that_of_the_citation_and_of_a_section_in_the_changelog() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased" and __version__ in sections


def test_the_quick_tests_are_in_the_gate_and_have_no_marker_but_cuda() -> None:
    quick, gate = (
        re.findall(rf"^{name} := (.*)$", MAKEFILE, re.MULTILINE)[0] for name in ("QUICK", "GATE")
    )
    assert set(re.findall(r"not (\w+)", quick)) == MARKERS - {"cuda"}
    assert gate == "not full"


def test_every_function_that_looks_like_a_test_is_one() -> None:
    """In a file that pytest collects, or that a collected test runs in another process."""
    tests = {path.name: path.read_text() for path in ROOT.glob("tests/**/*.py")}
    runs = re.compile(r'run_apart\(\s*"(.*?)"')
    run = {name for text in tests.values() for name in runs.findall(text)}
    for name, text in tests.items():
        collected = name.startswith("test_") or name in run
        assert collected or not re.search(r"^(async )?def test_", text, re.MULTILINE), name
