"""Weights of floats, which torch's autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipekernels.comm import Communicator
from pipekernels.comm.tensors import check_rows
from pipekernels.ops.collectives import all_gather
from pipekernels.ops.dispatch import (
    can_skip_dispatcher,
    check_differentiated_once,
    has_derivatives,
)
from pipekernels.ops.gemm import as_matrix
from pipekernels.ops.weights.base import Weight, is_emulated


class DenseWeight(Weight):
    """A weight of floats, ``[n, k]``, with any strides.

    16-bit floats are computed with in float32, and rounded once. With a few rows, a row's result
    does not depend on the other rows.
    """

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self.tensor
        # Torch differentiates, casts, and knows subclasses of tensors and other devices.
        if (
            type(x) is not Tensor
            or type(weight) not in (Tensor, nn.Parameter)
            or not x.is_cpu
            or torch.is_autocast_enabled("cpu")
            or has_derivatives((x, weight) if bias is None else (x, weight, bias))
        ):
            return functional.linear(x, weight, bias)
        result: Tensor = torch.ops.pipekernels.linear(x, weight, None, bias)
        return result

    def row_linear(self, x: Tensor, comm: Communicator, scatter: bool) -> Tensor:
        if scatter:
            check_rows(x, comm.world_size, dims=2)
        weight = self.tensor
        # x.device takes longer than x.is_cpu; is_autocast_enabled("meta") raises.
        device = "cpu" if x.is_cpu else x.device.type
        is_cast = device != "meta" and torch.is_autocast_enabled(device)
        if is_cast and x.is_floating_point() and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        step = _RowLinear.apply if has_derivatives((x, weight)) else _row_linear
        result: Tensor = step(x, weight, comm, scatter)
        return result

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._is_emulated(x):
            return super().product(x, bias)
        return functional.linear(x, self.tensor, bias)

    def product_into(self, out: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        if self._is_emulated(x):
            self._widened_into(out, x, bias)
        elif bias is None:
            torch.mm(x, self.tensor.t(), out=out)
        else:
            torch.addmm(bias, x, self.tensor.t(), out=out)

    def _is_emulated(self, x: Tensor) -> bool:
        return x.is_cpu and x.dtype == self.tensor.dtype and is_emulated(x.dtype)


def _row_linear(x: Tensor, weight: Tensor, comm: Communicator, scatter: bool) -> Tensor:
    # On GPUs the dispatcher takes as long as a small product.
    if x.is_cuda and can_skip_dispatcher([x, weight]):
        return DenseWeight(weight).sum_of_products(x, comm, scatter)
    result: Tensor = torch.ops.pipekernels.row_linear(x, weight, None, comm.handle, scatter)
    return result


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, scatter: bool) -> Tensor:
        ctx.comm, ctx.scatter = comm, scatter
        ctx.save_for_backward(x, weight)
        return _row_linear(x, weight, comm, scatter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_differentiated_once("a layer that is sharded over ranks")
        x, weight = ctx.saved_tensors
        if ctx.scatter:
            grad = all_gather(grad, ctx.comm)
        rows = as_matrix(grad)  # [N, M]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = functional.linear(rows, weight.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = functional.linear(rows.t(), as_matrix(x).t())
        return grad_x, grad_weight, None, None
