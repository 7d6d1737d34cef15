"""Configures and builds ``_C`` with CMake and Ninja, for setup.py or without setuptools.

``python csrc/cmake/build_extension.py`` builds it into ``pipekernels/``. Environment variables:
``PIPEKERNELS_CUDA`` = auto | 0 | 1, ``CUDAARCHS`` or ``TORCH_CUDA_ARCH_LIST``, ``MAX_JOBS``,
``PIPEKERNELS_WERROR`` and ``PIPEKERNELS_KERNEL_REPORT`` = 0 | 1.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parent.parent.parent

# Variables that CMake reads only when it first configures a build folder.
COMPILERS = (
    "CXX",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDACXX",
    "CUDAFLAGS",
    "CUDAHOSTCXX",
    "CUDA_HOME",
    "CUDA_PATH",
)


def build(folder: Path) -> None:
    """Build ``_C`` into ``folder``, incrementally in build/cmake-<python>.

    Raises:
        RuntimeError: CMake or Ninja is missing, or has failed and printed the reason.
    """
    build_dir = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    cmake = find_tool("cmake")
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": folder,
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "PIPEKERNELS_CUDA": os.environ.get("PIPEKERNELS_CUDA", "auto"),
        "PIPEKERNELS_WERROR": os.environ.get("PIPEKERNELS_WERROR", "0"),
        "PIPEKERNELS_KERNEL_REPORT": os.environ.get("PIPEKERNELS_KERNEL_REPORT", "0"),
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    renew(build_dir)
    (build_dir / "cuda.txt").unlink(missing_ok=True)
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    for command in (
        ["-G", "Ninja", "-S", ROOT / "csrc", "-B", build_dir, *definitions],
        ["--build", build_dir, "--target", "_C", "-j", jobs],
    ):
        if subprocess.run([cmake, *command], check=False).returncode != 0:
            raise RuntimeError(failure(build_dir))


def failure(build_dir: Path) -> str:
    """Says in a line what was built with in ``build_dir``, and what to change."""
    tools = f"C++ compiler {os.environ.get('CXX', 'c++')}"
    remedy = "set CXX to another compiler (GCC 11, Clang 14, or newer)"
    decision = build_dir / "cuda.txt"  # of CudaToolchain.cmake
    cuda = decision.read_text().strip() if decision.exists() else ""
    if cuda.startswith("CUDA toolkit"):
        tools = f"{cuda}, {tools}"
        remedy += ", CUDAARCHS to other architectures, or PIPEKERNELS_CUDA=0 to build without CUDA"
    host_compiler = os.environ.get("CUDAHOSTCXX")
    if host_compiler is not None:
        tools += f", CUDA host compiler {host_compiler}"
    return f"the build has failed, the errors are above ({tools}); {remedy}"


def renew(build_dir: Path) -> None:
    """Make ``build_dir`` an empty folder, unless it was made here with the same compilers.

    CMake rejects a build folder that was copied or moved, and ignores new compilers and flags.
    """
    made_with = "\n".join(
        [str(build_dir), *(f"{name}={os.environ.get(name, '')}" for name in COMPILERS)]
    )
    stamp = build_dir / "made_with.txt"
    if stamp.exists() and stamp.read_text() == made_with:
        return
    if build_dir.exists():
        shutil.rmtree(build_dir)
    build_dir.mkdir(parents=True)
    stamp.write_text(made_with)


def find_tool(name: str) -> str:
    """Path of ``cmake`` or ``ninja``, from the Python package of this name, else from PATH.

    Raises:
        RuntimeError: not found.
    """
    places = []
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        # package.parent / "bin" is where `pip install --target` puts it.
        places = [package / "data" / "bin", package.parent / "bin"]
    places.append(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join(map(str, places))) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} was not found: pip install {name}")
    return found


if __name__ == "__main__":
    try:
        build(ROOT / "pipekernels")
    except RuntimeError as error:
        sys.exit(f"pipekernels: {error}")
