"""The configurations of the sharded GEMM, and a rough estimate of which is best.

Nothing here imports triton. Only a configuration's ``blocks`` are compile-time constants, so the
kernel is compiled for the entries of the tables below only. Tests check that every entry fits in
shared memory and spills no registers; :mod:`pipekernels.kernels.tuner` measures their speed.

Sums of float8 products: the tensor cores of Hopper and Ada keep fewer bits in them than float32
has. So after at most 128 products they are added to a sum in float32 (``promote``). Hopper's
products run by themselves, and where sums are promoted after every step, each step waits for its
own. Where they are promoted after every second, products run on through the other steps. Loops of
such blocks are not flattened: Triton would read the sums before the wait for them, and ptxas run
one product at a time.
"""

from __future__ import annotations

import itertools
from math import ceil
from typing import NamedTuple

import torch

# Kinds of operands; "tfloat32" is float32 rounded to TF32.
KINDS = ["bfloat16", "float16", "tfloat32", "float32", "float8_e4m3fn"]


class Blocks(NamedTuple):
    """Compile-time constants of the kernel.

    Attributes:
        m, n, k: sizes of the blocks of C = A B^T that a program computes at a time.
        warps: per program.
        stages: steps along k in flight.
        parts: in how many parts a tile is stored, a power of two; more of them take fewer registers
            and less shared memory.
        flatten: make tiles and their steps one loop, so that a tile's loads begin during the tile
            before it. No effect on tiles that are shared (split-K).
        specialize: give loads, products and stores their own warps, where ``flatten`` has an
            effect. More warps then run than ``warps``.
        promote: after how many steps the sum in the tensor cores is added to one in float32; 0 if
            the tensor cores keep it.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    parts: int = 1
    flatten: bool = True
    specialize: bool = False
    promote: int = 0


class Config(NamedTuple):
    """A configuration of the kernel.

    Attributes:
        blocks: compile-time constants.
        group_m: rows of tiles in a group.
        split_k: how many programs compute one tile together.
    """

    blocks: Blocks
    group_m: int = 8
    split_k: int = 1


class Choice(NamedTuple):
    """The blocks to choose from for a generation of GPUs and a kind.

    Attributes:
        full_tile: for tiles computed by one program.
        split_k: for tiles computed by several programs.
        unaligned: for operands that are not aligned and are read element by element.
        measured_only: other ways to compute the tiles of ``full_tile``, which only a measurement
            chooses.
    """

    full_tile: tuple[Blocks, ...]
    split_k: tuple[Blocks, ...]
    unaligned: Blocks = Blocks(64, 64, 32, 4, 2)
    measured_only: tuple[Blocks, ...] = ()


BLOCKS: dict[tuple[int, str], Choice] = {
    (80, "bfloat16"): Choice(
        full_tile=(
            Blocks(128, 256, 32, 8, 3, parts=2),
            Blocks(128, 128, 32, 4, 4, parts=2),
            Blocks(64, 64, 64, 4, 4),
        ),
        split_k=(Blocks(16, 64, 128, 4, 4), Blocks(64, 64, 64, 4, 4)),
        measured_only=(Blocks(128, 256, 32, 8, 3, parts=2, flatten=False),),
    ),
    (80, "tfloat32"): Choice(
        full_tile=(Blocks(128, 128, 32, 8, 3), Blocks(64, 64, 32, 4, 4)),
        split_k=(Blocks(16, 64, 64, 4, 3),),
    ),
    (80, "float8_e4m3fn"): Choice(
        # Triton makes a product and an addition after every step one instruction here.
        full_tile=(Blocks(128, 128, 64, 8, 3, promote=2),),
        split_k=(Blocks(16, 64, 64, 4, 6, promote=2),),
        unaligned=Blocks(64, 64, 32, 4, 2, promote=4),
    ),
    (90, "bfloat16"): Choice(
        full_tile=(
            Blocks(128, 256, 64, 8, 3, parts=2),
            Blocks(256, 128, 64, 8, 3, parts=2),
            Blocks(128, 128, 64, 8, 4),
            Blocks(128, 128, 64, 4, 3, parts=2),
            Blocks(64, 256, 64, 8, 4),
            Blocks(64, 256, 64, 4, 2, parts=2),
            Blocks(64, 128, 64, 4, 5),
            Blocks(32, 64, 128, 4, 4),
            Blocks(16, 64, 128, 4, 4),
            Blocks(16, 32, 128, 4, 6),
        ),
        split_k=(
            Blocks(16, 64, 128, 4, 4),
            Blocks(16, 128, 128, 4, 4),
            Blocks(64, 64, 128, 4, 4),
            Blocks(64, 128, 64, 4, 5),
            Blocks(128, 128, 64, 8, 4),
            Blocks(128, 256, 64, 8, 3, parts=2),
        ),
        measured_only=(
            Blocks(128, 256, 64, 8, 4, parts=4),
            Blocks(256, 128, 64, 8, 4, parts=4),
            Blocks(128, 256, 64, 8, 3, parts=2, flatten=False),
            Blocks(128, 128, 64, 8, 4, flatten=False),
        ),
    ),
    (90, "tfloat32"): Choice(
        full_tile=(Blocks(128, 128, 32, 8, 3), Blocks(64, 128, 32, 4, 4)),
        split_k=(Blocks(16, 64, 64, 4, 4),),
    ),
    (90, "float8_e4m3fn"): Choice(
        # Tiles of 16 rows are multiplied in float16, whose sums are in float32.
        full_tile=(Blocks(128, 128, 128, 8, 4, promote=1), Blocks(64, 256, 128, 8, 4, promote=1)),
        split_k=(Blocks(16, 64, 256, 4, 4), Blocks(64, 64, 128, 4, 4, promote=1)),
        unaligned=Blocks(64, 64, 32, 8, 2, promote=1),
        measured_only=(
            Blocks(128, 128, 64, 8, 6, flatten=False, promote=2),
            Blocks(64, 256, 64, 8, 6, flatten=False, promote=2),
        ),
    ),
    (100, "bfloat16"): Choice(
        full_tile=(
            Blocks(128, 256, 64, 8, 3, parts=2),
            Blocks(128, 128, 64, 8, 4),
            Blocks(64, 128, 64, 4, 4),
        ),
        split_k=(Blocks(16, 64, 128, 4, 4), Blocks(64, 64, 64, 4, 4)),
        measured_only=(
            Blocks(128, 256, 64, 8, 4, parts=4),
            Blocks(128, 256, 64, 8, 3, parts=2, specialize=True),
            Blocks(128, 128, 64, 8, 4, specialize=True),
        ),
    ),
    (100, "tfloat32"): Choice(
        full_tile=(Blocks(128, 128, 32, 8, 3),),
        split_k=(Blocks(16, 64, 64, 4, 4),),
    ),
    (100, "float8_e4m3fn"): Choice(
        full_tile=(Blocks(128, 128, 128, 8, 4), Blocks(64, 128, 128, 4, 4)),
        split_k=(Blocks(16, 64, 256, 4, 4), Blocks(64, 64, 128, 4, 4)),
        measured_only=(Blocks(128, 128, 128, 8, 4, specialize=True),),
    ),
}
for _generation, _stages in ((80, 2), (90, 3), (100, 3)):
    BLOCKS[_generation, "float16"] = BLOCKS[_generation, "bfloat16"]
    BLOCKS[_generation, "float32"] = Choice(
        full_tile=(Blocks(64, 64, 32, 8, _stages),),
        split_k=(Blocks(16, 64, 32, 4, 2),),
        unaligned=Blocks(64, 64, 16, 8, 2),
    )

# Blocks of products by slabs, one per kind, as others could give other bits. Slabs are seldom
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
    use those of 80, which fit in 99 KiB of shared memory, the smallest size of these GPUs.
    """
    return {9: 90, 10: 100}.get(capability[0], 80)


def kind_of(dtype: torch.dtype, tf32: bool) -> str | None:
    """The kind for operands of ``dtype``; ``None`` for one that the kernel does not multiply."""
    if dtype == torch.float32 and tf32:
        return "tfloat32"
    name = str(dtype).removeprefix("torch.")
    return name if name in KINDS else None


def candidates(generation: int, kind: str, m: int, n: int, k: int, sms: int) -> list[Config]:
    """Configurations to try for C [m, n] of depth k on ``sms`` multiprocessors; best first."""
    choice = BLOCKS[generation, kind]
    # Also try tiles of 64 rows if m is smaller.
    lowest = min(blocks.m for blocks in choice.full_tile if blocks.m >= 64)
    found = [Config(blocks) for blocks in choice.full_tile if blocks.m < 2 * max(m, lowest)]
    for blocks, programs in itertools.product(choice.split_k, (sms, 2 * sms, 4 * sms)):
        tiles, steps = ceil(m / blocks.m) * ceil(n / blocks.n), ceil(k / blocks.k)
        split_k = min(programs // tiles, steps // 2)
        if split_k > 1 and blocks.m < 2 * max(m, lowest):
            config = Config(blocks, split_k=ceil(steps / ceil(steps / split_k)))
            found += [config] if config not in found else []
    itemsize = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2}.get(kind, 4)
    return sorted(found, key=lambda config: _cycles(config, m, n, k, itemsize, sms))


def variants(generation: int, kind: str, blocks: Blocks) -> list[Blocks]:
    """Other ways to compute tiles of the size of ``blocks`` by one program each, to be measured."""
    others = BLOCKS[generation, kind].measured_only
    return [other for other in others if (other.m, other.n) == (blocks.m, blocks.n)]


def _cycles(config: Config, m: int, n: int, k: int, itemsize: int, sms: int) -> float:
    """Estimated clock cycles of a product: rounds of items, each bound by arithmetic or loads.

    The constants are round numbers for a recent data-centre GPU, not measurements.
    """
    blocks, split_k = config.blocks, config.split_k
    items = ceil(m / blocks.m) * ceil(n / blocks.n) * split_k
    steps = ceil(ceil(k / blocks.k) / split_k)
    multiply = max(blocks.m, 64) * blocks.n * blocks.k * itemsize / 4096
    load = (min(blocks.m, m) + min(blocks.n, n)) * blocks.k * itemsize / 48
    finish = 1000 + blocks.m * blocks.n * (4 * 3 if split_k > 1 else itemsize) / 32
    return ceil(items / sms) * (steps * max(multiply, load) + finish)
