"""Rules on the machine code of the CUDA kernels. No GPU is needed, but a CUDA toolkit is."""

import importlib.util
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

import pytest
from support.emitted import rules
from support.emitted.sass import Kernel
from support.emitted.sass import kernels as kernels_of
from support.programs import run

pytestmark = [pytest.mark.native]

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
CHECKED = ROOT / "build" / "cuda-check"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

ENTRY = re.compile(r"\.entry (\w+)\(.*?(?=\.entry |\Z)", re.DOTALL)
RESOURCES = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
COLLECTIVES = CSRC / "cuda" / "collectives"
WRONG = Path(rules.__file__).with_name("wrong.cu")

# The accesses of device_team.cuh that order others, as PTX has them. All of them are needed.
ORDERED = {
    "ld.acquire.sys.global",
    "ld.relaxed.sys.global",
    "st.release.sys.global",
    "atom.acq_rel.gpu.global.exch",
    "fence.acq_rel.sys",
}
# Of words that hold data and flag, which nothing needs to order: OneShotBlock::pushed().
PUSH = "st.relaxed.sys.global"


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
        for kernel in kernels_of(run(disassemble, "-c", cubin).stdout):
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


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> list[Emitted]:
    """All kernels, for all architectures that there are."""
    return read(built_objects(), tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=ARCHITECTURES)
def kernels(emitted: list[Emitted], request: pytest.FixtureRequest) -> list[Emitted]:
    """All kernels for one architecture."""
    found = [kernel for kernel in emitted if kernel.architecture == request.param]
    if not found:
        skip(f"nothing was built for {request.param}; `make cuda-check` does")
    return found


@pytest.fixture
def collectives(kernels: list[Emitted]) -> list[Emitted]:
    stems = {path.stem for path in COLLECTIVES.rglob("*.cu")}
    return [kernel for kernel in kernels if kernel.file in stems]


def broken(kernels: list[Emitted], rule: Callable[[Emitted], object]) -> dict[str, object]:
    """What breaks a rule, by kernel."""
    assert kernels
    return {kernel.name: found for kernel in kernels if (found := rule(kernel))}


def pushes(kernel: Emitted) -> bool:
    """Whether it is the all-reduce in one step, in rank order."""
    return re.search(r"one_shot_kernel.*OrderE0E", kernel.name) is not None


RULES: dict[str, Callable[[Emitted], object]] = {
    "non-coherent loads": lambda kernel: rules.non_coherent_loads(kernel.sass),
    "non-coherent loads of PTX": lambda kernel: rules.non_coherent_loads_of_ptx(kernel.ptx),
    "accesses": lambda kernel: set(rules.ordered_accesses(kernel.ptx)) - ORDERED,
    "stores": lambda kernel: rules.unfenced_stores(kernel.sass),
    "exchanges": lambda kernel: rules.unfenced_exchanges(kernel.sass),
    "polls": lambda kernel: rules.polls_without_acquire(kernel.ptx),
    "invalidations": lambda kernel: rules.lost_invalidations(kernel.sass, kernel.ptx),
    "local memory": lambda kernel: rules.local_memory(kernel.sass),
    "stack": lambda kernel: kernel.stack_bytes,
}
OF_COLLECTIVES = ["non-coherent loads", "non-coherent loads of PTX", "exchanges", "polls"]


@pytest.mark.parametrize("rule", [*OF_COLLECTIVES, "invalidations"])
def test_collectives_break_no_rule(collectives: list[Emitted], rule: str) -> None:
    assert not broken(collectives, RULES[rule])


@pytest.mark.parametrize("rule", ["stack", "local memory"])
def test_no_kernel_keeps_data_in_local_memory(kernels: list[Emitted], rule: str) -> None:
    assert not broken(kernels, RULES[rule])


def test_collectives_order_accesses_by_those_of_the_team_only(collectives: list[Emitted]) -> None:
    def others(kernel: Emitted) -> set[str]:
        expected = ORDERED | {PUSH} if pushes(kernel) else ORDERED
        return set(rules.ordered_accesses(kernel.ptx)) ^ expected

    assert not broken(collectives, others)


def test_a_fence_of_system_scope_comes_before_every_release(collectives: list[Emitted]) -> None:
    others = [kernel for kernel in collectives if not pushes(kernel)]
    pushing = [kernel for kernel in collectives if pushes(kernel)]
    assert not broken(others, RULES["stores"])
    assert not broken(pushing, lambda kernel: rules.lost_fences(kernel.sass, kernel.ptx))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Emitted]]:
    """The kernels of wrong.cu, by name."""
    folder = tmp_path_factory.mktemp("wrong")
    generations = [name.removeprefix("sm_") for name in ARCHITECTURES]
    run(
        compiler(), "-std=c++17", "-O3", "-c", WRONG, "-o", folder / "wrong.cu.o",
        *(f"-gencode=arch=compute_{n},code=[compute_{n},sm_{n}]" for n in generations),
    )  # fmt: skip
    found: dict[str, list[Emitted]] = {}
    for kernel in read([folder / "wrong.cu.o"], folder):
        found.setdefault(kernel.name, []).append(kernel)
    assert all(len(found[name]) == len(ARCHITECTURES) for name in found)
    return found


BREAKS = {
    "right": set(),
    "non_coherent": {"non-coherent loads", "non-coherent loads of PTX"},
    "array_in_memory": {"local memory", "stack"},
    "no_fence": {"accesses", "stores"},
    "fence_of_the_device": {"accesses", "stores"},
    "fence_on_one_way": {"accesses", "stores"},
    "fence_before_the_data": {"accesses", "stores"},
    "relaxed_exchange": {"accesses", "exchanges"},
    "poll_without_acquire": {"polls"},
    "volatile_poll": {"accesses"},
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_rules_find_what_breaks_them(wrong: dict[str, list[Emitted]], name: str) -> None:
    for kernel in wrong[name]:
        assert {rule for rule, find in RULES.items() if find(kernel)} == BREAKS[name], kernel


def test_a_lost_invalidation_is_found(wrong: dict[str, list[Emitted]]) -> None:
    for polls, acquires in zip(wrong["poll_without_acquire"], wrong["right"], strict=True):
        assert rules.lost_invalidations(polls.sass, acquires.ptx) == 1
