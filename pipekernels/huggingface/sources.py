"""Tensors of a checkpoint, of which only the requested part is read."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Source(abc.ABC):
    """A tensor that is read by ranges of its dimensions; ``dtype`` is safetensors' name."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Read a range of each dimension; of dimensions that ``index`` leaves out, all."""
        given = index if isinstance(index, tuple) else ()
        parts = [*given, *[slice(None)] * (len(self.shape) - len(given))]
        spans = (part.indices(size)[:2] for part, size in zip(parts, self.shape, strict=True))
        return self.read(*(slice(start, stop) for start, stop in spans))

    def t(self) -> Source:
        """The transposed matrix."""
        return Computed(self.shape[::-1], lambda *ranges: self[ranges[::-1]].t(), self.dtype)

    @abc.abstractmethod
    def read(self, *ranges: slice) -> Tensor:
        """Read a range, from a start to a stop, of every dimension."""


class _OpenFiles(threading.local):
    def __init__(self) -> None:
        self.by_path: dict[Path, Any] = {}
        self.stack = ExitStack()


_open_files = _OpenFiles()


@contextmanager
def files_kept_open() -> Iterator[None]:
    """Files that this thread reads inside stay open until the end, as opening one parses the names
    of all its tensors. What was read of a mapped file is memory of this process until the file is
    closed and no view of it is left."""
    try:
        with _open_files.stack:
            yield
    finally:
        _open_files.by_path.clear()


class FileTensor(Source):
    """A tensor in a file of safetensors, read within :func:`files_kept_open`."""

    def __init__(self, path: Path, key: str, shape: Sequence[int], dtype: str) -> None:
        super().__init__(shape, dtype)
        self.path = path
        self.key = key

    def read(self, *ranges: slice) -> Tensor:
        from safetensors import safe_open

        files = _open_files.by_path
        if self.path not in files:
            files[self.path] = _open_files.stack.enter_context(safe_open(self.path, "pt"))
        tensor: Tensor = files[self.path].get_slice(self.key)[ranges or ...]
        return tensor


class Computed(Source):
    """A tensor that a function reads and computes."""

    def __init__(
        self, shape: Sequence[int], function: Callable[..., Tensor], dtype: str = "I8"
    ) -> None:
        super().__init__(shape, dtype)
        self._function = function

    def read(self, *ranges: slice) -> Tensor:
        return self._function(*ranges)


class Stacked(Source):
    """``[experts, rows, columns]``.

    Args:
        fused: for each of the matrices that are joined along the rows, such as gate and up, its
            tensors ``[rows, columns]`` by expert.
    """

    def __init__(self, fused: list[list[Any]]) -> None:
        rows, first = sum(matrix[0].shape[0] for matrix in fused), fused[0][0]
        super().__init__((len(fused[0]), rows, first.shape[1]), first.dtype)
        self.fused = fused
        self.matrices = [each for matrix in fused for each in matrix]

    def piece(self, kind: str) -> Stacked:
        """The pieces of quantized matrices, stacked."""
        return Stacked([[each.piece(kind) for each in matrix] for matrix in self.fused])

    def read(self, *ranges: slice) -> Tensor:
        experts, rows, columns = ranges
        stacked, start = [], 0
        for matrix in self.fused:
            size = matrix[0].shape[0]
            begin, end = max(rows.start, start), min(rows.stop, start + size)
            if begin < end:
                own_rows = slice(begin - start, end - start)
                stacked.append(torch.stack([each[own_rows, columns] for each in matrix[experts]]))
            start += size
        return torch.cat(stacked, 1)
