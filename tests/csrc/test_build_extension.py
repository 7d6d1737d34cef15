"""The build: where it finds tools, CUDA or not, failures, source distributions."""

import importlib.util
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from support.programs import python, run

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "csrc" / "cmake" / "build_extension.py"


@pytest.fixture
def script() -> ModuleType:
    pytest.importorskip("pybind11")
    spec = importlib.util.spec_from_file_location("build_extension", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool(folder: Path, name: str = "sometool", script: str = "") -> str:
    """Create an executable; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


def configure(
    script: ModuleType, folder: Path, *options: str, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run CMake in ``folder``, as for the code without Python."""
    command = [script.find_tool("cmake"), "-S", ROOT / "csrc", "-B", folder, "-G", "Ninja"]
    ninja = f"-DCMAKE_MAKE_PROGRAM={script.find_tool('ninja')}"
    return run(*command, ninja, "-DPIPEKERNELS_PYTHON=OFF", *options, code=None, env=environment)


def test_other_systems_than_linux_are_refused(script: ModuleType, tmp_path: Path) -> None:
    configured = configure(script, tmp_path, "-DCMAKE_SYSTEM_NAME=FreeBSD")
    assert configured.returncode != 0
    assert "pipekernels needs Linux" in configured.stderr


CPUS_ONLY = "no GPU is visible: building for CPUs only; PIPEKERNELS_CUDA=1 builds the CUDA part"
UNSET = ("CUDAARCHS", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH", "CUDAHOSTCXX", "CXX")


@pytest.fixture
def decide(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """What CudaToolchain.cmake decides, with a toolkit whose compiler compiles nothing."""
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    toolkit = tmp_path / "toolkit"
    nvcc = tool(toolkit / "bin", "nvcc", f'[ "$1" = --dryrun ] && echo "#$ TOP={toolkit}"')
    monkeypatch.setenv("CUDACXX", nvcc)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")

    def decision(cuda: str, nvidia_smi: str, **environment: str) -> str:
        tool(tmp_path / "path", "nvidia-smi", nvidia_smi)
        option = f"-DPIPEKERNELS_CUDA={cuda}"
        configure(script, tmp_path / "build", option, environment=os.environ | environment)
        text = (tmp_path / "build" / "cuda.txt").read_text().strip()
        return text.replace(str(toolkit.resolve()), "TOOLKIT")

    return decision


@pytest.mark.parametrize(
    ("nvidia_smi", "decision"),
    [
        ("echo 9.0; echo 9.0", "CUDA toolkit TOOLKIT, architectures 90"),
        ("echo 10.0; echo 9.0", "CUDA toolkit TOOLKIT, architectures 90-real;100"),
        ("echo No devices were found", CPUS_ONLY),
        ("echo 9.0; exit 9", CPUS_ONLY),
    ],
)
def test_the_gpus_that_are_visible_are_built_for(
    decide: Callable[..., str], nvidia_smi: str, decision: str
) -> None:
    assert decide("auto", nvidia_smi) == decision


def test_named_architectures_and_the_switch_come_before_visible_gpus(
    decide: Callable[..., str],
) -> None:
    one, none = "echo 9.0", "exit 1"
    assert decide("auto", one, CUDAARCHS="80") == "CUDA toolkit TOOLKIT, architectures 80"
    named = {"TORCH_CUDA_ARCH_LIST": "8.0 9.0a+PTX"}
    assert decide("auto", none, **named) == "CUDA toolkit TOOLKIT, architectures 80-real;90a"
    assert decide("1", one) == "CUDA toolkit TOOLKIT, all architectures"
    assert decide("0", one) == "PIPEKERNELS_CUDA=0: building for CPUs only"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what an installation reads."""
    unread = shutil.ignore_patterns("__pycache__", "*.so", "tests", "model")
    for name in ("csrc", "pipekernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unread)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pipekernels_autoload.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def last_line(tree: Path, *command: str, **environment: str) -> str:
    """The last line of a build that fails."""
    pytest.importorskip("pybind11")
    pytest.importorskip("setuptools")
    inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment = inherited | {"MAX_JOBS": "1"} | environment
    done = python(*command, code=1, cwd=tree, env=environment)
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("pipekernels: the build has failed, the errors are above")
    return line


BY_SETUPTOOLS = ("setup.py", "-q", "build_ext", "--inplace")
BY_SCRIPT = ("csrc/cmake/build_extension.py",)


@pytest.mark.parametrize("command", [BY_SETUPTOOLS, BY_SCRIPT])
def test_a_broken_compiler_is_named_last(tree: Path, command: tuple[str, ...]) -> None:
    line = last_line(tree, *command, CXX="/bin/false", PIPEKERNELS_CUDA="1")
    assert "(C++ compiler /bin/false); set CXX to another" in line


def test_a_toolkit_that_cannot_compile_is_named_last(tree: Path) -> None:
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CUDACXX")]
    installed = Path("/usr/local").glob("cuda*/bin/nvcc")
    if not (shutil.which("nvcc") or any(roots) or any(installed)):
        pytest.skip("there is no CUDA toolkit; set CUDA_HOME to its root")
    broken = {"CUDAARCHS": "90", "CUDAHOSTCXX": "/bin/false"}
    line = last_line(tree, *BY_SCRIPT, PIPEKERNELS_CUDA="auto", **broken)
    assert "(CUDA toolkit /" in line
    assert "architectures 90, C++ compiler c++, CUDA host compiler /bin/false); " in line
    assert line.endswith("or PIPEKERNELS_CUDA=0 to build without CUDA")


def test_a_source_distribution_has_all_files_for_builds_and_contributors(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    python("setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {"setup.py", "pyproject.toml"} <= names
    assert {name for name in sources if "__pycache__" not in name} <= names
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"}
    assert pages | {".ci/run", "docs/index.md", "tests/conftest.py", "bench/harness.py"} <= names
    unwanted = ("build/", ".venv")
    assert not [name for name in names if name.startswith(unwanted) or name.endswith(".pyc")]
    listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", code=None)
    if (ROOT / ".git").exists() and listed.returncode == 0:
        tracked = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
        assert tracked - names == {".gitignore"}
