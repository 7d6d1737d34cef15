"""Launches of the Triton kernels, checked by a driver without a GPU."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.kernels.interpreter import run_apart
from support.programs import run

SOURCE = Path(__file__).parents[1] / "support" / "cuda" / "stub_driver.c"


@pytest.mark.compile
@pytest.mark.processes
@pytest.mark.parametrize("level", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_all_launches_keep_the_drivers_rules(level: str, tmp_path: Path) -> None:
    triton = find_spec("triton")
    compiler = shutil.which("gcc") or shutil.which("clang")  # As Triton's launcher needs.
    if compiler is None or triton is None or triton.origin is None:
        pytest.skip("there is no C compiler, or no Triton")
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    options = ["-Wall", "-Werror", "-Wno-sign-compare", "-shared", "-fPIC", f"-I{headers}"]
    name = "libcuda.so.1"
    run(compiler, *options, SOURCE, f"-Wl,-soname,{name}", "-o", tmp_path / name)
    folder = str(tmp_path)
    run_apart(
        "launched.py", level, TRITON_LIBCUDA_PATH=folder, LD_LIBRARY_PATH=folder,
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
