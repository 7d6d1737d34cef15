"""Slabs of sharded features, and the sum of the ranks' slabs in the order of one tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.functional import Heads

SLABS = 8
ALIGNED = 8  # Elements of 16 bytes or more: the library has other kernels for less aligned rows.
WIDTH = 32  # Elements of two of the widest vectors.


def check_slabs(sizes: Sequence[int], world_size: int, heads: Heads | None = None) -> None:
    """Raise ValueError unless each of ``sizes`` features can be cut into slabs, and these and heads
    divided evenly among the ranks."""
    if heads is not None and heads[1] % world_size:
        raise ValueError(
            f"invariant=True needs as many heads of keys on each rank, of its own, but "
            f"{world_size} ranks do not divide {heads[1]}; use a number of ranks that does"
        )
    if SLABS % world_size:
        raise ValueError(
            f"invariant=True has {SLABS} slabs, which {world_size} ranks cannot share evenly; use "
            "1, 2, 4 or 8 ranks"
        )
    for size in sizes:
        if not has_slabs(size):
            raise ValueError(
                f"invariant=True cuts the sharded features into {SLABS} slabs of a multiple of "
                f"{ALIGNED}, but there are {size}; use a multiple of {SLABS * ALIGNED}, or leave "
                "this layer whole"
            )


def has_slabs(size: int) -> bool:
    """Whether ``size`` features can be cut into slabs."""
    return size % (SLABS * ALIGNED) == 0


def check_width(sizes: Sequence[int]) -> None:
    """Raise ValueError unless slabs of ``sizes`` features are whole vectors: torch's elementwise
    functions compute the last elements of a tensor, and of a thread's part of it, by other code,
    with other bits."""
    for size in sizes:
        if size % (SLABS * WIDTH):
            raise ValueError(
                f"invariant=True needs slabs of a multiple of {WIDTH} features before a function "
                f"such as an activation, but {size} features have {SLABS} slabs of "
                f"{size / SLABS:g}; use a multiple of {SLABS * WIDTH} features, or leave this "
                "layer whole"
            )


def check_eager() -> None:
    """Raise RuntimeError under ``torch.compile``."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile chooses kernels by their shapes, so the bits of a compiled model depend "
            "on the number of ranks; run layers with invariant=True uncompiled"
        )


def slabs_of(blocks: Sequence[int], world_size: int) -> Iterator[list[slice]]:
    """For each fused layer, this rank's slabs of its features.

    Args:
        blocks: how many features of each layer this rank has.
        world_size: the number of ranks.
    """
    begin = 0
    for size in blocks:
        width = size * world_size // SLABS
        yield [slice(start, start + width) for start in range(begin, begin + size, width)]
        begin += size


def sum_of_ranks(partial: Tensor, comm: Communicator, *, scatter: bool = False) -> Tensor:
    """The sum of the ranks' subtrees; with ``scatter`` this rank's rows of it."""
    if comm.world_size == 1:
        return partial
    shared = comm.output(partial.shape, partial).copy_(partial)
    if scatter:
        return comm.reduce_scatter(shared, order="tree")
    return comm.all_reduce(shared, order="tree")
