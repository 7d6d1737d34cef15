"""``x W_e^T`` with a matrix ``W_e`` for each group of rows, as a mixture of experts computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels import _backend
from pipekernels.device.autocast import exactly
from pipekernels.ops.dispatch import define, has_derivatives, is_observed
from pipekernels.ops.weights import IntegerWeight, Weight, weight_of

FEW_ROWS = 4
"""Mean number of rows of an expert up to which reading its weight takes the most time."""


def expert_linear(x: Tensor, weights: Weight, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's matrix.

    Args:
        x: ``[sum(rows), k]``, sorted by experts.
        weights: ``[experts, n, k]``, perhaps a transposed view.
        bias: ``[experts, n]``.
        rows: int64 ``[experts]``, on the device of ``x``: the number of rows of each expert.

    Returns:
        ``[sum(rows), n]``.

    Raises:
        RuntimeError: a gradient is asked for, which the format of ``weights`` does not have.
    """
    if isinstance(weights, IntegerWeight):
        if has_derivatives((x,)):
            weights.trained()  # Raises.
        experts = torch.arange(len(rows), device=rows.device).repeat_interleave(rows)
        return weights.chosen_product(x, bias, experts.unsqueeze(1)).squeeze(1)
    # The backward of unbind() joins the gradients of all experts; unused ones have zeros.
    biases = [None] * len(rows) if bias is None else bias.unbind()
    parts = list(zip(x.split(rows.tolist()), weights.tensor.unbind(), biases, strict=True))
    with exactly(x):
        return torch.cat(
            [functional.linear(*part) for part in parts if len(part[0])]
            or [functional.linear(*parts[0])]
        )


def few_rows_expert_linear(
    x: Tensor, weights: Weight, bias: Tensor | None, chosen: Tensor
) -> Tensor | None:
    """Multiply each row by the matrices of its chosen experts, of which only these are read; or
    None where the kernel does not apply: it takes few rows of contiguous CPU tensors of one
    floating dtype, without autograd.

    Args:
        x: ``[rows, k]``.
        weights: ``[experts, n, k]``.
        bias: ``[experts, n]``.
        chosen: int64, ``[rows, count]``.

    Returns:
        ``[rows, count, n]``. 16-bit floats are computed with in float32, and rounded once.

    Raises:
        ValueError: an expert is outside of ``0..experts - 1``.
    """
    weight, scale, columns = weights.tensor, weights.scale, weights.columns
    is_compiling = torch.compiler.is_compiling()
    if type(x) is not Tensor or not x.is_cpu or (is_observed() and not is_compiling):
        return None
    # Of integers the kernel takes any number of rows.
    has_many = chosen.numel() > FEW_ROWS * weight.shape[0]
    if scale is None and (has_many or torch.is_autocast_enabled("cpu")):
        return None
    if has_derivatives((x, weight) if bias is None else (x, weight, bias)):
        return None
    if is_compiling:
        operands = x, weight, scale, weights.zero, bias, chosen, columns
        result: Tensor = _chosen_experts_operation(*operands)
        return result
    if isinstance(weights, IntegerWeight):
        return weights.chosen_product(x, bias, chosen)
    out = x.new_empty((*chosen.shape, columns))
    threads = torch.get_num_threads()
    done: bool = _backend.load().expert_product(out, x, weight, bias, chosen, threads)
    return out if done else None


# ---- the operator of compiled programs ----


def _chosen_experts(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    chosen: Tensor,
    columns: int,
) -> Tensor:
    y = few_rows_expert_linear(x, weight_of(weight, columns, scale, zero), bias, chosen)
    if y is not None:
        return y
    # Of memory or dtypes that the kernel does not take.
    y = (weight[chosen].to(x.dtype) @ x[:, None, :, None]).squeeze(-1)
    return y if bias is None else y + bias[chosen]


def _chosen_experts_fake(x: Tensor, *others: Any) -> Tensor:
    *_, chosen, columns = others
    return x.new_empty((*chosen.shape, columns))


_chosen_experts_operation = define(
    "chosen_experts(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, "
    "Tensor chosen, int columns) -> Tensor",
    _chosen_experts,
    _chosen_experts_fake,
)
