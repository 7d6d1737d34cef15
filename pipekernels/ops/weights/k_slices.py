"""Weights of invariant layers: products whose bits depend neither on the rows nor on the ranks.

The inner dimension ``k`` is cut into equal k-slices. The sum over each is computed as if it were
alone, and these sums are added by one binary tree: ``((0 + 1) + (2 + 3)) + ...`` So however the
k-slices are distributed over ranks, each with the same power of two of them, the sum of the ranks'
results in such a tree has the same bits on one machine.

A few rows on the CPU have their own kernel, and so have products on GPUs, by Triton. The library
computes all others, k-slice by k-slice, so that it always multiplies matrices of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels import _backend
from pipekernels.device.autocast import exactly
from pipekernels.ops.dispatch import is_observed
from pipekernels.ops.weights.base import FEW_ROWS
from pipekernels.triton_kernels.config import (
    SLAB_BLOCKS,
    gpu_of,
    has_triton,
    precision_of,
    tf32_allowed,
)


class SlicedWeight:
    """The weight of an invariant layer, without autograd.

    Args:
        tensor: ``[n, k]``, any strides, of the dtype of ``x``, which is contiguous.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def partial_product(self, x: Tensor, k_slices: int) -> Tensor:
        """``x W^T`` over the ``k_slices`` of this rank, a power of two, not rounded to the dtype of
        ``x``: ``[..., n]``, float64 for float64 and float32 for all else."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        out = self._few_rows(_backend.load().skinny_gemm_partial, x, k_slices, dtype)
        if out is None:
            with exactly(x):
                out = tree_product(x.view(-1, x.shape[-1]), self.tensor, k_slices)
        # Not a view, which callers could not modify.
        return out.resize_(*x.shape[:-1], len(self.tensor))

    def product(self, x: Tensor, parts: Iterable[slice], bias: Tensor | None) -> Tensor:
        """``x W^T + bias``, ``[..., n]``, for the rows of ``W`` in ``parts``, each of which is a
        product by itself: they are all rows, in order."""
        out = self._few_rows(_backend.load().skinny_gemm, x, bias, x.dtype)
        if out is None:
            out = product_by_rows(x.view(-1, x.shape[-1]), self.tensor, parts, bias)
        return out.resize_(*x.shape[:-1], len(self.tensor))

    def _few_rows(
        self, kernel: Callable[..., bool], x: Tensor, option: Any, dtype: torch.dtype
    ) -> Tensor | None:
        """The result of the ``kernel`` for few rows, or None where it does not apply."""
        is_few = x.numel() <= FEW_ROWS * x.shape[-1]
        is_plain = type(x) is Tensor and x.is_cpu and not is_observed()
        if not is_few or not is_plain or torch.is_autocast_enabled("cpu"):
            return None
        out = x.new_empty((*x.shape[:-1], len(self.tensor)), dtype=dtype)
        return out if kernel(out, x, self.tensor, option, torch.get_num_threads()) else None


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


def tree_product(a: Tensor, b: Tensor, k_slices: int) -> Tensor:
    """``a @ b.T`` in float32 or float64, by a tree over the ``k_slices``."""
    product = k_slice_gemm(a, b, k_slices=k_slices, out_dtype=torch.float32)
    if product is not None:
        return product
    parts = zip(a.chunk(k_slices, 1), b.chunk(k_slices, 1), strict=True)
    return tree_sum(_wide_product(x, y.t()) for x, y in parts)


def product_by_rows(
    a: Tensor, b: Tensor, parts: Iterable[slice], bias: Tensor | None = None
) -> Tensor:
    """``a @ b.T + bias`` for the rows of ``b`` in ``parts``, which are all of them, in order."""
    product = k_slice_gemm(a, b, bias)
    if product is not None:
        return product
    own = [(b[part], None if bias is None else bias[part]) for part in parts]
    return torch.cat([functional.linear(a, *each) for each in own], 1)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32 or float64."""
    # Products of two 16-bit numbers are exact in float32; torch.mm rounds to their dtype.
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def k_slice_gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    k_slices: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """``a @ b.T + bias`` by Triton, summed in float32.

    The bits of an element depend on its row of ``a``, its row of ``b``, its bias, and the sizes of
    the k-slices.

    Args:
        a, b: ``[m, k]`` and ``[n, k]``, any strides.
        bias: ``[n]``.
        k_slices: into how many k-slices of equal sizes ``k`` is cut, a power of two.
        out_dtype: the result's dtype; if ``None``, the dtype of ``a``.

    Returns:
        ``[m, n]``; ``None`` where Triton cannot compute it: on CPUs, on GPUs before compute
        capability 8.0, in float64, and without Triton.

    Raises:
        RuntimeError: the kernel is not loaded yet, and a CUDA graph is being captured.
    """
    precision = _precision_on_gpu(a)
    if precision is None or 0 in (*a.shape, len(b)):
        return None
    from pipekernels.triton_kernels.launch import Product, are_slabs_loaded, launch_slabs

    out = a.new_empty((len(a), len(b)), dtype=out_dtype or a.dtype)
    product = Product(precision, a, b, out, bias)
    if torch.cuda.is_current_stream_capturing() and not are_slabs_loaded(product, k_slices):
        raise RuntimeError(
            f"the kernel for {tuple(a.shape)} times {tuple(b.t().shape)} in {k_slices} slabs is "
            "not loaded yet, which a graph capture forbids; run the layer once before the capture"
        )
    launch_slabs(product, k_slices, generation=gpu_of(a.device).generation)
    return out


def _precision_on_gpu(a: Tensor) -> str | None:
    """The type of the operands, if Triton can multiply them here."""
    if not a.is_cuda or not has_triton() or gpu_of(a.device).capability < (8, 0):
        return None
    precision = precision_of(a.dtype, tf32_allowed())
    return precision if precision in SLAB_BLOCKS else None
