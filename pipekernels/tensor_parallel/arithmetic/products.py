"""Products of invariant layers: slab by slab by the library, or whole by a kernel that has the same
bits for any shape (:mod:`pipekernels.local_ops.slab_gemm`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels.local_ops.slab_gemm import slab_gemm


def tree_sum(terms: Iterable[Tensor]) -> Tensor:
    """The sum of a power of two of tensors, by a binary tree."""
    stack: list[Tensor] = []
    for count, term in enumerate(terms, 1):
        while count % 2 == 0:
            term = stack.pop() + term
            count //= 2
        stack.append(term)
    total = stack.pop()
    return total


def tree_product(a: Tensor, b: Tensor, slabs: int) -> Tensor:
    """``a @ b.T`` in float32 or float64, by a tree over the slabs of the inner dimension."""
    found = slab_gemm(a, b, slabs=slabs, out_dtype=torch.float32)
    if found is not None:
        return found
    parts = zip(a.chunk(slabs, 1), b.chunk(slabs, 1), strict=True)
    return tree_sum(_wide_product(x, y.t()) for x, y in parts)


def product_by_rows(
    a: Tensor, b: Tensor, parts: Iterable[slice], bias: Tensor | None = None
) -> Tensor:
    """``a @ b.T + bias`` for the rows of ``b`` in ``parts``, which are all of them, in order."""
    found = slab_gemm(a, b, bias)
    if found is not None:
        return found
    if bias is None:
        return torch.cat([a @ b[part].t() for part in parts], 1)
    return torch.cat([functional.linear(a, b[part], bias[part]) for part in parts], 1)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Products of 16-bit numbers are exact in float32."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
