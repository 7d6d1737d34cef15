"""``x (W s)^T`` with a matrix ``W`` of int8 and a float32 scale ``s`` for each of its rows.

A product of a few rows takes as long as reading the weight, of which int8 has a quarter of the
bytes of float32, and half of those of bfloat16. On a CPU the kernel for a few rows widens elements
in registers; for many rows, blocks of the weight are widened and multiplied by the library.

With ``W = round(w / s)`` and ``s = max |w| / 127`` in each row, ``|w - W s| <= s / 2``, so an
output differs from that of the float weight by at most ``s / 2`` times the sum of ``|x|``, and by
rounding. Gradients are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.local_ops.dispatch import has_derivatives, is_observed
from pipekernels.local_ops.expert_linear import groups

BLOCK = 1 << 20
"""Elements of a weight that are widened at a time."""


def int8_of(weight: Tensor, scale: Tensor) -> Tensor:
    """``round(weight / scale)``.

    Args:
        weight: ``[..., n, k]``, floats.
        scale: ``[..., n]``, float32, at least the rows' largest magnitudes divided by 127.
    """
    return (weight.float() / scale.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)


def floats_of(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight * scale`` in ``dtype``: the inverse of :func:`int8_of` except for rounding."""
    return (weight.float() * scale.unsqueeze(-1)).to(dtype)


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``x @ (weight * scale).T + bias``, into ``out`` if that is given.

    Args:
        x: ``[..., k]``, floats.
        weight: ``[n, k]``, int8.
        scale: ``[n]``, float32.
        bias: ``[n]``.
        out: ``[..., n]``, of the dtype of ``x``, as the result.

    Raises:
        RuntimeError: a gradient is asked for.
    """
    check_no_gradients(x)
    if out is None:
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if type(x) is Tensor and x.is_cpu and not is_observed():
        threads = torch.get_num_threads()
        if _backend.load().expert_product(out, x, weight, bias, None, threads, scale):
            return out
    rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    _blockwise(rows, weight, flat)
    flat.mul_(scale)
    return out if bias is None else out.add_(bias)


def int8_expert_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, rows: Sequence[int]
) -> Tensor:
    """:func:`pipekernels.local_ops.expert_linear.expert_linear` with a ``weight`` of int8 and its
    ``scale`` ``[experts, n]``, float32. RuntimeError if a gradient is asked for."""
    check_no_gradients(x)
    out = x.new_empty(len(x), weight.shape[1])
    for expert, own in groups(rows):
        _blockwise(x[own], weight[expert], out[own])
        out[own].mul_(scale[expert])
        if bias is not None:
            out[own].add_(bias[expert])
    return out


def check_no_gradients(x: Tensor) -> None:
    """Raise RuntimeError if a gradient may be asked for."""
    if has_derivatives((x,)):
        raise RuntimeError(
            "layers with int8 weights have no gradients; use torch.no_grad(), or train the model "
            "before its weights are quantized"
        )


def _blockwise(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``x @ weight.T`` into ``out``; integers up to 127 are exact in every floating dtype."""
    step = max(1, BLOCK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        block = weight[start : start + step].to(x.dtype)
        out[:, start : start + step] = x @ block.t()
