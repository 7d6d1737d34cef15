"""The interface of a format of weights, and what formats have in common."""

from __future__ import annotations

import abc
import functools
import math

import torch
from torch import Tensor

from pipekernels.comm import Communicator
from pipekernels.comm.collectives import sum_of_outputs

FEW_ROWS = 4
"""Rows up to which reading the weight takes the most time: the most that the kernels take."""

BLOCK = 1 << 19
"""Elements of a weight that are widened at a time."""


class Weight(abc.ABC):
    """The matrix ``W``, ``[n, k]``, of a linear layer, in one format.

    Layers call :meth:`linear` and :meth:`row_linear`, for any number of rows. Both call an operator
    of torch (``operators.py``), in eager and in compiled programs. The operator's kernel in C++
    computes a few rows on the CPU; for all else it calls the methods of this class, of which a
    format implements :meth:`product_into`. Only :class:`DenseWeight` has gradients.

    A weight only refers to the layer's tensors, and keeps nothing that is made of them: when a
    program assigns to ``parameter.data``, or changes it in place, neither the parameter nor its
    version tells.

    Args:
        tensor: the elements as they are stored.
        columns: ``n``, the number of output features.
        scale: the scales of the elements; None if they have none.
        zero: the elements that stand for 0; None if these are 0.
    """

    def __init__(
        self, tensor: Tensor, columns: int, scale: Tensor | None = None, zero: Tensor | None = None
    ) -> None:
        self.tensor = tensor
        self.columns = columns
        self.scale = scale
        self.zero = zero

    @abc.abstractmethod
    def product_into(self, out: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        """``x W^T + bias`` of matrices into ``out``, ``[rows, n]``, without autograd."""

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + bias`` for ``[..., k]``, ``[..., n]``, without autograd."""
        out = x.new_empty((*x.shape[:-1], self.columns))
        self.product_into(as_matrix(out), as_matrix(x), bias)
        return out

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + bias`` of one rank, for ``[..., k]``: ``[..., n]``, without derivatives."""
        operands = x, self.tensor, self.scale, self.zero
        result: Tensor = torch.ops.pipekernels.linear(*operands, bias, self.columns)
        return result

    def row_linear(self, x: Tensor, comm: Communicator, scatter: bool) -> Tensor:
        """``x W^T``, summed over the ranks, each of which holds a part of ``k``: ``[..., n]``; with
        ``scatter`` this rank's slice of the first dimension. Without derivatives."""
        operands = x, self.tensor, self.scale, self.zero, self.columns
        result: Tensor = torch.ops.pipekernels.row_linear(*operands, comm.handle, scatter)
        return result

    def trained(self) -> Tensor:
        """The tensor of which autograd computes gradients; RuntimeError if the format has none."""
        raise RuntimeError(
            "layers with weights of integers have no gradients; use torch.no_grad(), or train the "
            "model before its weights are quantized"
        )

    def sum_of_products(self, x: Tensor, comm: Communicator, scatter: bool) -> Tensor:
        """:meth:`row_linear` without the operator."""
        is_few = x.is_cpu and x.numel() <= FEW_ROWS * x.shape[-1]
        if is_few and not (scatter and self.scale is None):  # Those are the library's.
            operands = x, self.tensor, self.scale, self.zero
            few: Tensor = torch.ops.pipekernels.linear(*operands, None, self.columns)
            return comm.reduce_scatter(few) if scatter else comm.all_reduce(few)
        # In memory that the peers read in place, so that the sum needs no copy.
        out = comm.output((*x.shape[:-1], self.columns), x)
        self.product_into(as_matrix(out), as_matrix(x))
        return comm.reduce_scatter(out) if scatter else sum_of_outputs(comm, out)


def as_matrix(x: Tensor) -> Tensor:
    """``x`` ``[..., k]`` as ``[rows, k]``; ``k`` may be 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@functools.cache
def is_emulated(dtype: torch.dtype) -> bool:
    """Whether the CPU has no instructions for this float of 16 bits: torch's product then takes 4
    to 7 times as long as one in float32."""
    return dtype.itemsize == 2 and torch.backends.cpu.get_cpu_capability() == "AVX2"
