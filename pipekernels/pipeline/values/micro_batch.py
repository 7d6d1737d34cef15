"""A mini-batch cut into micro-batches, and outputs written back into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipekernels._torch_private import storage_key
from pipekernels.local_ops.micro_batch import micro_batch_sizes, split_micro_batches
from pipekernels.pipeline.values.structure import Structure


@dataclass(frozen=True)
class Batch:
    """A mini-batch.

    Args:
        tensors: its tensors, with one batch size.
        structure: how the first stage's value is put together from them.
        chunks: the most micro-batches to cut it into.
        dim: the batch dimension of all tensors, in and out.
    """

    tensors: Sequence[torch.Tensor]
    structure: Structure
    chunks: int
    dim: int = 0


def rows_of(tensors: Sequence[torch.Tensor], dim: int, what: str) -> int:
    """The batch size that all ``tensors`` have, in dimension ``dim``.

    Args:
        tensors: at least one.
        dim: the batch dimension, from 0.
        what: what an error calls them.

    Raises:
        ValueError: a tensor has no such dimension, or the batch sizes differ.
    """
    for i, tensor in enumerate(tensors):
        if tensor.dim() <= dim:
            raise ValueError(
                f"{what} {i} has {tensor.dim() or 'no'} dimension{'s' * (tensor.dim() > 1)}; batch "
                f"dimension {dim} is needed to split it (NoChunk(tensor) gives it whole to every "
                "micro-batch)"
            )
        if tensor.size(dim) != tensors[0].size(dim):
            raise ValueError(
                f"{what} {i} has batch size {tensor.size(dim)} and {what} 0 has "
                f"{tensors[0].size(dim)}; all tensors are split together and must agree in "
                f"dimension {dim} (NoChunk(tensor) gives one whole to every micro-batch)"
            )
    return tensors[0].size(dim)


class Scatter:
    """Micro-batches of ``tensors`` along dimension ``dim``: views along dimension 0, contiguous
    copies, made at once, along another.

    Args:
        tensors: each with a batch dimension ``dim``.
        chunks: the most micro-batches to make; there are ``max(1, min(chunks, batch))``, of sizes
            that differ by at most one, larger first.
        dim: the batch dimension, from 0.
        what: what an error calls ``tensors``.

    Raises:
        ValueError: as :func:`rows_of`.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], chunks: int, dim: int = 0, what: str = "input"
    ) -> None:
        self.batch = rows_of(tensors, dim, what)
        self.dim = dim
        self.sizes = micro_batch_sizes(self.batch, chunks)
        if dim == 0:
            self._parts = list(zip(*(_views(t, self.sizes) for t in tensors), strict=True))
        else:
            self._parts = split_micro_batches(tensors, chunks, dim)

    def __len__(self) -> int:
        return len(self.sizes)

    def elements(self, m: int) -> int:
        """How many elements micro-batch ``m`` has, in all tensors."""
        return sum([tensor.numel() for tensor in self._parts[m]])

    def take(self, m: int) -> tuple[torch.Tensor, ...]:
        """Micro-batch ``m``, once: no reference is kept, as this object lives as long as the
        output."""
        part, self._parts[m] = self._parts[m], ()
        return part

    def joined(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """One tensor of what each micro-batch has, zeros where that is None; None if none has
        any."""
        present = [part for part in parts if part is not None]
        if not present:
            return None
        whole = _new_whole(present[0], self.batch, self.dim)
        for piece, part in zip(whole.split(self.sizes, self.dim), parts, strict=True):
            if part is None:
                piece.zero_()
            else:
                piece.copy_(part)
        return whole


def _views(tensor: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    views: Sequence[torch.Tensor] = tensor.split(sizes)
    if tensor.requires_grad:
        return views  # A target that wants a gradient gets it.
    if tensor.is_cuda and type(tensor) is torch.Tensor:
        # Which numbers dropout draws there depends on the alignment of its input, and that of a
        # recomputation, or of a graph, may be a copy.
        return [view.clone() if view.data_ptr() % 16 else view.detach() for view in views]
    # Layers may work in place on them, which autograd forbids on what split() returns.
    return [view.detach() for view in views]


def _new_whole(part: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Memory for parts like ``part``, ``size`` entries along ``dim`` in all; channels last where it
    is."""
    shape = list(part.shape)
    shape[dim] = size
    if not part.is_contiguous():
        for order in (torch.channels_last, torch.channels_last_3d):
            if part.is_contiguous(memory_format=order):
                laid_out = torch.empty(shape, device="meta", memory_format=order)
                return part.new_empty_strided(shape, laid_out.stride())
    return part.new_empty(shape)


class Gather:
    """One tensor, filled micro-batch by micro-batch as they arrive in any order, so that nothing is
    concatenated, unless their dtypes differ.

    Every micro-batch may bring the same multiple of its rows, as in ``[batch * tokens, ...]``.

    Args:
        sizes: rows of each micro-batch.
        dim: the batch dimension.
    """

    def __init__(self, sizes: Sequence[int], dim: int = 0) -> None:
        self._sizes = sizes
        self._dim = dim
        self._whole: torch.Tensor | None = None
        self._places: Sequence[torch.Tensor] = ()  # Views of it, one per micro-batch.
        self._parts: dict[int, torch.Tensor] = {}  # Those of another dtype.
        self._lengths: list[int] = []  # Entries of each micro-batch along `dim`.

    def write(self, m: int, part: torch.Tensor) -> None:
        """Take micro-batch ``m``'s part; its memory is not needed afterwards.

        Raises:
            ValueError: the part has no dimension to join along, or not the rows of its micro-batch
                or the multiple of them that the parts before had, or another shape than those.
        """
        dim = self._dim
        if part.dim() <= dim:
            raise ValueError(
                f"the last stage returned a tensor of shape {tuple(part.shape)}; outputs are "
                f"joined along dimension {dim} (compute a scalar loss outside the pipe, or with "
                "train_step)"
            )
        if len(self._sizes) == 1:
            self._lengths = [part.size(dim)]
            self._whole = part.detach()
            return
        if self._whole is None:
            rows = part.size(dim) // self._sizes[m]
            self._lengths = [rows * size for size in self._sizes]
            self._whole = _new_whole(part, sum(self._lengths), dim)
            self._places = self._whole.split(self._lengths, dim)
        place = self._places[m]
        if part.shape != place.shape:
            raise ValueError(
                f"the last stage returned a tensor of shape {tuple(part.shape)} for micro-batch "
                f"{m}, of {self._sizes[m]} rows; outputs are joined along dimension {dim}, so each "
                "must have there the rows of its micro-batch, or one multiple of them, and "
                "otherwise the shape of the others (drop it in a last layer, move its batch "
                "dimension, or use chunks=1)"
            )
        if part.dtype == place.dtype:
            place.copy_(part.detach())
        else:
            self._parts[m] = part.detach()

    def take(self) -> torch.Tensor:
        """All parts in order. Keeps no reference: the output's graph holds this object."""
        whole = self._whole
        assert whole is not None
        if self._parts:
            parts = [self._parts.get(m, place) for m, place in enumerate(self._places)]
            whole = torch.cat(parts, self._dim)
        self._whole = None
        self._places = ()
        self._parts.clear()
        return whole

    def slices(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """``whole``, shaped like what :meth:`take` gave, as the views that belong to each
        micro-batch."""
        return list(whole.split(self._lengths, self._dim))


def apart(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """``tensors``, those that share memory with one of ``others``, or with one before, as
    copies."""
    taken = set(map(_memory, others))
    result = []
    for tensor in tensors:
        result.append(tensor.clone() if _memory(tensor) in taken else tensor)
        taken.add(_memory(tensor))
    return tuple(result)


def _memory(tensor: torch.Tensor) -> int:
    """Tells storages apart. What has none, such as a sparse tensor, counts for itself."""
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)
