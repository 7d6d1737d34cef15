"""Slabs of sharded features; products by slabs, and sums in the order of one tree.

Products are those of the library, slab by slab, or of a kernel that has the same bits for any shape
(:mod:`pipekernels.ops.slab_gemm`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels.comm import Communicator
from pipekernels.ops.slab_gemm import slab_gemm

SLABS = 8
ALIGNED = 8  # Elements of 16 bytes or more: the library has other kernels for less aligned rows.
WIDTH = 32  # Elements of two of the widest vectors.


def check_slabs(sizes: Sequence[int], world_size: int) -> None:
    """Raise ValueError unless each of ``sizes`` features can be cut into slabs, and these divided
    evenly among the ranks."""
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


def tree_sum(terms: Iterable[Tensor]) -> Tensor:
    """The sum of a power of two of tensors, by a binary tree."""
    # As a binary counter carries: the stack has sums of 1, 2, 4, ... terms, the smallest on top.
    stack: list[Tensor] = []
    for count, term in enumerate(terms, 1):
        while count % 2 == 0:
            term = stack.pop() + term
            count //= 2
        stack.append(term)
    return stack.pop()


def sum_of_ranks(partial: Tensor, comm: Communicator, *, scatter: bool = False) -> Tensor:
    """The sum of the ranks' subtrees; with ``scatter`` this rank's rows of it."""
    if comm.world_size == 1:
        return partial
    shared = comm.output(partial.shape, partial).copy_(partial)
    if scatter:
        return comm.reduce_scatter(shared, order="tree")
    return comm.all_reduce(shared, order="tree")


def tree_product(a: Tensor, b: Tensor, slabs: int) -> Tensor:
    """``a @ b.T`` in float32 or float64, by a tree over the slabs of the inner dimension."""
    product = slab_gemm(a, b, slabs=slabs, out_dtype=torch.float32)
    if product is not None:
        return product
    parts = zip(a.chunk(slabs, 1), b.chunk(slabs, 1), strict=True)
    return tree_sum(_wide_product(x, y.t()) for x, y in parts)


def product_by_rows(
    a: Tensor, b: Tensor, parts: Iterable[slice], bias: Tensor | None = None
) -> Tensor:
    """``a @ b.T + bias`` for the rows of ``b`` in ``parts``, which are all of them, in order."""
    product = slab_gemm(a, b, bias)
    if product is not None:
        return product
    if bias is None:
        return torch.cat([a @ b[part].t() for part in parts], 1)
    return torch.cat([functional.linear(a, b[part], bias[part]) for part in parts], 1)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32 or float64."""
    # Products of two 16-bit numbers are exact in float32; torch.mm rounds to their dtype.
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
