"""The compilers that build csrc, besides the system's."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.programs import run

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]


def tool(name: str) -> str:
    """Path of a tool in the folder of the Python executable, or else on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "compiler", ["g++-11", "g++-12", "g++-13", "g++-14", "clang++", "aarch64-linux-gnu-g++"]
)
def test_compiles_with(compiler: str, tmp_path: Path) -> None:
    """The extension's code and its C++ tests, without Python, with warnings as errors."""
    path = shutil.which(compiler)
    if path is None:
        pytest.skip(f"{compiler} is not installed")
    if Path(path).resolve() == Path(shutil.which("c++") or "").resolve():
        pytest.skip(f"{compiler} is the system's compiler, which builds everything else")
    options = [
        *("CMAKE_BUILD_TYPE=Debug", f"CMAKE_MAKE_PROGRAM={tool('ninja')}"),
        f"Python_EXECUTABLE={sys.executable}",  # Beside which a compiler cache may lie.
        *("PIPEKERNELS_CUDA=0", "PIPEKERNELS_PYTHON=OFF"),
        *("PIPEKERNELS_TESTS=ON", "PIPEKERNELS_WERROR=ON"),
    ]
    if compiler.startswith("aarch64"):
        options += ["CMAKE_SYSTEM_NAME=Linux", "CMAKE_SYSTEM_PROCESSOR=aarch64"]
    cmake, environment = tool("cmake"), os.environ | {"CXX": path}
    definitions = [f"-D{option}" for option in options]
    run(cmake, "-G", "Ninja", "-S", ROOT / "csrc", "-B", tmp_path, *definitions, env=environment)
    run(cmake, "--build", tmp_path)
