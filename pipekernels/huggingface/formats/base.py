"""What formats of quantized checkpoints have in common.

A format is a function of a module's name in the files, its tensors by the last part of their names,
and ``quantization_config`` of ``config.json``. It returns a source of the weight's floats, ``[n,
k]``, and raises ValueError for what it does not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipekernels.huggingface.sources import Computed, Source

Tensors: TypeAlias = Mapping[str, Source]
Config: TypeAlias = Mapping[str, Any]


def refusal(name: str, problem: str) -> ValueError:
    """The error for what no format reads."""
    return ValueError(
        f"the weights are quantized: {name!r} {problem}; load the model from a checkpoint of "
        "floats, with bits=8 or bits=4 for integers"
    )


class QuantizedIntegers(Source):
    """The floats of a weight ``(W - zero) * scale`` of integers; layers use :meth:`piece`.

    Args:
        group: input features that share a scale; -1: all.
        weight, zero: int8, ``[n, k]`` and ``[n, groups]``; unsigned ones less their middle.
        scale: ``[n, groups]``.
        symmetric: all zeros are 0, which is checked where there are some.
        index: ``[k]``, the group of each input feature; None: they are in order.
    """

    def __init__(
        self,
        name: str,
        bits: int,
        group: int,
        weight: Source,
        scale: Source,
        zero: Source | None,
        symmetric: bool,
        index: Source | None = None,
    ) -> None:
        super().__init__(weight.shape, "F32")
        self.group = weight.shape[1] if group == -1 else group
        self.has_zero = not symmetric
        group_or_row = None if self.group == weight.shape[1] else self.group
        self.layout = bits, group_or_row, self.has_zero
        self._name = name
        self._weight, self._scale, self._zero, self._index = weight, scale, zero, index
        expected = weight.shape[0], -(-weight.shape[1] // self.group)
        if scale.shape != expected or scale.dtype not in ("F32", "F16", "BF16"):
            found = f"has scales of {scale.dtype} and the shape {scale.shape}, not {expected}"
            raise refusal(name, f"{found}, in groups of {self.group}")

    @cached_property
    def _groups(self) -> Tensor:
        """The group of each input feature."""
        in_order = torch.arange(self.shape[1]) // self.group
        groups = in_order if self._index is None else self._index[...].long()
        if not groups.sort().values.equal(in_order):
            raise refusal(f"{self._name}.g_idx", f"has groups of other sizes than {self.group}")
        return groups

    @property
    def is_sorted(self) -> bool:
        """Whether the input features are in the order of their groups."""
        return bool((self._groups.diff() >= 0).all())

    def _scales(self, rows: slice, groups: slice) -> Tensor:
        if self._zero is not None and not self.has_zero and self._zero[rows, groups].any():
            raise refusal(self._name, "has zeros that are not the middle in spite of sym=true")
        return self._scale[rows, groups]

    def read(self, *ranges: slice) -> Tensor:
        rows, columns = ranges
        groups = self._groups[columns]
        first = int(groups.min())
        span = slice(first, int(groups.max()) + 1)
        weight = self._weight[rows, columns].float()
        if self._zero is not None and self.has_zero:
            weight -= self._zero[rows, span][:, groups - first]
        return weight.mul_(self._scales(rows, span)[:, groups - first])

    def piece(self, kind: str) -> Source:
        """The integers' ``"weight"``, ``"scale"`` or ``"zero"``, read by ranges of the weight,
        columns of whole groups; for features in the order of their groups."""

        def read(rows: slice, columns: slice) -> Tensor:
            groups = slice(columns.start // self.group, -(-columns.stop // self.group))
            if kind == "scale":
                return self._scales(rows, groups)
            if kind == "zero" and self._zero is not None:
                return self._zero[rows, groups]
            return self._weight[rows, columns]

        return Computed(self.shape, read)


def unpacked(
    words: Source, bits: int, dim: int, places: Sequence[int] = range(8), added: int = 0
) -> Source:
    """The elements of int32 words along dimension ``dim``, plus ``added``, less the middle: int8.
    ``places`` are where a word has its elements, the lowest bits first."""
    if dim == 0:
        return unpacked(words.t(), bits, 1, places, added).t()
    count = 32 // bits

    def read(rows: slice, columns: slice) -> Tensor:
        first = columns.start // count
        values = words[rows, first : -(-columns.stop // count)].contiguous().view(torch.uint8)
        if bits == 4:
            values = torch.stack((values & 15, values >> 4), -1).flatten(-2)
            values = values.unflatten(-1, (-1, 8))[..., list(places)].flatten(-2)
        own = values[:, columns.start - first * count : columns.stop - first * count]
        return (own + added - (1 << (bits - 1))).view(torch.int8)  # uint8 wraps.

    return Computed((words.shape[0], words.shape[1] * count), read)
