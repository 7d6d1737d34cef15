"""All configurations in the sharded GEMM's tables compile, for GPUs that need not be present."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest
from support import aot

from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS
from pipekernels.kernels.table import LAYOUTS

pytestmark = pytest.mark.compile

pytest.importorskip("triton", minversion="3.6")

SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # Bytes per block.
BULK_STORE = "cp.async.bulk.tensor.2d.global.shared"


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """A process per core, at most 8."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=context) as pool:
        yield pool
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def compiling(pool: ProcessPoolExecutor) -> dict[aot.Case, Future[aot.Kernel | str]]:
    """All compilations."""
    return {case: pool.submit(aot.build, case) for case in aot.cases()}


def name(case: aot.Case) -> str:
    blocks = "x".join(map(str, case.blocks))
    return f"sm{case.architecture}-{case.kind}-{blocks}-{case.variant}" + "-split" * case.split


@pytest.mark.parametrize("case", aot.cases(), ids=name)
def test_compiles_without_spills(
    case: aot.Case, compiling: dict[aot.Case, Future[aot.Kernel | str]]
) -> None:
    kernel = compiling[case].result(timeout=110)
    assert isinstance(kernel, aot.Kernel), kernel
    assert kernel.stack == 0, f"{kernel.registers} registers and {kernel.stack} bytes of stack"
    limit = SHARED_MEMORY[case.architecture]
    if case.generation == 80:
        limit = SHARED_MEMORY[89]  # The smallest of all GPUs that use these blocks.
    assert kernel.shared <= limit
    assert kernel.scratch == 0  # Each thread that launches would have to set an allocator.
    for box in kernel.boxes:  # The limits of cuTensorMapEncodeTiled().
        assert box.rows <= 256 and box.width % 16 == 0 and box.width <= box.span
    tma = case.generation > 80 and case.variant != "odd"
    assert ("cp.async.bulk.tensor" in kernel.ptx) == tma
    if case.architecture == 90 and case.kind != "float32" and case.blocks.m >= 64:
        assert "wgmma.mma_async" in kernel.ptx
    if tma and not case.split and case.variant in LAYOUTS:
        # A tile is stored in the loop that loads the next one, before its barriers are released.
        assert kernel.ptx.rindex(BULK_STORE) < kernel.ptx.index("mbarrier.inval")
    if case.variant == "announced":
        store = kernel.ptx.rindex("st.global")
        release = kernel.ptx.rindex(".release.")
        assert "bar.sync" in kernel.ptx[store:release]
        assert BULK_STORE not in kernel.ptx


@pytest.mark.parametrize("architecture", [80, 90])
def test_equal_signatures_have_the_same_kernel(
    architecture: int, pool: ProcessPoolExecutor
) -> None:
    """Otherwise a kernel could be compiled during the capture of a graph."""
    found = pool.submit(aot.kernels_by_signature, architecture).result(timeout=110)
    kernels: dict[Any, set[str]] = {}
    for signature, kernel in found:
        kernels.setdefault(signature, set()).add(kernel)
    assert 1 < len(kernels) < len(found)
    assert all(len(same) == 1 for same in kernels.values())


def test_shipped_tables_choose_only_blocks_that_are_compiled_here() -> None:
    known = {blocks for choice in BLOCKS.values() for blocks in (*choice.whole, *choice.shared)}
    for path in table.FOLDER.glob("*.json"):
        shipped = table.from_json(json.loads(path.read_text()))
        assert {entry.config.blocks for entry in shipped.entries.values()} <= known
