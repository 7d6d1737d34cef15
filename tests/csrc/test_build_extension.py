"""The build script: where it finds tools, stale build folders, and source distributions."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.native

SCRIPT = Path(__file__).parents[2] / "csrc" / "cmake" / "build_extension.py"


@pytest.fixture
def script() -> ModuleType:
    pytest.importorskip("pybind11")
    spec = importlib.util.spec_from_file_location("build_extension", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool(folder: Path) -> str:
    """Create an executable named sometool; returns its path."""
    folder.mkdir(parents=True)
    (folder / "sometool").write_text("#!/bin/sh\n")
    (folder / "sometool").chmod(0o755)
    return str(folder / "sometool")


def test_the_order_in_which_tools_are_searched(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First in the Python package of the tool, last on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(RuntimeError, match="pip install sometool"):
        script.find_tool("sometool")
    on_path = tool(tmp_path / "path")
    assert script.find_tool("sometool") == on_path
    beside_python = tool(tmp_path / "venv")
    assert script.find_tool("sometool") == beside_python
    monkeypatch.syspath_prepend(tmp_path / "site")
    package = tmp_path / "site" / "sometool"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    of_target = tool(tmp_path / "site" / "bin")
    assert script.find_tool("sometool") == of_target
    of_package = tool(package / "data" / "bin")
    assert script.find_tool("sometool") == of_package


def test_a_build_folder_of_another_path_or_compiler_is_cleared(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    here, copy = tmp_path / "here" / "build", tmp_path / "copy" / "build"

    def keeps(build_dir: Path) -> bool:
        (build_dir / "kept").touch()
        script.renew(build_dir)
        return (build_dir / "kept").exists()

    script.renew(here)
    assert keeps(here)
    shutil.copytree(here, copy)
    assert not keeps(copy)
    assert keeps(copy)
    monkeypatch.setenv("CXX", "another")
    assert not keeps(here)
    assert keeps(here)


def test_other_systems_than_linux_are_refused(script: ModuleType, tmp_path: Path) -> None:
    configured = subprocess.run(
        [script.find_tool("cmake"), "-S", SCRIPT.parent.parent, "-B", tmp_path, "-G", "Ninja",
         f"-DCMAKE_MAKE_PROGRAM={script.find_tool('ninja')}", "-DCMAKE_SYSTEM_NAME=FreeBSD"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert configured.returncode != 0
    assert "pipekernels needs Linux" in configured.stderr


def test_a_source_distribution_has_all_files_for_builds_and_contributors(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    root = SCRIPT.parent.parent.parent
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path],
        cwd=root, check=True, capture_output=True,
    )  # fmt: skip
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    sources = {str(path.relative_to(root)) for path in (root / "csrc").rglob("*.*")}
    assert {"setup.py", "pyproject.toml"} <= names
    assert {name for name in sources if "__pycache__" not in name} <= names
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"}
    assert pages | {".ci/run", "docs/index.md", "tests/conftest.py", "bench/harness.py"} <= names
    unwanted = ("build/", ".venv")
    assert not [name for name in names if name.startswith(unwanted) or name.endswith(".pyc")]
    git = ["git", "-C", root, "ls-files", "-z", "--cached"]
    listed = subprocess.run(git, check=False, capture_output=True, text=True)
    if (root / ".git").exists() and listed.returncode == 0:
        tracked = {name for name in listed.stdout.split("\0") if (root / name).is_file()}
        assert tracked - names == {".gitignore"}
