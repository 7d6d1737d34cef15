"""The CUDA kernels as machine code and PTX, from what `make cuda-check` has compiled."""

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

import pytest

from support.emitted.sass import Kernel, kernels
from support.programs import run

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
CHECKED = ROOT / "build" / "cuda-check"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

ENTRY = re.compile(r"\.entry (\w+)\(.*?(?=\.entry |\Z)", re.DOTALL)
RESOURCES = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")


@dataclass(frozen=True)
class Emitted:
    """One kernel as it was compiled for one architecture."""

    name: str  # as the compiler mangles it
    file: str  # without its suffix
    architecture: str
    sass: Kernel
    ptx: str
    registers: int
    stack_bytes: int  # per thread


def skip(reason: str) -> NoReturn:
    """Skip the test; fail where `make cuda-check` runs it, right after it has compiled."""
    if os.environ.get("PIPEKERNELS_TEST_EMITTED"):
        pytest.fail(reason)
    pytest.skip(reason)


def disassembler(name: str) -> Path:
    """cuobjdump or nvdisasm: the toolkit's, or else Triton's."""
    spec = importlib.util.find_spec("triton")
    places = [compiler().parent]
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    for place in places:
        if (place / name).is_file():
            return place / name
    skip(f"{name} is neither in {places[0]} nor in Triton: pip install triton")


def built_objects() -> list[Path]:
    """The objects of all CUDA files; skips the test unless they are those of the sources."""
    sources = [path for name in ("cuda", "include") for path in (CSRC / name).rglob("*.*")]
    newest = max(path.stat().st_mtime for path in sources)
    built = sorted(CHECKED.rglob("*.cu.o"))
    enough = len(built) == sum(path.suffix == ".cu" for path in sources)
    if not enough or min(path.stat().st_mtime for path in built) < newest:
        skip("`make cuda-check` has not compiled the CUDA files as they are")
    return built


def compiler() -> Path:
    """The nvcc that `make cuda-check` has used."""
    for file in CHECKED.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
        match = re.search(r'set\(CMAKE_CUDA_COMPILER "(.+)"\)', file.read_text())
        if match is not None:
            return Path(match[1])
    skip("`make cuda-check` has not run, which finds the CUDA toolkit")


def read(objects: list[Path], folder: Path) -> list[Emitted]:
    """Disassembles all kernels in object files. `folder` is for the files in between."""
    dump, disassemble = disassembler("cuobjdump"), disassembler("nvdisasm")
    for number, path in enumerate(objects):
        (folder / str(number)).mkdir()
        run(dump, "-xelf", "all", "-xptx", "all", path.resolve(), cwd=folder / str(number))

    def read_cubin(cubin: Path) -> list[Emitted]:
        file, architecture = re.findall(r"^([^.]+)\..*?(sm_\d+)", cubin.name)[0]
        resources = {m[0]: m[1:] for m in RESOURCES.findall(run(dump, "-res-usage", cubin).stdout)}
        (ptx,) = cubin.parent.glob(f"*{architecture}.ptx")
        entries = {match[1]: match[0] for match in ENTRY.finditer(ptx.read_text())}
        found = []
        for kernel in kernels(run(disassemble, "-c", cubin).stdout):
            registers, stack, local = map(int, resources[kernel.name])
            found.append(
                Emitted(
                    kernel.name, file, architecture, kernel, entries[kernel.name], registers,
                    stack + local,
                )
            )  # fmt: skip
        return found

    with ThreadPoolExecutor(2) as pool:
        return list(chain.from_iterable(pool.map(read_cubin, sorted(folder.glob("*/*.cubin")))))
