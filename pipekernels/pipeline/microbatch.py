"""Cuts a mini-batch into microbatches, and joins their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from pipekernels._torch_private import storage_key
from pipekernels.ops.micro_batch import micro_batch_sizes, split_micro_batches
from pipekernels.pipeline.nested import Structure, merged

Grads = tuple[torch.Tensor | None, ...]
_sizes = lru_cache(maxsize=256)(micro_batch_sizes)  # The lists are not changed.


@dataclass(slots=True)
class Activation:
    """Tensors of one microbatch that go from stage to stage: those of a value, then the skips.
    They are detached from the graph of the stage that made them."""

    tensors: tuple[torch.Tensor, ...]
    wants_grad: tuple[bool, ...]
    structure: Structure  # How to build the value from its tensors.
    skips: tuple[Any, ...] = ()  # Keys of the skips, the last of `tensors`.
    sources: Sequence[torch.device] = ()  # Where the other tensors were copied from, if they were.

    def with_skips(self, skips: Mapping[Any, tuple[torch.Tensor, bool]]) -> Activation:
        """This activation with ``skips`` added, each a tensor and whether it wants a gradient."""
        if not skips:
            return self
        tensors = (*self.tensors, *[tensor for tensor, _ in skips.values()])
        wants_grad = (*self.wants_grad, *[wants for _, wants in skips.values()])
        return Activation(tensors, wants_grad, self.structure, tuple(skips), self.sources)

    def without_skips(self) -> tuple[Activation, dict[Any, tuple[torch.Tensor, bool]]]:
        """The activation of the value alone, and the skips."""
        n = len(self.tensors) - len(self.skips)
        skips = zip(self.tensors[n:], self.wants_grad[n:], strict=True)
        value = Activation(self.tensors[:n], self.wants_grad[:n], self.structure)
        return value, dict(zip(self.skips, skips, strict=True))


@dataclass(frozen=True)
class Batch:
    """A mini-batch."""

    tensors: Sequence[torch.Tensor]  # All of the same batch size.
    structure: Structure  # How to build the first stage's input from them.
    chunks: int  # The most microbatches to cut it into.
    dim: int = 0  # The batch dimension of all tensors, in and out.


def rows_of(tensors: Sequence[torch.Tensor], dim: int, what: str) -> int:
    """The common batch size of one or more ``tensors``, in dimension ``dim``, from 0. ValueError
    if one, called ``what``, has no such dimension, or batch sizes differ."""
    for i, tensor in enumerate(tensors):
        if tensor.dim() <= dim:
            raise ValueError(
                f"{what} {i} has {tensor.dim() or 'no'} dimension{'s' if tensor.dim() > 1 else ''};"
                f" batch dimension {dim} is needed to split it (NoChunk(tensor) gives it whole to "
                "every microbatch)"
            )
        if tensor.size(dim) != tensors[0].size(dim):
            raise ValueError(
                f"{what} {i} has batch size {tensor.size(dim)} and {what} 0 has "
                f"{tensors[0].size(dim)}; all tensors are split together and must agree in "
                f"dimension {dim} (NoChunk(tensor) gives one whole to every microbatch)"
            )
    return tensors[0].size(dim)


class Scatter:
    """The microbatches of ``batch``: views if its dimension is 0 or there is only one, otherwise
    contiguous copies made by the constructor.

    Args:
        batch: the whole.
        wants_grad: whether each of its tensors is to get a gradient.
        what: its tensors, in errors.
        device: where unsplit tensors (``NoChunk``) go; they stay where they are by default.

    Raises:
        TypeError: a tensor is sparse or nested, and there are several microbatches.
        ValueError: as :func:`rows_of`.
    """

    def __init__(
        self,
        batch: Batch,
        wants_grad: Sequence[bool] = (),
        what: str = "input",
        device: torch.device | None = None,
    ) -> None:
        tensors, self.dim = batch.tensors, batch.dim
        self.rows = rows_of(tensors, self.dim, what)
        self.sizes = _sizes(self.rows, batch.chunks)  # Rows of each microbatch.
        self._wants_grad = tuple(wants_grad)
        for i, tensor in enumerate(tensors):
            if len(self.sizes) > 1 and (tensor.layout != torch.strided or tensor.is_nested):
                raise TypeError(
                    f"{what} {i} is a {type(tensor).__name__} of layout {tensor.layout}, whose "
                    "rows cannot be cut into microbatches; give its parts as dense tensors, give "
                    "all of it to every microbatch (NoChunk(tensor)), or use chunks=1"
                )
        if self.dim == 0 or len(self.sizes) == 1:  # No copies are needed.
            views = [_views(tensor, self.sizes, self.dim) for tensor in tensors]
            self._parts = list(zip(*views, strict=True))
        else:
            self._parts = split_micro_batches(tensors, batch.chunks, self.dim)
        self.elements = sum([tensor.numel() for tensor in self._parts[0]])  # Of the largest.
        self._structures: list[Structure | None] = list(batch.structure.cut(self.sizes, device))

    def take(self, m: int) -> Activation:
        """Microbatch ``m``; call once. Drops the references to it, as the output's graph keeps
        this object, and its values may be large."""
        part, structure = self._parts[m], self._structures[m]
        self._parts[m], self._structures[m] = (), None
        assert structure is not None
        return Activation(part, self._wants_grad, structure)

    def joined(self, grads: Sequence[Grads]) -> Grads:
        """The gradients of the whole tensors, from those of the microbatches; without any, None
        for a tensor."""
        columns = [
            [part[i] if part and wants else None for part in grads]
            for i, wants in enumerate(self._wants_grad)
        ]
        return tuple([self._joined(column) for column in columns])

    def _joined(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return None
        before, after = like.shape[: self.dim], like.shape[self.dim + 1 :]
        present = [
            like.new_zeros((*before, size, *after)) if part is None else part
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        return torch.cat(present, self.dim)


def _views(tensor: torch.Tensor, sizes: list[int], dim: int) -> Sequence[torch.Tensor]:
    views: Sequence[torch.Tensor] = tensor.split(sizes, dim) if len(sizes) > 1 else [tensor]
    if tensor.requires_grad:
        return views  # Targets that require a gradient.
    if tensor.is_cuda and type(tensor) is torch.Tensor and tensor.layout == torch.strided:
        # On CUDA, dropout's mask depends on the alignment of its input. A recomputation may use an
        # aligned copy of the input, so align all.
        return [view.clone() if view.data_ptr() % 16 else view.detach() for view in views]
    # Detached: autograd forbids layers to modify outputs of split() in place.
    return [view.detach() for view in views]


def shares(sizes: Sequence[int]) -> list[float]:
    """The weight of each microbatch in a mean over rows."""
    batch = sum(sizes)
    return [size / batch if batch else 1.0 / len(sizes) for size in sizes]


class Average:
    """A scalar of every microbatch, such as an auxiliary loss, joined to the sum of all, each
    times its microbatch's weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._parts: dict[int, torch.Tensor] = {}

    def write(self, m: int, part: torch.Tensor) -> None:
        """Keep the weighted scalar of microbatch ``m``. ValueError if it is not a scalar."""
        if part.dim() > 0:
            raise ValueError(
                f"a tensor of shape {tuple(part.shape)} was returned for microbatch {m} where a "
                "scalar was before; all microbatches must return the same structure"
            )
        self._parts[m] = part.detach() * self._weights[m]

    def take(self) -> torch.Tensor:
        """The sum, in order. Drops the references to the parts."""
        weighted = [self._parts.pop(m) for m in range(len(self._weights))]
        return torch.stack(weighted).sum()

    def slices(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """``whole``, a gradient of the sum, as one of each part."""
        return [whole * weight for weight in self._weights]


class Gather:
    """One tensor into which microbatches are written in any order, which avoids a concatenation.
    All may have a common multiple of their rows, as ``[batch * tokens, ...]``.

    Args:
        sizes: rows of each microbatch.
        dim: the batch dimension.
        source: what has returned the parts, in errors.
    """

    def __init__(self, sizes: Sequence[int], dim: int = 0, source: str = "the last stage") -> None:
        self._sizes = sizes
        self._dim = dim
        self._source = source
        self._shape: list[int] = []  # Of the last part.
        self._lengths: list[int] = []  # Entries of each microbatch.
        self._whole: torch.Tensor | None = None
        self._places: Sequence[torch.Tensor] = ()  # Views of _whole, one per microbatch.

    def _check(self, m: int, part: torch.Tensor) -> None:
        dim = self._dim
        if part.dim() <= dim:
            raise ValueError(
                f"{self._source} returned a tensor of shape {tuple(part.shape)} and dtype "
                f"{part.dtype}; tensors are joined along dimension {dim}, and only scalars of a "
                "floating-point dtype are averaged"
            )
        if len(self._sizes) == 1:
            self._lengths = [part.size(dim)]
            return
        # The first part to arrive decides how many entries a row has, and all other dimensions.
        if not self._lengths:
            self._shape = list(part.shape)
            rows = part.size(dim) // self._sizes[m]
            self._lengths = [rows * size for size in self._sizes]
        self._shape[dim] = self._lengths[m]
        if list(part.shape) != self._shape:
            raise ValueError(
                f"{self._source} returned a tensor of shape {tuple(part.shape)} for microbatch "
                f"{m}, of {self._sizes[m]} rows; outputs are joined along dimension {dim}, "
                "which must equal the microbatch's rows or a common multiple of them, and the "
                "other dimensions must be equal (drop it in a last layer, move its batch "
                "dimension, or use chunks=1)"
            )

    def write(self, m: int, part: torch.Tensor) -> None:
        """Copy the part of microbatch ``m``; a single one is kept. ValueError if it has no
        dimension ``dim``, or another shape than the first part lets expect."""
        self._check(m, part)
        if len(self._sizes) == 1:
            self._whole = part.detach()
            return
        whole = self._whole
        if whole is None:
            whole = self._new_whole(part)
        elif whole.dtype != part.dtype:  # As torch.cat() joins them.
            whole = whole.to(torch.promote_types(whole.dtype, part.dtype))
        if whole is not self._whole:
            self._whole, self._places = whole, self.slices(whole)
        self._places[m].copy_(part.detach())

    def _new_whole(self, part: torch.Tensor) -> torch.Tensor:
        """An empty tensor for parts like ``part``; channels last if this is."""
        shape = list(part.shape)
        shape[self._dim] = sum(self._lengths)
        if not part.is_contiguous():
            for order in (torch.channels_last, torch.channels_last_3d):
                if part.is_contiguous(memory_format=order):
                    return torch.empty_like(part.new_empty(()).expand(shape), memory_format=order)
        return part.new_empty(shape)

    def take(self) -> torch.Tensor:
        """All parts, joined in order. Drops its references: the graph keeps this object."""
        whole, self._whole, self._places = self._whole, None, ()
        assert whole is not None
        return whole

    def slices(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """``whole``, of the shape that :meth:`take` returned, as one view per microbatch."""
        return list(whole.split(self._lengths, self._dim))


def copy_if_aliased(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """``tensors``, with copies of those that share memory with ``others`` or an earlier tensor."""
    # Autograd would not know that they share it: a write to one would change the others unseen.
    taken = set(map(storage_id, others))
    result = []
    for tensor in tensors:
        result.append(tensor.clone() if storage_id(tensor) in taken else tensor)
        taken.add(storage_id(tensor))
    return tuple(result)


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage, or the tensor if it has none, such as a sparse one."""
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)


class OutputConsumer(Protocol):
    """Receives the last stage's outputs and returns their gradients; only the worker of that stage
    calls it."""

    parameter_grads: dict[int, torch.Tensor]
    """Gradients of parameters besides those of the stages, by id of the parameter."""

    def collect(self, m: int, outputs: Activation) -> None:
        """Take the outputs of microbatch ``m``."""

    def grads(self, m: int) -> Grads:
        """The gradients of the outputs of microbatch ``m``, None for an output without one."""


class Outputs:
    """Joins microbatches of ``sizes`` rows along ``dim``, and splits the gradients of the whole
    outputs. Scalars are averaged with ``weights``, by default each microbatch's share of the rows.
    Errors name ``source``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        weights: Sequence[float] | None = None,
        source: str = "the last stage",
    ) -> None:
        self.wants_grad: list[bool] = []
        self._sizes = sizes
        self._dim = dim
        self._weights = weights
        self._source = source
        self._structures: list[Structure] = []
        self._gathers: list[Gather | Average] = []
        self._grads: list[Grads] = []
        self.parameter_grads: dict[int, torch.Tensor] = {}

    def collect(self, m: int, outputs: Activation) -> None:
        """Write the outputs of microbatch ``m`` to their place.

        Raises:
            ValueError: their structure differs from that of earlier microbatches.
        """
        # The first microbatch to arrive says which outputs there are, and all must agree with it.
        if not self._gathers:
            self._gathers = [self._gather(tensor) for tensor in outputs.tensors]
            self.wants_grad = [False] * len(outputs.tensors)
            self._structures = [outputs.structure] * len(self._sizes)
        self._structures[m] = outputs.structure
        first = self._structures[0]
        if outputs.structure is not first and not outputs.structure.has_same_layout(first):
            raise ValueError(
                f"{self._source} returned {len(outputs.tensors)} tensors for microbatch {m} and "
                f"{len(self._gathers)} before, or put them together in another way; all "
                "microbatches must return the same structure"
            )
        for i, (tensor, wants) in enumerate(zip(outputs.tensors, outputs.wants_grad, strict=True)):
            self._gathers[i].write(m, tensor)
            self.wants_grad[i] |= wants

    def _gather(self, tensor: torch.Tensor) -> Gather | Average:
        if tensor.dim() == 0 and (tensor.is_floating_point() or tensor.is_complex()):
            return Average(shares(self._sizes) if self._weights is None else self._weights)
        return Gather(self._sizes, self._dim, self._source)

    def take(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the whole outputs."""
        return tuple([gather.take() for gather in self._gathers])

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The whole output, built of ``tensors``, the result of :meth:`take`."""
        return merged(self._structures).build(tensors)

    def give(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of the whole outputs, None for one without, for :meth:`grads`; no
        longer if ``grads`` is empty."""
        parts = [
            [None] * len(self._sizes) if grad is None else gather.slices(grad)
            for gather, grad in zip(self._gathers, grads, strict=False)
        ]
        self._grads = list(zip(*parts, strict=True))

    def grads(self, m: int) -> Grads:
        return self._grads[m]
