"""``x W^T`` on a CPU for a few rows of ``x``, as a decoder computes for each token.

The product takes as long as reading ``W``. The kernel reads it as one sequential stream, at the
speed of the memory; torch's libraries reach a half to a third of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.local_ops.dispatch import has_derivatives, is_observed


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``torch.nn.functional.linear(x, weight, bias)``, or None where the kernel does not apply: it
    takes up to four rows of contiguous CPU tensors of one floating dtype, without autograd.

    16-bit floats are computed with in float32, and rounded once. A row's result does not depend on
    the other rows.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``.
        bias: ``[n]``.
    """
    if not takes_few_rows(x, weight, bias):
        return None
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return out if few_rows_into(out, x, weight, bias) else None


def takes_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel may apply: it need not, where memory, dtypes or shapes do not fit."""
    if type(x) is not Tensor or not x.is_cpu or is_observed():
        return False
    if x.numel() > _backend.load().FEW_ROWS * weight.shape[-1] or torch.is_autocast_enabled("cpu"):
        return False
    return not has_derivatives((x, weight) if bias is None else (x, weight, bias))


def few_rows_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """:func:`few_rows_linear` into ``out``, after :func:`takes_few_rows`; whether it applied."""
    done: bool = _backend.load().few_rows_product(out, x, weight, bias, torch.get_num_threads())
    return done
