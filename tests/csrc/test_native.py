"""The C++ tests of csrc/tests, under the sanitizers.

They run when csrc differs from what has last passed in this checkout.
"""

import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
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


def build(
    folder: Path, *, compiler: str | None = None, targets: Sequence[str] = ("all",), **options: str
) -> None:
    """Build the extension's code and its C++ tests, without Python, with warnings as errors."""
    options |= {
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "Python_EXECUTABLE": sys.executable,  # Beside which a compiler cache may lie.
        "PIPEKERNELS_CUDA": "0",
        "PIPEKERNELS_PYTHON": "OFF",
        "PIPEKERNELS_TESTS": "ON",
        "PIPEKERNELS_WERROR": "ON",
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    environment = os.environ | ({"CXX": compiler} if compiler else {})
    jobs, source = str(len(os.sched_getaffinity(0))), ROOT / "csrc"
    cmake = functools.partial(run, tool("cmake"))
    cmake("-G", "Ninja", "-S", source, "-B", folder, *definitions, env=environment)
    cmake("--build", folder, "-j", jobs, "--target", *targets)


def state_of_csrc() -> str:
    """A hash of the sources and the compiler."""
    digest = hashlib.sha256(run(os.environ.get("CXX", "c++"), "--version").stdout.encode())
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".cpp", ".h", ".cu", ".cuh", ".txt", ".cmake"):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


# What computes addresses and values; all other tests are of protocols.
KERNEL_TESTS = (
    *("cast_test", "device_chunks_test", "expert_product_test", "micro_batch_test"),
    *("micro_batch_tile_test", "reduce_test", "ring_schedule_test", "skinny_gemm_test"),
    "symmetric_heap_test",
)


# In the gate each test runs under the sanitizer that can find something in it: races of protocols,
# wrong addresses of kernels.
@pytest.mark.parametrize(
    ("sanitizers", "tests"),
    [
        ("thread", ()),
        ("address,undefined", KERNEL_TESTS),
        pytest.param("address,undefined", (), marks=pytest.mark.full),
    ],
)
def test_cpp_tests_under(sanitizers: str, tests: tuple[str, ...]) -> None:
    folder = ROOT / "build" / f"native-{sanitizers.replace(',', '-')}"
    passed = folder / f"passed{'-kernels' if tests else ''}.txt"
    state = state_of_csrc()
    if passed.exists() and passed.read_text() == state:
        return
    build(folder, targets=tests or ("all",), PIPEKERNELS_SANITIZE=sanitizers)
    selected = ["-R", f"^({'|'.join(tests)})$"] if tests else []
    run(tool("ctest"), "--test-dir", folder, "--output-on-failure", "-j2", *selected)
    passed.write_text(state)


@pytest.mark.full
def test_code_for_other_processors_than_x86() -> None:
    """Casts, sums and products are the same without its instruction sets."""
    folder = ROOT / "build" / "native-portable"
    targets = ("cast_test", "reduce_test", "skinny_gemm_test")
    build(folder, targets=targets, PIPEKERNELS_PORTABLE="ON", CMAKE_BUILD_TYPE="Debug")
    for target in targets:
        assert b"_avx2" not in (folder / target).read_bytes()  # In the names of functions.
        run(folder / target)


@pytest.mark.full
@pytest.mark.parametrize(
    "compiler", ["g++-11", "g++-12", "g++-13", "g++-14", "clang++", "aarch64-linux-gnu-g++"]
)
def test_compiles_with(compiler: str, tmp_path: Path) -> None:
    path = shutil.which(compiler)
    if path is None:
        pytest.skip(f"{compiler} is not installed")
    if Path(path).resolve() == Path(shutil.which("c++") or "").resolve():
        pytest.skip(f"{compiler} is the system's compiler, which builds everything else")
    options = {"CMAKE_BUILD_TYPE": "Debug"}
    if compiler.startswith("aarch64"):
        options |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64"}
    build(tmp_path, compiler=path, **options)
