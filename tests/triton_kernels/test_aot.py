"""All configurations in the sharded GEMM's tables compile, for GPUs that need not be present.

In the gate the configurations for many rows on sm_90, with the installed Triton; at the full level
all of them in all variants, and those for many rows with the oldest Triton that is supported, where
`make` has put it.
"""

import functools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest
from support.emitted import rules
from support.emitted.sass import kernels
from support.kernels import aot
from support.kernels.operands import LAYOUTS
from support.levels import in_gate

from pipekernels.triton_kernels.config import OLDEST_TRITON, TILES

pytestmark = [pytest.mark.compile]

pytest.importorskip("triton", minversion=OLDEST_TRITON)

SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # Bytes per block.
BULK_STORE = "cp.async.bulk.tensor.2d.global.shared"

Compiled = dict[aot.AnyCase, Future[aot.Kernel | str]]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ProcessPoolExecutor]]:
    """For each Triton at most 8 processes on the cores that other workers leave.

    They start when they are needed.
    """
    context = multiprocessing.get_context("spawn")  # The server of forks has imported Triton.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    pools = {}
    for name in ("installed", "oldest"):
        cache = str(tmp_path_factory.mktemp(name))
        pools[name] = ProcessPoolExecutor(
            min(8, max(1, len(os.sched_getaffinity(0)) - workers + 1)),
            mp_context=context,
            initializer=functools.partial(aot.use, name, cache),
        )
    yield pools
    for pool in pools.values():
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def compiling(
    request: pytest.FixtureRequest, pools: dict[str, ProcessPoolExecutor]
) -> Callable[[str], Compiled]:
    """For a Triton all compilations that the selected tests ask for, begun by the first of them,
    but for what earlier sessions have kept."""

    def begun_or_kept(version: str, case: aot.AnyCase) -> Future[aot.Kernel | str]:
        path = aot.path_of(version, case)
        if not path.exists():
            return pools[version].submit(aot.build_and_keep, version, case)
        kept: Future[aot.Kernel | str] = Future()
        kept.set_result(aot.read(path))
        return kept

    @functools.cache
    def begun(version: str) -> Compiled:
        asked: list[dict[str, Any]] = [
            item.callspec.params
            for item in request.session.items
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        ]
        cases = [each["case"] for each in asked if each.get("version") == version]
        return {case: begun_or_kept(version, case) for case in cases}

    return begun


def name(case: str | aot.Case) -> str:
    if isinstance(case, str):
        return case
    blocks = "x".join(str(int(field)) for field in case.blocks)
    return f"sm{case.architecture}-{case.precision}-{blocks}-{case.variant}" + "-split" * case.split


def built(version: str, case: aot.AnyCase, compiling: Callable[[str], Compiled]) -> aot.Kernel:
    """The compiled kernel, which has all in registers and keeps the limits of descriptors."""
    if version == "oldest" and not aot.OLDEST.exists():
        pytest.skip("`make oldest-triton` fetches the Triton to compile with")
    kernel = compiling(version)[case].result()
    assert isinstance(kernel, aot.Kernel), kernel
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", kernel.report) == [("0", "0")]
    (code,) = kernels(kernel.sass)
    assert not rules.local_memory(code)
    assert kernel.scratch == 0  # Each thread that launches would have to set an allocator.
    for box in kernel.boxes:  # The limits of cuTensorMapEncodeTiled().
        assert box.rows <= 256 and box.width % 16 == 0 and box.width <= box.span
    return kernel


def cases(gate: Sequence[Any], installed: Sequence[Any], oldest: Sequence[Any]) -> list[Any]:
    """Each case with a version of Triton; in the gate are those in ``gate``, installed."""
    every = [("installed", case) for case in installed] + [("oldest", case) for case in oldest]
    return in_gate([("installed", case) for case in gate], every)


@pytest.mark.parametrize(
    ("version", "case"),
    cases(
        aot.gate_cases(),
        aot.cases(),
        aot.for_many_rows(),
    ),
    ids=name,
)
def test_compiles_without_spills(
    version: str, case: aot.Case, compiling: Callable[[str], Compiled]
) -> None:
    kernel = built(version, case, compiling)
    limit = SHARED_MEMORY[case.architecture]
    if case.generation == 80:
        limit = SHARED_MEMORY[89]  # The smallest of all GPUs that use these blocks.
    assert kernel.shared <= limit
    tma = case.generation > 80 and case.variant != "odd"
    assert ("cp.async.bulk.tensor" in kernel.ptx) == tma
    if tma and not case.split and case.variant in LAYOUTS:
        # A tile is stored in the loop that loads the next one, before its barriers are released.
        assert kernel.ptx.rindex(BULK_STORE) < kernel.ptx.index("mbarrier.inval")
    if case.architecture == 90 and case.precision != "float32" and case.blocks.m >= 64:
        check_asynchronous_products(kernel)
    if case.blocks.promote and case.variant == "forward":  # Nothing else is added there.
        sums = case.blocks.m * case.blocks.n // (32 * case.blocks.warps)
        assert len(re.findall(r"\badd\S*\.f32", kernel.ptx)) >= sums


@pytest.mark.parametrize(
    ("version", "case"),
    cases(aot.gate_slab_cases(), aot.slab_cases("installed"), aot.slab_cases("oldest")),
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_products_by_slabs_compile_without_spills(
    version: str, case: aot.SlabCase, compiling: Callable[[str], Compiled]
) -> None:
    kernel = built(version, case, compiling)
    assert kernel.shared <= SHARED_MEMORY[89]
    assert ("cp.async.bulk.tensor" in kernel.ptx) == (case.architecture >= 90 and not case.odd)
    if case.architecture == 90 and case.precision != "float32":
        check_asynchronous_products(kernel)


# What ptxas says where registers of a sum are used before the wait for its products.
EARLY_USE = re.compile(r"wgmma\.mma_async instructions are serialized|warpgroup\.wait is injected")


def check_asynchronous_products(kernel: aot.Kernel) -> None:
    """Nothing reads a sum before the wait for it."""
    assert "wgmma.mma_async" in kernel.ptx and not EARLY_USE.search(kernel.report)


@pytest.mark.full
def test_a_sum_that_is_read_too_early_is_found(pools: dict[str, ProcessPoolExecutor]) -> None:
    """Triton reads it so where a sum in the tensor cores is promoted after several steps."""
    blocks = TILES[90, "float8_e4m3fn"].many._replace(promote=2)
    case = aot.Case(90, 90, "float8_e4m3fn", blocks, False, "forward")
    kernel = pools["installed"].submit(aot.build, case).result()
    assert isinstance(kernel, aot.Kernel) and EARLY_USE.search(kernel.report)


def test_the_oldest_triton_is_the_one_that_the_package_names() -> None:
    named = re.search(r"triton>=([\d.]+)", (aot.ROOT / "pyproject.toml").read_text())
    assert named and named[1] == OLDEST_TRITON
    assert aot.oldest_version().startswith(f"{OLDEST_TRITON}.")


@pytest.mark.full
def test_the_oldest_triton_is_the_pinned_one(pools: dict[str, ProcessPoolExecutor]) -> None:
    if not aot.OLDEST.exists():
        pytest.skip("`make oldest-triton` fetches the Triton to compile with")
    assert pools["oldest"].submit(aot.version).result() == aot.oldest_version()
