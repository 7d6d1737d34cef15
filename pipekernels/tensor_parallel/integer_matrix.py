"""A matrix of integers, as a layer keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipekernels.ops.weights import IntegerWeight
from pipekernels.ops.weights.integers import (
    Integers,
    pack_scale,
    pack_weight,
    pack_zero,
    unpack_scale,
    unpack_weight,
    unpack_zero,
)


@dataclass(frozen=True)
class IntegerMatrix:
    """Parameters of a layer, in the kernel's order. They are in plain order where they are gathered
    and sharded.

    Attributes:
        weight, scale, zero: names; there are zeros only if a checkpoint has some.
        n, k: of this rank's part of the matrix.
        bits: of an element.
        shares_rows: whether ranks have parts of the same rows, with a scale for each row.
    """

    weight: str
    scale: str
    zero: str
    n: int
    k: int
    bits: int
    shares_rows: bool

    def is_replicated(self, name: str) -> bool:
        """Whether all ranks have the same parameter ``name``."""
        return self.shares_rows and name != self.weight

    def pack(self, name: str, plain: Tensor) -> Tensor:
        """Parameter ``name`` in the kernel's order."""
        if name == self.weight:
            return pack_weight(plain, self.bits)
        return pack_zero(plain, self.bits) if name == self.zero else pack_scale(plain)

    def unpack(self, name: str, packed: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        if name == self.weight:
            return unpack_weight(packed, self.n, self.k)
        if name == self.zero:
            return unpack_zero(packed, self.n, self.bits)
        return unpack_scale(packed, self.n)

    def operand(self, parameters: Mapping[str, Any]) -> IntegerWeight:
        """What products take, of the layer's parameters."""
        scale, zero = parameters[self.scale], parameters.get(self.zero)
        return IntegerWeight(parameters[self.weight], self.n, scale, zero)

    def floats(self, state: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The full matrix in ``dtype``, of the full state, which then lacks scales and zeros."""
        scale, zero = state.pop(self.scale), state.pop(self.zero, None)
        return Integers(state[self.weight], scale, zero).floats(dtype)
