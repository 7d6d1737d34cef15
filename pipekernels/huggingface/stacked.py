"""Reads experts that files hold one by one as the stacked tensors of a model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

Slice: TypeAlias = Callable[[], Any]  # Gives safetensors' slice of a whole tensor.


class Stacked:
    """``[experts, rows, columns]``, read like a slice of safetensors: only the requested part.

    Args:
        fused: for each of the matrices that are joined along the rows, such as gate and up, its
            tensors ``[rows, columns]`` by expert.
    """

    def __init__(self, fused: list[list[Slice]]) -> None:
        self._fused = fused
        self._rows = [matrix[0]().get_shape()[0] for matrix in fused]
        self._columns = fused[0][0]().get_shape()[1]

    def get_shape(self) -> list[int]:
        """Experts, rows and columns."""
        return [len(self._fused[0]), sum(self._rows), self._columns]

    def get_dtype(self) -> str:
        """The dtype of the first, by safetensors' name."""
        return str(self._fused[0][0]().get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        """Read a range of each dimension; of dimensions that ``index`` leaves out, all."""
        given = index if isinstance(index, tuple) else ()
        ranges = [*given, *[slice(None)] * (3 - len(given))]
        experts, rows, columns = (
            range(size)[part] for part, size in zip(ranges, self.get_shape(), strict=True)
        )
        own_columns = slice(columns.start, columns.stop)
        stacked, start = [], 0
        for matrix, size in zip(self._fused, self._rows, strict=True):
            begin, end = max(rows.start, start), min(rows.stop, start + size)
            if begin < end:
                own_rows = slice(begin - start, end - start)
                stacked.append(torch.stack([matrix[e]()[own_rows, own_columns] for e in experts]))
            start += size
        return torch.cat(stacked, 1)


def stacked(files: Mapping[str, Slice], transforms: Iterable[Any]) -> dict[str, Slice]:
    """The tensors that transformers makes of several of ``files`` by stacking, by their names in a
    model. Those that it makes otherwise are left out.

    Args:
        files: by their names in the model, where these differ only.
        transforms: of transformers' mapping for the model.
    """
    found: dict[str, Slice] = {}
    for transform in filter(_stacks, transforms):
        parts: dict[str, dict[str, dict[int, Slice]]] = defaultdict(lambda: defaultdict(dict))
        for key, tensor in files.items():
            name, source = transform.rename_source_key(key)
            if source is not None:
                expert = int(re.findall(r"\.(\d+)\.", key)[-1])
                parts[name][source][expert] = tensor
        for name, by_source in parts.items():
            if by_source.keys() != set(transform.source_patterns):
                continue
            fused = [by_source[source] for source in transform.source_patterns]
            if all(sorted(matrix) == list(range(len(fused[0]))) for matrix in fused):
                own = [[matrix[i] for i in range(len(matrix))] for matrix in fused]
                found[name] = partial(Stacked, own)
    return found


def _stacks(transform: Any) -> bool:
    """Whether ``transform`` stacks experts, and joins matrices along their rows."""
    steps = [
        (type(operation).__name__, getattr(operation, "dim", None))
        for operation in getattr(transform, "operations", ())
    ]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
