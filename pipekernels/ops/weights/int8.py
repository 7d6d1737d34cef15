"""Weights of int8, ``W s`` with a matrix ``W`` and a float32 scale ``s`` for each of its rows.

A product of a few rows takes as long as reading the weight, of which int8 has a quarter of the
bytes of float32, and half of those of bfloat16. On a CPU the kernel for a few rows widens elements
in registers; for many rows, blocks of the weight are widened and multiplied by the library.

With ``W = round(w / s)`` and ``s = max |w| / 127`` in each row, ``|w - W s| <= s / 2``, so an
output differs from that of the float weight by at most ``s / 2`` times the sum of ``|x|``, and by
rounding. Gradients are not supported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipekernels.ops.weights.base import Weight


class Int8Weight(Weight):
    """A weight of int8, ``[n, k]``, with a scale ``[n]``, float32; for ``x`` of floats."""

    def product_into(self, out: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        self._widened_into(out, x, bias)


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
