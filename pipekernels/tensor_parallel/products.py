"""The products of sharded layers, each of which chooses once how it is computed.

On CPUs, a few rows without derivatives have their own kernel
(:mod:`pipekernels.local_ops.skinny_gemm`), all else is the library's. On GPUs see
:mod:`pipekernels.local_ops.sharded_gemm`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels.comm import Communicator
from pipekernels.comm.collectives import sum_of_outputs
from pipekernels.local_ops.sharded_gemm import as_matrix, gemm_into, sharded_gemm
from pipekernels.local_ops.skinny_gemm import may_be_skinny, skinny_into, skinny_linear

SMALL_ROW = 1024  # Bytes.


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of one rank, for ``[..., k]``, ``[n, k]`` and ``[n]``."""
    y = skinny_linear(x, weight, bias)
    return wide_linear(x, weight, bias) if y is None else y


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear` for operands that :func:`skinny_linear` does not take."""
    return sharded_gemm(x, weight, bias) if x.is_cuda else functional.linear(x, weight, bias)


def skinny_all_reduce(x: Tensor, weight: Tensor, comm: Communicator) -> Tensor | None:
    """:func:`linear_all_reduce` of a few rows by the kernel for them, whose bits are its own; None
    where that does not apply."""
    if not may_be_skinny(x, weight):
        return None
    shape = (*x.shape[:-1], weight.shape[0])
    # The peers read symmetric memory in place; copying a small result is faster than allocating it.
    is_small = weight.shape[0] * x.itemsize <= SMALL_ROW
    out = x.new_empty(shape) if is_small else comm.output(shape, x)
    return comm.all_reduce(out) if skinny_into(out, x, weight) else None


def linear_all_reduce(x: Tensor, weight: Tensor, comm: Communicator, scatter: bool) -> Tensor:
    """:func:`pipekernels.tensor_parallel.functional.row_linear` without autograd, of operands of
    one dtype. The result lies in memory that the peers read in place."""
    out = comm.output((*x.shape[:-1], weight.shape[0]), x)
    rows, product = (x, out) if x.dim() == 2 else (as_matrix(x), as_matrix(out))
    if x.is_cuda:
        gemm_into(product, rows, weight)
    else:
        torch.mm(rows, weight.t(), out=product)
    return comm.reduce_scatter(out) if scatter else sum_of_outputs(comm, out)
