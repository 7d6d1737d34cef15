"""Compiles the sharded GEMM for GPUs that need not be present, with the package's launcher.

What was compiled is kept in ``build/aot``, by a hash of all that it depends on.
"""

import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import os
import pickle
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipekernels.triton_kernels.config import SLAB_BLOCKS, TILES, Blocks, Config
from support.kernels.operands import LAYOUTS, dtype_of, operands
from support.programs import run

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "build" / "aot"
OLDEST = ROOT / "build" / "oldest-triton"  # See the Makefile.
PINNED = ROOT / "constraints-oldest.txt"
SOURCES = [
    *(ROOT / "pipekernels" / "triton_kernels").glob("*.py"),
    *Path(__file__).parent.glob("*.py"),
]


class Case(NamedTuple):
    """One compilation.

    ``variant`` is one of a linear layer's three products: ``forward`` (with bias and residual, or
    with scales for float8), ``grad_input`` or ``grad_weight``; ``odd``, ``forward`` with odd
    sizes; or ``unit``, ``forward`` with all sizes 1, which Triton compiles in as constants.
    """

    architecture: int  # Compute capability to compile for; 90 for sm_90.
    generation: int  # The architecture whose table of blocks is used.
    precision: str
    blocks: Blocks
    split: bool  # Whether several programs share a tile (split-K).
    variant: str


class SlabCase(NamedTuple):
    """One compilation of the kernel of products by slabs."""

    architecture: int  # Compute capability, and generation.
    precision: str
    slabs: int
    odd: bool  # Whether slabs are no multiples of a block, and sizes no multiples of 16.
    layout: str  # Which of a linear layer's three products it is.


AnyCase = Case | SlabCase


class Box(NamedTuple):
    """The block that a tensor descriptor moves at a time."""

    rows: int
    width: int  # Bytes per row.
    span: int  # Bytes per swizzle span.


class Kernel(NamedTuple):
    """A compiled kernel and its resources."""

    ptx: str
    sass: str
    report: str  # Of ptxas.
    shared: int  # Bytes.
    scratch: int  # Bytes of device memory per program; a launch would have to allocate them.
    boxes: list[Box]


def use(version: str, cache: str) -> None:
    """Let this process compile with the ``installed`` Triton or with the ``oldest`` one.

    ``cache`` is a folder for what it compiles; ptxas reports only on what is not there yet.
    """
    assert "triton" not in sys.modules
    os.environ["TRITON_CACHE_DIR"] = cache
    if version == "oldest":
        sys.path.insert(0, str(OLDEST))


def version() -> str:
    """That of the Triton in use."""
    import triton

    return triton.__version__


def oldest_version() -> str:
    """That of the oldest Triton, as it is pinned."""
    pinned = re.search(r"triton==(\S+)", PINNED.read_text())
    return pinned[1]


@functools.cache
def _sources(version: str) -> str:
    """Hash of the sources and the Triton that kernels are compiled from."""
    triton = oldest_version() if version == "oldest" else importlib.metadata.version("triton")
    digest = hashlib.sha256(f"{triton} {sys.version_info[:2]}".encode())
    for path in sorted(SOURCES):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def path_of(version: str, case: AnyCase) -> Path:
    """The file that keeps what :func:`build_and_keep` has compiled."""
    name = f"{_sources(version)} {case}"
    return KEPT / f"{hashlib.sha256(name.encode()).hexdigest()}.pickle.gz"


def read(path: Path) -> Kernel:
    """What :func:`build_and_keep` has written."""
    kernel = pickle.loads(gzip.decompress(path.read_bytes()))
    assert isinstance(kernel, Kernel)
    return kernel


def cases() -> list[Case]:
    """Every configuration of the table."""
    found = []
    for (generation, precision), tiles in TILES.items():
        architecture = 89 if (generation, precision) == (80, "float8_e4m3fn") else generation
        variants = ["forward", "grad_input", "grad_weight"]
        if precision == "float8_e4m3fn":  # It has no gradients.
            variants = ["forward"]
        if precision == "float16":  # Differs from bfloat16 only in the types of some instructions.
            variants = ["grad_weight"]
        whole = (tiles.few, tiles.middle, tiles.many)
        these = [(blocks, False, variant) for blocks in whole for variant in variants]
        these += [(tiles.few, True, variant) for variant in variants]
        if precision == "bfloat16":  # The last tiles of a product of many rows may be split.
            these += [(tiles.middle, True, variant) for variant in variants]
        these += [(tiles.unaligned, False, "odd")]
        if precision == "bfloat16":
            these += [(tiles.unaligned, False, "unit")]
        found += [Case(architecture, generation, precision, *this) for this in dict.fromkeys(these)]
    return found


def slab_cases(version: str) -> list[SlabCase]:
    """For a Triton: whole and cut products, by descriptors and by pointers."""
    found = []
    for architecture, precision in itertools.product((80, 90, 100), SLAB_BLOCKS):
        found.append(SlabCase(architecture, precision, 8, False, "forward"))
        if version == "installed" and precision != "float16":
            layouts = LAYOUTS if precision == "bfloat16" else LAYOUTS[2:]
            found += [SlabCase(architecture, precision, 1, False, layout) for layout in layouts]
            found.append(SlabCase(architecture, precision, 8, True, "forward"))
    return found


def for_many_rows() -> list[Case]:
    """For each generation and precision, by which products, sums and loads differ, the
    configuration for many rows, by descriptors and by pointers, in one variant each."""
    groups: dict[tuple[Any, ...], Case] = {}
    for case in cases():
        is_odd = case.variant == "odd"
        if is_odd or (case.blocks == TILES[case[1:3]].many and case.variant != "unit"):
            groups.setdefault((*case[:3], is_odd), case)
    return list(groups.values())


def gate_cases() -> list[Case]:
    """For sm_90 each precision by descriptors, and bfloat16 by pointers."""
    own = [each for each in for_many_rows() if each.architecture == 90]
    return [each for each in own if each.precision == "bfloat16" or each.variant == "forward"]


def gate_slab_cases() -> list[SlabCase]:
    """For sm_90, by descriptors and by pointers."""
    own = [case for case in slab_cases("installed") if case.architecture == 90]
    return [case for case in own if case.precision == "bfloat16" and case.slabs == 8]


def build(case: AnyCase) -> Kernel | str:
    """Compile ``case``; returns the compiler's message if that fails."""
    import triton

    from support.kernels.recorded import compiled

    triton.knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            if isinstance(case, SlabCase):
                (kernel,) = compiled(case.architecture, lambda: _launch_slabs(case), "slab_kernel")
            else:
                (kernel,) = compiled(case.architecture, lambda: _launch(case))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    found = kernel.metadata
    boxes = [
        Box(rows, columns * meta["elem_size"], 16 << meta["swizzle"])
        for meta in found.tensordesc_meta or []
        for rows, columns in [meta["block_size"]]
    ]
    sass = _disassembled(kernel.asm["cubin"])
    report, scratch = log.getvalue(), found.global_scratch_size
    return Kernel(kernel.asm["ptx"], sass, report, found.shared, scratch, boxes)


def build_and_keep(version: str, case: AnyCase) -> Kernel | str:
    """As :func:`build`; a kernel is kept for later sessions. Any number of processes may do so."""
    kernel = build(case)
    if isinstance(kernel, Kernel):
        path = path_of(version, case)
        KEPT.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(gzip.compress(pickle.dumps(kernel), compresslevel=1))
        part.replace(path)
    return kernel


def _launch(case: Case) -> None:
    from pipekernels.triton_kernels.launch import Product, launch

    blocks, odd = case.blocks, case.variant == "odd"
    m, n, k = (3 * size + odd for size in (blocks.m, blocks.n, 4 * blocks.k))
    if case.variant == "unit":
        m = n = k = 1
    dtype = dtype_of(case.precision)
    scaled = dtype == torch.float8_e4m3fn
    out = torch.empty(m, n, dtype=torch.bfloat16 if scaled else dtype)
    added = {"scale_a": torch.empty(m), "scale_b": torch.empty(n)} if scaled else {}
    if case.variant in ("odd", "unit") or (case.variant == "forward" and not scaled):
        added |= {"bias": torch.empty_like(out[0]), "residual": torch.empty_like(out)}
    config = Config(blocks, split_k=2 if case.split else 1)
    a, b = operands(case.variant, m, n, k, dtype, torch.empty)
    product = Product(case.precision, a, b, out, **added)
    launch(product, config, generation=case.generation, sms=4)


def _launch_slabs(case: SlabCase) -> None:
    from pipekernels.triton_kernels.launch import Product, launch_slabs

    blocks = SLAB_BLOCKS[case.precision]
    m, n, depth = (3 * size + case.odd for size in (blocks.m, blocks.n, 4 * blocks.k))
    dtype = dtype_of(case.precision)
    a, b = operands(case.layout, m, n, case.slabs * depth, dtype, torch.empty)
    out = torch.empty(m, n, dtype=torch.float32 if case.slabs > 1 else dtype)
    bias = torch.empty(n, dtype=dtype) if case.slabs == 1 else None
    product = Product(case.precision, a, b, out, bias)
    launch_slabs(product, case.slabs, generation=case.architecture)


def _disassembled(cubin: bytes) -> str:
    """The instructions, by the nvdisasm that Triton ships."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return run(tool, "-c", file.name).stdout
