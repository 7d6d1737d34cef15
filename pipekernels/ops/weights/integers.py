"""Weights of 8- or 4-bit integers, ``(W - zero) * scale``.

A product of a few rows takes as long as reading the weight, of which integers have a quarter to an
eighth of the bytes of float32. A scale, and perhaps a zero, belongs to a *group* of elements of a
row: all of the row, or a multiple of 32. On the CPU the kernel rounds ``x`` to 8 bits as well, with
a scale for each *block* of its elements, and multiplies integers (``csrc/cpu/products/
integer_product.cpp``): its results have the same bits on every instruction set, for any number of
rows. Elsewhere, and without the kernel, the weight is widened to floats.

A block has 128, 64 or 32 elements: the most that divide a group; 128 if a group is a row. With
``m`` the largest magnitude of a block of ``x``, rounding the block changes an output by at most
``m / 254`` times the sum of the weight's magnitudes there.

The kernel reads the weight in its own order (``csrc/include/pipekernels/products/
integer_product.h``), in which layers keep it.
Gradients are not supported.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels import _backend
from pipekernels.ops.weights.base import BLOCK, Weight

TILE, STEP = 16, 32
"""Output features and input features that the kernel takes at a time."""


class Integers(NamedTuple):
    """A matrix of integers, or a stack of them, in plain order.

    Attributes:
        weight: int8, ``[..., n, k]``, in ``-2^(bits - 1) .. 2^(bits - 1) - 1``.
        scale: floats, ``[..., n, groups]``.
        zero: int8, ``[..., n, groups]``; None if all are 0.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def floats(self, dtype: torch.dtype) -> Tensor:
        """The matrix in ``dtype``."""
        groups = self.scale.shape[-1]
        weight = self.weight.float().unflatten(-1, (groups, -1))
        if self.zero is not None:
            weight -= self.zero.unsqueeze(-1)
        floats: Tensor = weight * self.scale.float().unsqueeze(-1)
        return floats.flatten(-2).to(dtype)


def rounded(
    weight: Tensor, bits: int, group: int | None, largest: Tensor | None = None
) -> Integers:
    """``weight``, ``[..., n, k]``, as integers of ``bits``, without zeros.

    A scale is a group's largest magnitude over 127 in 8 bits. In 4 bits it is the element of the
    largest magnitude over -8, so that this element, with its sign, is exact; others change by half
    of the scale at most, and those near its negative by the whole scale.

    Args:
        group: elements; None: all ``k``, with a scale in float32 in place of bfloat16.
        largest: ``[..., n, 1]``, in place of the largest magnitudes of rows, at least as large.
    """
    grouped = weight.float().unflatten(-1, (-1, group or weight.shape[-1]))
    if largest is None:
        place = grouped.abs().argmax(-1, keepdim=True)
        largest = grouped.gather(-1, place).squeeze(-1)
    scale = largest.abs() / 127 if bits == 8 else largest / -8
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    scale = scale if group is None else scale.bfloat16()
    limit = 1 << (bits - 1)
    low = 1 - limit if bits == 8 else -limit
    integers = (grouped / scale.float().unsqueeze(-1)).round_().clamp_(low, limit - 1)
    return Integers(integers.flatten(-2).to(torch.int8), scale)


def pack_weight(weight: Tensor, bits: int) -> Tensor:
    """Integers, ``[..., n, k]``, in the kernel's order: uint8, ``[..., tiles, steps, bytes]``."""
    padding = 0, -weight.shape[-1] % STEP, 0, -weight.shape[-2] % TILE
    full = functional.pad(_unsigned(weight, bits), padding)
    # [tiles, 16, steps, 8, 4] -> [tiles, steps, 8, 16, 4]
    values: Tensor = full.unflatten(-1, (-1, 8, 4)).unflatten(-4, (-1, TILE)).movedim(-4, -2)
    if bits == 4:
        values = values[..., :4, :, :] | values[..., 4:, :, :] << 4
    return values.contiguous().flatten(-3)


def unpack_weight(values: Tensor, n: int, k: int) -> Tensor:
    """The inverse of :func:`pack_weight`."""
    bits = bits_of(values)
    values = values.unflatten(-1, (-1, TILE, 4))
    if bits == 4:
        values = torch.cat((values & 15, values >> 4), -3)
    values = values.movedim(-2, -4).flatten(-3).flatten(-3, -2)[..., :n, :k]
    return _signed(values, bits)


def pack_scale(scale: Tensor) -> Tensor:
    """Scales, ``[..., n, groups]``, in the kernel's order: ``[..., tiles, groups, 16]``."""
    full = functional.pad(scale, (0, 0, 0, -scale.shape[-2] % TILE))
    tiles: Tensor = full.unflatten(-2, (-1, TILE)).transpose(-1, -2)
    # Not contiguous(), which keeps other strides where there is one group.
    return tiles.clone(memory_format=torch.contiguous_format)


def unpack_scale(tiles: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack_scale`."""
    columns = tiles.transpose(-1, -2).flatten(-3, -2)[..., :n, :]
    return columns.clone(memory_format=torch.contiguous_format)


def pack_zero(zero: Tensor, bits: int) -> Tensor:
    """Zeros, ``[..., n, groups]``, in the kernel's order: uint8, ``[..., tiles, groups, 16]``."""
    return pack_scale(_unsigned(zero, bits))


def unpack_zero(tiles: Tensor, n: int, bits: int) -> Tensor:
    """The inverse of :func:`pack_zero`."""
    return _signed(unpack_scale(tiles, n), bits)


def _unsigned(integers: Tensor, bits: int) -> Tensor:
    return (integers + (1 << (bits - 1))).to(torch.uint8)  # A sum that wraps has the right bits.


def _signed(values: Tensor, bits: int) -> Tensor:
    return (values.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def bits_of(values: Tensor) -> int:
    """The bits of an element, from a weight that is packed."""
    return values.shape[-1] * 8 // (TILE * STEP)


class IntegerWeight(Weight):
    """A weight of integers in the kernel's order; for ``x`` of floats.

    Args:
        tensor: the integers.
        columns: ``n``.
        scale: of groups, floats.
        zero: of groups; None if all are 0.
    """

    def product_into(self, out: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        if x.dtype == torch.float16 and out.is_cpu:  # Which the kernel does not take.
            wide = torch.empty(out.shape, dtype=torch.float32)
            self.product_into(wide, x.float(), None if bias is None else bias.float())
            out.copy_(wide)
        elif not self._by_kernel(out, x, bias):
            self._by_library(out, x, bias)

    def chosen_product(self, x: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
        """``x`` times the matrices of a stack that each row has chosen: ``[rows, count, n]``, for
        ``[rows, k]``, ``[experts, n]`` and int64 ``[rows, count]``, without autograd."""
        out = x.new_empty((*chosen.shape, self.columns))
        wide = out.float() if x.dtype == torch.float16 else out
        own_bias = None if bias is None else bias.to(wide.dtype)
        if not self._by_kernel(wide, x.to(wide.dtype), own_bias, chosen.contiguous()):
            flat, rows = chosen.reshape(-1), x.repeat_interleave(chosen.shape[1], 0)
            for expert in flat.unique().tolist():
                own = flat == expert
                part = wide.new_empty((int(own.sum()), self.columns))
                self[expert]._by_library(part, rows[own], None if bias is None else bias[expert])
                wide.view(-1, self.columns)[own] = part.to(wide.dtype)
        return out if wide is out else out.copy_(wide)

    def __getitem__(self, expert: int) -> IntegerWeight:
        zero = None if self.zero is None else self.zero[expert]
        scale = self.scale
        assert scale is not None
        return IntegerWeight(self.tensor[expert], self.columns, scale[expert], zero)

    def _by_kernel(
        self, out: Tensor, x: Tensor, bias: Tensor | None, chosen: Tensor | None = None
    ) -> bool:
        """Whether the kernel has computed ``out``: it takes contiguous CPU tensors."""
        operands = out, x.contiguous(), self.tensor, self.scale, self.zero, bias, chosen
        if not out.is_cpu:
            return False
        done: bool = _backend.load().integer_product(*operands, torch.get_num_threads())
        return done

    def _by_library(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        assert self.scale is not None
        # Block by block, so that the widened weight stays in the cache.
        tiles, k = max(1, BLOCK // max(1, x.shape[1]) // TILE), x.shape[1]
        for tile in range(0, self.tensor.shape[0], tiles):
            start = tile * TILE
            stop = min(self.columns, start + tiles * TILE)
            block = slice(tile, tile + tiles)
            n, tensor = stop - start, self.tensor[block]
            zero = None if self.zero is None else unpack_zero(self.zero[block], n, bits_of(tensor))
            scale = unpack_scale(self.scale[block], n)
            plain = Integers(unpack_weight(tensor, n, k), scale, zero)
            own_bias = None if bias is None else bias[start:stop]
            out[:, start:stop] = functional.linear(x, plain.floats(x.dtype), own_bias)
