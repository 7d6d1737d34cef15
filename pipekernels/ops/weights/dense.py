"""Weights of floats, which torch's autograd differentiates."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipekernels.comm import Communicator
from pipekernels.device.autocast import as_autocast
from pipekernels.ops.dispatch import can_skip_dispatcher, is_observed
from pipekernels.ops.weights.base import BLOCK, FEW_ROWS, Weight, is_emulated


class DenseWeight(Weight):
    """A weight of floats, ``[n, k]``, with any strides.

    16-bit floats are computed with in float32, and rounded once. With a few rows, a row's result
    does not depend on the other rows.
    """

    scale = zero = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.columns = tensor, tensor.shape[-2]

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self.tensor
        # Torch casts, and knows subclasses of tensors and other devices.
        if (
            type(x) is Tensor
            and type(weight) in (nn.Parameter, Tensor)
            and x.is_cpu
            and not torch.is_autocast_enabled("cpu")
        ):
            if self._has_many(x) and not is_observed():
                return self.product(x, bias)  # For which an operator takes some microseconds more.
            operands = x, weight, None, None, bias, self.columns
            result: Tensor = torch.ops.pipekernels.linear(*operands)
            return result
        return functional.linear(x, weight, bias)

    def row_linear(self, x: Tensor, comm: Communicator, scatter: bool) -> Tensor:
        weight, own = self.tensor, self
        if not x.is_cpu or torch.is_autocast_enabled("cpu"):
            x, weight = as_autocast((x, weight))
            own = DenseWeight(weight)
        if self._has_many(x) and can_skip_dispatcher([x, weight]):
            return own.sum_of_products(x, comm, scatter)
        operands = x, weight, None, None, self.columns, comm.handle, scatter
        result: Tensor = torch.ops.pipekernels.row_linear(*operands)
        return result

    def trained(self) -> Tensor:
        return self.tensor

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._is_emulated(x):
            return super().product(x, bias)
        return functional.linear(x, self.tensor, bias)

    def product_into(self, out: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        if self._is_emulated(x):
            # Block by block in float32, so that the widened weight stays in the cache.
            step, wide = max(1, BLOCK // max(1, x.shape[1])), x.float()
            for start in range(0, self.columns, step):
                block = slice(start, start + step)
                own_bias = None if bias is None else bias[block].float()
                out[:, block] = functional.linear(wide, self.tensor[block].float(), own_bias)
        elif bias is None:
            torch.mm(x, self.tensor.t(), out=out)
        else:
            torch.addmm(bias, x, self.tensor.t(), out=out)

    def _has_many(self, x: Tensor) -> bool:
        """Whether a product is not one of the kernel for few rows; a program sees when it runs."""
        is_compiling = torch.compiler.is_compiling()
        return not is_compiling and (x.is_cuda or x.numel() > FEW_ROWS * self.tensor.shape[-1])

    def _is_emulated(self, x: Tensor) -> bool:
        return x.is_cpu and x.dtype == self.tensor.dtype and is_emulated(x.dtype)
