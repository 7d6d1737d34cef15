"""``x (W s)^T`` with a matrix ``W`` of int8 and a float32 scale ``s`` for each of its rows.

A product of a few rows takes as long as reading the weight, of which int8 has a quarter of the
bytes of float32, and half of those of bfloat16. On a CPU the kernel for a few rows widens elements
in registers; for many rows, blocks of the weight are widened and multiplied by the library. So are
those of 16-bit floats on a CPU without instructions for them.

With ``W = round(w / s)`` and ``s = max |w| / 127`` in each row, ``|w - W s| <= s / 2``, so an
output differs from that of the float weight by at most ``s / 2`` times the sum of ``|x|``, and by
rounding. Gradients are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.ops.dispatch import has_derivatives, is_observed
from pipekernels.ops.expert_linear import groups

BLOCK = 1 << 19
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
    blockwise_into(flat, rows, weight, scale, bias)
    return out


def int8_expert_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, rows: Sequence[int]
) -> Tensor:
    """:func:`pipekernels.ops.expert_linear.expert_linear` with a ``weight`` of int8 and its
    ``scale`` ``[experts, n]``, float32. RuntimeError if a gradient is asked for."""
    check_no_gradients(x)
    out = x.new_empty(len(x), weight.shape[1])
    for expert, own in groups(rows):
        added = None if bias is None else bias[expert]
        blockwise_into(out[own], x[own], weight[expert], scale[expert], added)
    return out


def check_no_gradients(x: Tensor) -> None:
    """Raise RuntimeError if a gradient may be asked for."""
    if has_derivatives((x,)):
        raise RuntimeError(
            "layers with int8 weights have no gradients; use torch.no_grad(), or train the model "
            "before its weights are quantized"
        )


@functools.cache
def is_emulated(dtype: torch.dtype) -> bool:
    """Whether the CPU has no instructions for this float of 16 bits: torch's product then takes 4
    to 7 times as long as one in float32."""
    return dtype.itemsize == 2 and torch.backends.cpu.get_cpu_capability() == "AVX2"


def blockwise_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """``x @ (weight * scale).T + bias`` of matrices into ``out``, without autograd, in float32 if
    their dtype is emulated. Integers up to 127 are exact in every floating dtype."""
    dtype = torch.float32 if x.is_cpu and is_emulated(x.dtype) else x.dtype
    x = x.to(dtype)
    # Block by block, so that the widened weight stays in the cache.
    step = max(1, BLOCK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        block = slice(start, start + step)
        y = x @ weight[block].to(dtype).t()
        if scale is not None:
            y.mul_(scale[block])
        if bias is not None:
            y.add_(bias[block])
        out[:, block] = y
