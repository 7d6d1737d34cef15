"""``x W^T`` on a CPU for a few rows of ``x``, as a decoder computes for each token.

The product takes as long as reading ``W``. The kernel reads it as one sequential stream, at the
speed of the memory; torch's libraries reach a half to a third of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels._torch_private import needs_dispatcher


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``torch.nn.functional.linear(x, weight, bias)``, or None where the kernel does not apply: it
    takes up to four rows of contiguous CPU tensors of one floating dtype, without autograd.

    16-bit floats are computed with in float32, and rounded once. A row's result does not depend on
    the other rows.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``.
        bias: ``[n]``.
    """
    if not may_be_skinny(x, weight, bias):
        return None
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return out if skinny_into(out, x, weight, bias) else None


def skinny_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """:func:`skinny_linear` into ``out``, of plain tensors, without autocast and derivatives;
    whether the kernel applied."""
    done: bool = _backend.load().skinny_gemm(out, x, weight, bias, torch.get_num_threads())
    return done


def skinny_partial(x: Tensor, weight: Tensor, slabs: int) -> Tensor | None:
    """``x W^T`` over the ``slabs`` of this rank, not rounded to the dtype of ``x``, or None where
    :func:`skinny_linear` does not apply either.

    ``k`` is cut into ``slabs`` equal parts. The sum over each is computed as if it were alone, and
    these sums are added in a balanced binary tree: ``((0 + 1) + (2 + 3)) + ...`` So however the
    slabs are distributed over ranks, each with the same power of two of them, the sum of the
    results in such a tree has the same bits on one machine. They may differ between instruction
    sets, and they depend neither on the other rows nor on the number of threads. A NaN has all bits
    set.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``, of the same dtype.
        slabs: a power of two that divides ``k``.

    Returns:
        ``[..., n]``, float64 for float64 and float32 for all else.

    Raises:
        ValueError: ``slabs`` is not a power of two that divides ``k``.
    """
    if not may_be_skinny(x, weight):
        return None
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)
    threads = torch.get_num_threads()
    done = _backend.load().skinny_gemm_partial(out, x, weight, slabs, threads)
    return out if done else None


def may_be_skinny(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel may apply: it need not, where memory, dtypes or shapes do not fit."""
    if type(x) is not Tensor or not x.is_cpu or not is_bare(x, weight, bias):
        return False
    return bool(x.numel() <= _backend.load().SKINNY_ROWS * weight.shape[-1])


def is_bare(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product concerns neither autograd nor autocast nor a dispatch mode."""
    if needs_dispatcher() or torch.is_autocast_enabled("cpu"):
        return False
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return not (trained and torch.is_grad_enabled())
