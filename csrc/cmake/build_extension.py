"""Configures and builds ``_C`` with CMake and Ninja: for setup.py, and where there is no setuptools for it.

``python csrc/cmake/build_extension.py`` puts it into ``pipekernels/``. Environment: ``PIPEKERNELS_CUDA`` = auto | 0 |
1, ``CUDAARCHS`` or ``TORCH_CUDA_ARCH_LIST``, ``MAX_JOBS``, ``PIPEKERNELS_WERROR`` and
``PIPEKERNELS_KERNEL_REPORT`` = 0 | 1.
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

# Variables that CMake reads when a folder is new, and never again.
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
    """Build ``_C`` into ``folder``; incremental, in build/cmake-<python>.

    Raises:
        RuntimeError: CMake or Ninja is missing.
        subprocess.CalledProcessError: one of them failed; it has said why.
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
    subprocess.run(
        [cmake, "-G", "Ninja", "-S", ROOT / "csrc", "-B", build_dir, *definitions], check=True
    )
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    subprocess.run([cmake, "--build", build_dir, "--target", "_C", "-j", jobs], check=True)


def renew(build_dir: Path) -> None:
    """Make ``build_dir`` an empty folder, unless it was made here and with the same compilers.

    CMake refuses one that was copied or moved, and stays with the compilers and flags of an old one.
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
    """Path of ``cmake`` or ``ninja``: that of the Python package of this name first, then PATH.

    Raises:
        RuntimeError: there is none.
    """
    places = []
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        places = [package / "data" / "bin", package.parent / "bin"]  # The latter: pip --target.
    places.append(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join(map(str, places))) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} was not found: pip install {name}")
    return found


if __name__ == "__main__":
    build(ROOT / "pipekernels")
