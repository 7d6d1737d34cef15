"""Commands, markers and files that CONTRIBUTING.md, the workflows and the hooks name exist."""

import re
import runpy
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
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def parsed(path: Path) -> Any:
    import yaml  # Imported here: the other tests must be collected where PyYAML is missing.

    return yaml.safe_load(path.read_text())


def commands(path: Path) -> list[str]:
    """The shell lines of a workflow."""
    steps = [step for job in parsed(path)["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def assert_commands_exist(text: str) -> None:
    """``text`` names at least one make target or script of .ci, and all of these exist."""
    targets = set(re.findall(r"(?:^ *|`)make ([a-z][\w-]*)", text, re.MULTILINE))
    scripts = set(re.findall(r"(?<![\w/])\.ci/\w+", text))
    assert targets or scripts
    assert targets <= TARGETS
    assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_workflows_exist(path: Path) -> None:
    workflow = parsed(path)
    assert True in workflow  # YAML reads the key 'on' as a boolean.
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 90
    if path.stem == "wheels":
        assert any("cibuildwheel" in line for line in commands(path))
    else:
        assert_commands_exist("\n".join(commands(path)))


def test_commands_of_hooks_exist() -> None:
    for repository in parsed(ROOT / ".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert_commands_exist(hook["entry"])


def test_commands_of_the_pages_exist() -> None:
    for page in ("CONTRIBUTING.md", ".github/pull_request_template.md", ".ci/run"):
        assert_commands_exist((ROOT / page).read_text())


def test_files_of_the_guide_exist() -> None:
    named = re.findall(r"`([\w.*-]+/[\w./*-]*|\w+\.(?:md|py|toml|txt))`", GUIDE)
    files = {name for name in named if "NAME" not in name and not name.startswith("build/")}
    assert len(files) > 30
    assert not [name for name in files if not any(ROOT.glob(name))]


def test_markers_of_the_guide_are_registered(pytestconfig: pytest.Config) -> None:
    registered = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    ours = set(re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert ours and ours <= registered
    assert ours == set(re.findall(r"^\| `(\w+)` \| ", GUIDE, re.MULTILINE))


def test_the_table_of_urls_names_pages_that_exist() -> None:
    tomllib = pytest.importorskip("tomllib")  # Of Python 3.11.
    script = runpy.run_path(str(ROOT / ".ci" / "name_urls.py"))
    named = script["named"]((ROOT / "pyproject.toml").read_text(), "https://example.org/us/it/")
    urls = tomllib.loads(named)["project"]["urls"]
    assert urls.pop("Homepage") == urls.pop("Source") == "https://example.org/us/it"
    for url in urls.values():
        _, blob, file = url.partition("/blob/main/")
        assert (ROOT / file).is_file() if blob else url == "https://example.org/us/it/issues"
    with pytest.raises(ValueError, match="has .project.urls."):
        script["named"](named, "https://example.org")


def test_python_versions_are_those_that_the_pages_call_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    minors = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)", project)]
    assert minors == list(range(minors[0], minors[-1] + 1))
    for page in ("README.md", "docs/index.md"):
        assert f"Python 3.{minors[0]} to 3.{minors[-1]}" in (ROOT / page).read_text()


def test_the_version_is_that_of_the_citation_and_of_a_section_in_the_changelog() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased" and __version__ in sections
