"""The configurations of the sharded GEMM, by generation of GPUs, precision and number of rows; and
what they are chosen by.

Nothing here imports triton. Only a configuration's ``blocks`` are compile-time constants, so the
kernel is compiled for the entries of the table below only. Tests check that every entry fits in
shared memory and spills no registers.

Sums of float8 products: the tensor cores of Hopper and Ada keep fewer bits in them than float32
has. So after at most 128 products they are added to a sum in float32 (``promote``). Hopper's
products run by themselves; there sums are promoted after every step, which waits for its own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from math import ceil
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion

# Of operands; "tfloat32" is float32 rounded to TF32.
PRECISIONS = ["bfloat16", "float16", "tfloat32", "float32", "float8_e4m3fn"]


class Blocks(NamedTuple):
    """Compile-time constants of the kernel.

    Attributes:
        m, n, k: sizes of the blocks of C = A B^T that a program computes at a time.
        warps: per program.
        stages: steps along k in flight.
        parts: in how many parts a tile is stored, a power of two; more of them take fewer registers
            and less shared memory.
        promote: after how many steps the sum in the tensor cores is added to one in float32; 0 if
            the tensor cores keep it.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    parts: int = 1
    promote: int = 0


class Config(NamedTuple):
    """A configuration of the kernel."""

    blocks: Blocks
    group_m: int = 8  # Rows of tiles in a group.
    split_k: int = 1  # How many programs compute one tile together.


class Tiles(NamedTuple):
    """The blocks of a generation of GPUs and a precision, by the rows of C."""

    few: Blocks  # Up to FEW_ROWS; several programs may share a tile.
    middle: Blocks  # Up to MIDDLE_ROWS.
    many: Blocks
    unaligned: Blocks = Blocks(64, 64, 32, 4, 2)  # For operands that are read element by element.


FEW_ROWS, MIDDLE_ROWS = 16, 1024
LEAST_STEPS = 8  # Along k, of a program that shares its tile.

# Those of bfloat16 for 90 are the fastest in most classes of rows that an H200 has measured; all
# others are estimates.
TILES: dict[tuple[int, str], Tiles] = {
    (80, "bfloat16"): Tiles(
        few=Blocks(16, 64, 128, 4, 4),
        middle=Blocks(128, 128, 32, 4, 4, parts=2),
        many=Blocks(128, 256, 32, 8, 3, parts=2),
    ),
    (80, "tfloat32"): Tiles(
        few=Blocks(16, 64, 64, 4, 3),
        middle=Blocks(64, 64, 32, 4, 4),
        many=Blocks(128, 128, 32, 8, 3),
    ),
    (80, "float8_e4m3fn"): Tiles(
        # Triton makes a product and an addition after every step one instruction here.
        few=Blocks(16, 64, 64, 4, 6, promote=2),
        middle=Blocks(128, 128, 64, 8, 3, promote=2),
        many=Blocks(128, 128, 64, 8, 3, promote=2),
        unaligned=Blocks(64, 64, 32, 4, 2, promote=4),
    ),
    (90, "bfloat16"): Tiles(
        few=Blocks(16, 128, 128, 4, 4),
        middle=Blocks(128, 128, 64, 8, 4),
        many=Blocks(128, 256, 64, 8, 3, parts=2),
    ),
    (90, "tfloat32"): Tiles(
        few=Blocks(16, 64, 64, 4, 4),
        middle=Blocks(64, 128, 32, 4, 4),
        many=Blocks(128, 128, 32, 8, 3),
    ),
    (90, "float8_e4m3fn"): Tiles(
        # Tiles of 16 rows are multiplied in float16, whose sums are in float32.
        few=Blocks(16, 64, 256, 4, 4),
        middle=Blocks(128, 128, 128, 8, 4, promote=1),
        many=Blocks(128, 128, 128, 8, 4, promote=1),
        unaligned=Blocks(64, 64, 32, 8, 2, promote=1),
    ),
}
for _generation, _stages in ((80, 2), (90, 3)):
    TILES[_generation, "float16"] = TILES[_generation, "bfloat16"]
    TILES[_generation, "float32"] = Tiles(
        few=Blocks(16, 64, 32, 4, 2),
        middle=Blocks(64, 64, 32, 8, _stages),
        many=Blocks(64, 64, 32, 8, _stages),
        unaligned=Blocks(64, 64, 16, 8, 2),
    )
# No GPU has measured configurations for 100: they are the ones of 90 that fit in its registers.
for _precision in PRECISIONS:
    TILES[100, _precision] = TILES[90, _precision]
for _precision in ("bfloat16", "float16"):
    TILES[100, _precision] = TILES[90, _precision]._replace(few=TILES[80, _precision].few)

# Blocks of products by slabs, one per precision, as others could give other bits. Slabs are seldom
# multiples of more than 32, and a path of a tree of sums is to fit in registers.
SLAB_BLOCKS = {
    "bfloat16": Blocks(64, 32, 32, 4, 4),
    "float16": Blocks(64, 32, 32, 4, 4),
    "tfloat32": Blocks(64, 32, 32, 8, 3),
    "float32": Blocks(64, 32, 16, 8, 2),
}


def generation(capability: tuple[int, int]) -> int:
    """The generation, 80, 90 or 100, whose configurations a GPU uses.

    Hopper (90) and the data-centre Blackwells (100) read operands by tensor descriptors. All others
    use the ones of 80, which fit in 99 KiB of shared memory, the smallest size of these GPUs.
    """
    return {9: 90, 10: 100}.get(capability[0], 80)


def precision_of(dtype: torch.dtype, tf32: bool) -> str | None:
    """The precision of ``dtype``; ``None`` for one that the kernel does not multiply."""
    if dtype == torch.float32 and tf32:
        return "tfloat32"
    name = str(dtype).removeprefix("torch.")
    return name if name in PRECISIONS else None


def config_for(generation: int, precision: str, m: int, n: int, k: int, sms: int) -> Config:
    """The configuration of an aligned product C [m, n] of depth k on ``sms`` multiprocessors."""
    tiles = TILES[generation, precision]
    if m > MIDDLE_ROWS:
        return Config(tiles.many)
    if m > FEW_ROWS:
        return Config(tiles.middle)
    blocks = tiles.few
    # Programs share the few tiles of few rows: about one for each multiprocessor, then as few as
    # take no more steps each.
    steps = ceil(k / blocks.k)
    split_k = max(1, min(round(sms / ceil(n / blocks.n)), steps // LEAST_STEPS))
    return Config(blocks, split_k=ceil(steps / ceil(steps / split_k)))


# ---- the machine ----

OLDEST_TRITON = "3.6"
TRITON_REMEDY = f"Triton {OLDEST_TRITON} or newer: pip install 'pipekernels[triton]'"


class Gpu(NamedTuple):
    """Properties of a GPU that the kernel depends on."""

    name: str
    capability: tuple[int, int]
    generation: int
    sms: int


@functools.cache
def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    capability = found.major, found.minor
    return Gpu(found.name, capability, generation(capability), found.multi_processor_count)


def gpu_of(device: torch.device) -> Gpu:
    """Properties of a CUDA device's GPU."""
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def has_triton() -> bool:
    """Whether a Triton that is new enough is installed, without importing it."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # A nightly build has another name.
        return True
    return TorchVersion(version) >= OLDEST_TRITON


def tf32_allowed() -> bool:
    """Whether torch may round float32 operands of matrix products to TF32."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch >= 2.9, where allow_tf32 may raise.
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)
