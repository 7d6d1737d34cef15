"""Cuts a mini-batch into micro-batches, and joins their outputs."""

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
        tensors: its tensors, all of the same batch size.
        structure: how to build the first stage's input from them.
        chunks: the most micro-batches to cut it into.
        dim: the batch dimension of all tensors, in and out.
    """

    tensors: Sequence[torch.Tensor]
    structure: Structure
    chunks: int
    dim: int = 0


def rows_of(tensors: Sequence[torch.Tensor], dim: int, what: str) -> int:
    """The common batch size of one or more ``tensors``, in dimension ``dim``, from 0. ValueError
    if one, called ``what``, has no such dimension, or batch sizes differ."""
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
    """Micro-batches of ``tensors`` along dimension ``dim``: views if it is 0 or there is only one,
    otherwise contiguous copies made by the constructor.

    Args:
        tensors, dim, what: as for :func:`rows_of`.
        chunks: the most micro-batches; their sizes are those of :func:`micro_batch_sizes`.

    Raises:
        TypeError: a tensor is sparse or nested, and there are several micro-batches.
        ValueError: as :func:`rows_of`.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], chunks: int, dim: int = 0, what: str = "input"
    ) -> None:
        self.batch = rows_of(tensors, dim, what)
        self.dim = dim
        self.sizes = micro_batch_sizes(self.batch, chunks)
        for i, tensor in enumerate(tensors):
            if len(self.sizes) > 1 and not _is_dense(tensor):
                raise TypeError(
                    f"{what} {i} is a {type(tensor).__name__} of layout {tensor.layout}, whose "
                    "rows cannot be cut into micro-batches; give its parts as dense tensors, give "
                    "all of it to every micro-batch (NoChunk(tensor)), or use chunks=1"
                )
        if dim == 0 or len(self.sizes) == 1:
            views = [_views(tensor, self.sizes, dim) for tensor in tensors]
            self._parts = list(zip(*views, strict=True))
        else:
            self._parts = split_micro_batches(tensors, chunks, dim)

    def __len__(self) -> int:
        return len(self.sizes)

    def elements(self, m: int) -> int:
        """Number of elements of micro-batch ``m``, over all tensors."""
        return sum([tensor.numel() for tensor in self._parts[m]])

    def take(self, m: int) -> tuple[torch.Tensor, ...]:
        """Micro-batch ``m``; call once per micro-batch. Drops the reference to it, because the
        output's graph keeps this object."""
        part, self._parts[m] = self._parts[m], ()
        return part

    def joined(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """``parts``, one per micro-batch, joined, with zeros for a None; None if all are None."""
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


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _views(tensor: torch.Tensor, sizes: list[int], dim: int) -> Sequence[torch.Tensor]:
    dense = _is_dense(tensor)
    views: Sequence[torch.Tensor] = tensor.split(sizes, dim) if len(sizes) > 1 else [tensor]
    if tensor.requires_grad:
        return views  # Targets that require a gradient.
    if dense and tensor.is_cuda and type(tensor) is torch.Tensor:
        # On CUDA, dropout's mask depends on the alignment of its input. A recomputation may use an
        # aligned copy of the input, so align all.
        return [view.clone() if view.data_ptr() % 16 else view.detach() for view in views]
    # Detached: autograd forbids layers to modify outputs of split() in place.
    return [view.detach() for view in views]


def _new_whole(part: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """An empty tensor for parts like ``part``, of ``size`` along ``dim``; channels last if ``part``
    is."""
    shape = list(part.shape)
    shape[dim] = size
    if not part.is_contiguous():
        for order in (torch.channels_last, torch.channels_last_3d):
            if part.is_contiguous(memory_format=order):
                laid_out = torch.empty(shape, device="meta", memory_format=order)
                return part.new_empty_strided(shape, laid_out.stride())
    return part.new_empty(shape)


def shares(sizes: Sequence[int]) -> list[float]:
    """The weight of each micro-batch in a mean over rows."""
    batch = sum(sizes)
    return [size / batch if batch else 1.0 / len(sizes) for size in sizes]


class Average:
    """A scalar of every micro-batch, such as an auxiliary loss, joined to the sum of all, each
    times its micro-batch's weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._parts: list[torch.Tensor | None] = [None] * len(weights)

    def write(self, m: int, part: torch.Tensor) -> None:
        """Keep the weighted scalar of micro-batch ``m``. ValueError if it is not a scalar."""
        if part.dim() > 0:
            raise ValueError(
                f"a tensor of shape {tuple(part.shape)} was returned for micro-batch {m} where a "
                "scalar was before; all micro-batches must return the same structure"
            )
        self._parts[m] = part.detach() * self._weights[m]

    def take(self) -> torch.Tensor:
        """The sum, in order. Drops the references to the parts."""
        weighted = [part for part in self._parts if part is not None]
        self._parts.clear()
        return torch.stack(weighted).sum()

    def slices(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """``whole``, a gradient of the sum, as one of each part."""
        return [whole * weight for weight in self._weights]


class Gather:
    """One tensor into which micro-batches are written in any order, which avoids a concatenation,
    unless their dtypes differ. All may have a common multiple of their rows, as
    ``[batch * tokens, ...]``.

    Args:
        sizes: rows of each micro-batch.
        dim: the batch dimension.
        source: what has returned the parts, in errors.
    """

    def __init__(self, sizes: Sequence[int], dim: int = 0, source: str = "the last stage") -> None:
        self._sizes = sizes
        self._dim = dim
        self._source = source
        self._whole: torch.Tensor | None = None
        self._places: Sequence[torch.Tensor] = ()  # Views of _whole, one per micro-batch.
        self._parts: dict[int, torch.Tensor] = {}  # Those of another dtype.
        self._lengths: list[int] = []  # Entries of each micro-batch.

    def write(self, m: int, part: torch.Tensor) -> None:
        """Copy the part of micro-batch ``m``; a single one is kept.

        Raises:
            ValueError: the part has no dimension ``dim``, or another shape than the first part
                lets expect.
        """
        dim = self._dim
        if part.dim() <= dim:
            raise ValueError(
                f"{self._source} returned a tensor of shape {tuple(part.shape)} and dtype "
                f"{part.dtype}; tensors are joined along dimension {dim}, and only scalars of a "
                "floating-point dtype are averaged"
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
                f"{self._source} returned a tensor of shape {tuple(part.shape)} for micro-batch "
                f"{m}, of {self._sizes[m]} rows; outputs are joined along dimension {dim}, "
                "which must equal the micro-batch's rows or a common multiple of them, and the "
                "other dimensions must be equal (drop it in a last layer, move its batch "
                "dimension, or use chunks=1)"
            )
        if part.dtype == place.dtype:
            place.copy_(part.detach())
        else:
            self._parts[m] = part.detach().clone()

    def take(self) -> torch.Tensor:
        """All parts, joined in order. Drops its references: the graph keeps this object."""
        whole = self._whole
        assert whole is not None
        deny_constant(self._places, self._sizes, self._dim)
        if self._parts:
            parts = [self._parts.get(m, place) for m, place in enumerate(self._places)]
            whole = torch.cat(parts, self._dim)
        self._whole = None
        self._places = ()
        self._parts.clear()
        return whole

    def slices(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """``whole``, of the shape that :meth:`take` returned, as one view per micro-batch."""
        return list(whole.split(self._lengths, self._dim))


def deny_constant(parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> None:
    """Raise a ValueError if ``parts``, of micro-batches of ``sizes`` rows, have a multiple of these
    and are equal: then they are not rows, but one tensor for all of the batch."""
    if len(parts) < 2 or (rows := parts[0].size(dim) // sizes[0]) < 2:
        return
    first, *others = parts
    if all(first.shape == part.shape and torch.equal(first, part) for part in others):
        raise ValueError(
            f"a tensor of shape {tuple(first.shape)} was returned for every micro-batch, with "
            f"equal values: it has {rows} times the rows of a micro-batch, and seems to belong to "
            "the whole batch, not to rows of it; return it from a layer outside, with a leading "
            "dimension of the batch (expand it), or use chunks=1"
        )


def copy_if_aliased(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """``tensors``, with copies of those that share memory with ``others`` or an earlier tensor."""
    taken = set(map(_storage_id, others))
    result = []
    for tensor in tensors:
        result.append(tensor.clone() if _storage_id(tensor) in taken else tensor)
        taken.add(_storage_id(tensor))
    return tuple(result)


def _storage_id(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage, or the tensor if it has none, such as a sparse one."""
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)
