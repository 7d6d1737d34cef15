"""Commands and markers that CONTRIBUTING.md and the workflows name exist; levels of tests."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipekernels import __version__

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {
    name
    for names in re.findall(r"^([\w -]+):(?!=)", MAKEFILE, re.MULTILINE)
    for name in names.split()
}
MARKERS = set(re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def assert_commands_exist(text: str) -> None:
    """``text`` names at least one make target or script of .ci, and all of these exist."""
    targets = set(re.findall(r"(?:^ *|`)make ([a-z][\w-]*)", text, re.MULTILINE))
    scripts = set(re.findall(r"(?<![\w/])\.ci/\w+", text))
    assert targets or scripts
    assert targets <= TARGETS
    assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_workflows_exist(path: Path) -> None:
    import yaml  # Imported here: the other tests must be collected where PyYAML is missing.

    workflow: Any = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    if "cibuildwheel" not in commands:
        assert_commands_exist(commands)


def test_commands_of_the_pages_exist() -> None:
    for page in ("CONTRIBUTING.md", ".github/pull_request_template.md", ".ci/run"):
        assert_commands_exist((ROOT / page).read_text())


def test_markers_of_the_guide_are_registered(pytestconfig: pytest.Config) -> None:
    registered = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert MARKERS and registered >= MARKERS
    assert set(re.findall(r"^\| `(\w+)` \| ", GUIDE, re.MULTILINE)) == MARKERS


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
    runs = re.compile(r'run_(?:interpreted|apart)\(\s*"(.*?)"')
    run = {name for text in tests.values() for name in runs.findall(text)}
    for name, text in tests.items():
        collected = name.startswith("test_") or name in run
        assert collected or not re.search(r"^(async )?def test_", text, re.MULTILINE), name
