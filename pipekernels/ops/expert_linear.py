"""``x W_e^T`` with a matrix ``W_e`` for each group of rows, as a mixture of experts computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels import _backend
from pipekernels.device.autocast import exactly
from pipekernels.ops.dispatch import has_derivatives, is_observed
from pipekernels.ops.weights import Weight, weight_of

FEW_ROWS = 4
"""Mean number of rows of an expert up to which reading its weight takes the most time."""


def expert_linear(x: Tensor, weights: Weight, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's matrix: on a GPU in one launch where torch has
    ``grouped_mm`` for the operands, else expert by expert.

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
    if weights.scale is None and x.is_cuda and takes_groups(x, weights.tensor):
        return grouped_linear(x, weights.tensor, bias, rows)
    operands = weights.tensor, weights.scale, bias
    # The backward of unbind() joins the gradients of all experts; unused ones have zeros.
    columns = ([None] * len(rows) if each is None else each.unbind() for each in operands)
    parts = list(zip(x.split(rows.tolist()), *columns, strict=True))
    with exactly(x):
        return torch.cat(
            [_product(*part) for part in parts if len(part[0])] or [_product(*parts[0])]
        )


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    own = weight_of(weight, scale)
    if scale is None or has_derivatives((x,)):
        return functional.linear(x, own.trained(), bias)
    return own.product(x, bias)


def takes_groups(x: Tensor, weight: Tensor) -> bool:
    """Whether this torch has ``grouped_mm`` and it multiplies these: rows and columns of bfloat16
    that begin at multiples of 16 bytes."""
    n, k = weight.shape[1:]
    return (
        hasattr(functional, "grouped_mm")
        and x.dtype == weight.dtype == torch.bfloat16
        and n % 8 == k % 8 == 0
        and len(x) > 0
    )


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """:func:`expert_linear` by ``grouped_mm``, which reads the groups' sizes on the device, so that
    the host does not wait for them. No GPU has run it yet."""
    multiply: Any = functional.grouped_mm
    y: Tensor = multiply(x, weight.transpose(1, 2), offs=rows.cumsum(0, dtype=torch.int32))
    return y if bias is None else y + bias.repeat_interleave(rows, 0, output_size=len(x))


def few_rows_expert_linear(
    x: Tensor, weights: Weight, bias: Tensor | None, chosen: Tensor
) -> Tensor | None:
    """Multiply each row by the matrices of its chosen experts, of which only these are read; or
    None where the kernel does not apply: it takes few rows of contiguous CPU tensors of one
    floating dtype, without autograd.

    Args:
        x: ``[rows, k]``; float32 or bfloat16 with weights of int8.
        weights: ``[experts, n, k]``.
        bias: ``[experts, n]``.
        chosen: int64, ``[rows, count]``.

    Returns:
        ``[rows, count, n]``. 16-bit floats are computed with in float32, and rounded once.

    Raises:
        ValueError: an expert is outside of ``0..experts - 1``.
    """
    weight, scale = weights.tensor, weights.scale
    is_compiling = torch.compiler.is_compiling()
    is_plain = type(x) is Tensor and x.is_cpu and (is_compiling or not is_observed())
    is_cast = scale is None and torch.is_autocast_enabled("cpu")
    if not is_plain or is_cast or chosen.numel() > FEW_ROWS * weight.shape[0]:
        return None
    if has_derivatives((x, weight) if bias is None else (x, weight, bias)):
        return None
    if is_compiling:
        result: Tensor = torch.ops.pipekernels.chosen_experts(x, weight, bias, chosen, scale)
        return result
    out = x.new_empty((*chosen.shape, weight.shape[1]))
    operands = [out, x, weight, bias, chosen, torch.get_num_threads()]
    operands += [] if scale is None else [scale]
    return out if _backend.load().expert_product(*operands) else None


# ---- the operator of compiled programs ----


def _chosen_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, scale: Tensor | None
) -> Tensor:
    y = few_rows_expert_linear(x, weight_of(weight, scale), bias, chosen)
    if y is not None:
        return y
    # Of memory or dtypes that the kernel does not take.
    matrices = weight[chosen] if scale is None else weight[chosen] * scale[chosen].unsqueeze(-1)
    y = (matrices.to(x.dtype) @ x[:, None, :, None]).squeeze(-1)
    return y if bias is None else y + bias[chosen]


def _chosen_experts_fake(x: Tensor, weight: Tensor, _: Any, chosen: Tensor, __: Any) -> Tensor:
    return x.new_empty((*chosen.shape, weight.shape[1]))


_library = torch.library.Library("pipekernels", "FRAGMENT")
_library.define(
    "chosen_experts(Tensor x, Tensor weight, Tensor? bias, Tensor chosen, Tensor? scale) -> Tensor"
)
_library.impl("chosen_experts", _chosen_experts, "CompositeExplicitAutograd")
torch.library.register_fake("pipekernels::chosen_experts", _chosen_experts_fake, lib=_library)
