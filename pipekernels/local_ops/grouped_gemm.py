"""``x W_e^T`` for each group of rows by one Triton kernel, without a wait for the groups' sizes.

No GPU has run it yet; Triton's interpreter has, and it compiles for compute capability 8.0 to 10.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipekernels.kernels.config import kind_of
from pipekernels.local_ops.gemm_choice import check_triton, gpu_of, tf32_allowed


def grouped_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's matrix.

    Args:
        x: ``[sum(rows), k]``, sorted by experts: bfloat16, float16 or float32, on a GPU.
        weight: ``[experts, n, k]``, perhaps a transposed view.
        bias: ``[experts, n]``.
        rows: int64 ``[experts]``, on the same GPU: the number of rows of each expert.

    Returns:
        ``[sum(rows), n]``. Products are summed in float32, and rounded once.

    Backward: the gradients of ``x``, ``weight`` and ``bias``; differentiable once.

    Raises:
        TypeError, RuntimeError, ImportError: Triton does not multiply such elements, or not on this
            GPU, or is not installed.
    """
    kind = kind_of(x.dtype, tf32_allowed())
    check_triton(x.dtype, kind, gpu_of(x.device))
    ends = rows.cumsum(0, dtype=torch.int32)
    result: Tensor = _GroupedGemm.apply(x, weight, bias, ends, kind)
    return result


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, kind: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.kind = kind
        return _product(kind, x, weight, ends, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(ctx.kind, grad, weight.transpose(1, 2), ends, None)
        if ctx.needs_input_grad[1]:
            grad_weight = _gradient(ctx.kind, grad, x, ends, torch.empty_like(weight))
        if ctx.needs_input_grad[2]:
            sums = grad.new_empty(len(weight), grad.shape[1], 1)
            grad_bias = _gradient(ctx.kind, grad, grad.new_ones(len(grad), 1), ends, sums)[..., 0]
        return grad_x, grad_weight, grad_bias, None, None


def _product(kind: str, x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    from pipekernels.kernels.launch import GroupedProduct, launch_groups

    out = x.new_empty(len(x), weight.shape[1])
    if out.numel():
        launch_groups(GroupedProduct(kind, x, weight, out, ends, bias))
    return out


def _gradient(kind: str, grad: Tensor, x: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    from pipekernels.kernels.launch import GroupedProduct, launch_group_gradients

    if out.numel():
        launch_group_gradients(GroupedProduct(kind, x, out, grad, ends))
    return out
