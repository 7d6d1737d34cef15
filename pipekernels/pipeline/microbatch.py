"""Cuts a mini-batch into microbatches, and joins their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from pipekernels._torch_private import storage_key
from pipekernels.ops.micro_batch import micro_batch_sizes, split_micro_batches
from pipekernels.pipeline.nested import SINGLE_TENSOR, Structure, merged

Grads = tuple[torch.Tensor | None, ...]
_sizes = lru_cache(maxsize=256)(micro_batch_sizes)  # The lists are not changed.


@dataclass(slots=True)
class Activation:
    """Tensors of one microbatch that go from stage to stage: a value's, then the skips.
    They are detached from the graph of the stage that made them."""

    tensors: tuple[torch.Tensor, ...]
    wants_grad: tuple[bool, ...]
    structure: Structure  # How to build the value from its tensors.
    skips: tuple[Any, ...] = ()  # Keys of the skips, the last of `tensors`.
    sources: Sequence[torch.device] = ()  # Where the other tensors were copied from, if they were.


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
        self.devices = [tensor.device for tensor in tensors]
        self.rows = rows_of(tensors, self.dim, what)
        self.sizes = _sizes(self.rows, batch.chunks)  # Rows of each microbatch.
        self._wants_grad = tuple(wants_grad)
        self.want_grad = any(wants_grad)
        for i, tensor in enumerate(tensors):
            if len(self.sizes) > 1 and (tensor.layout != torch.strided or tensor.is_nested):
                raise TypeError(
                    f"{what} {i} is a {type(tensor).__name__} of layout {tensor.layout}, whose "
                    "rows cannot be cut into microbatches; give its parts as dense tensors, give "
                    "all of it to every microbatch (NoChunk(tensor)), or use chunks=1"
                )
        if self.dim == 0 or len(self.sizes) == 1:  # No copies are needed.
            columns: list[Sequence[torch.Tensor]] = []
            for tensor in tensors:
                views = tensor.split(self.sizes, self.dim) if len(self.sizes) > 1 else [tensor]
                is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
                if tensor.is_cuda and is_plain:
                    # On CUDA, dropout's mask depends on the alignment of its input. A recomputation
                    # may use an aligned copy of the input, so align all.
                    views = [view.clone() if view.data_ptr() % 16 else view for view in views]
                # Detached: autograd forbids layers to modify outputs of split() in place. Not
                # targets that require a gradient.
                columns.append(views if tensor.requires_grad else [v.detach() for v in views])
            self._parts = list(zip(*columns, strict=True))
        else:
            self._parts = split_micro_batches(tensors, batch.chunks, self.dim)
        structure = batch.structure
        is_single = structure is SINGLE_TENSOR
        structures = (
            [structure] * len(self.sizes) if is_single else structure.cut(self.sizes, device)
        )
        self._structures: list[Structure | None] = list(structures)

    def take(self, m: int) -> Activation:
        """Microbatch ``m``; call once. Drops the references to it, as the output's graph keeps
        this object, and its values may be large."""
        part, structure = self._parts[m], self._structures[m]
        self._parts[m], self._structures[m] = (), None
        assert structure is not None
        return Activation(part, self._wants_grad, structure)

    def joined(self, grads: Sequence[Grads]) -> Grads:
        """The gradients of the whole tensors, joined from the microbatches'; without any, None
        for a tensor."""
        result: list[torch.Tensor | None] = [None] * len(self._wants_grad)
        for i in [i for i, wants in enumerate(self._wants_grad) if wants]:
            parts = [part[i] if part else None for part in grads]
            like = next((part for part in parts if part is not None), None)
            if like is not None:
                before, after = like.shape[: self.dim], like.shape[self.dim + 1 :]
                present = [
                    like.new_zeros((*before, size, *after)) if part is None else part
                    for part, size in zip(parts, self.sizes, strict=True)
                ]
                result[i] = torch.cat(present, self.dim)
        return tuple(result)


def shares(sizes: Sequence[int]) -> list[float]:
    """The weight of each microbatch in a mean over rows."""
    batch = sum(sizes)
    return [size / batch if batch else 1.0 / len(sizes) for size in sizes]


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
    """Receives the last stage's outputs and returns their gradients."""

    parameter_grads: dict[int, torch.Tensor]
    """Gradients of parameters that no stage has, by id of the parameter."""

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
        self._parts: dict[int, Activation] = {}
        self.structure = SINGLE_TENSOR  # How to build the whole output of its tensors.
        # Gradients of the whole outputs, None for one without; empty but during a backward.
        self.whole_grads: Sequence[torch.Tensor | None] = ()
        # Of each output, the entries of each microbatch; None for a scalar.
        self._lengths: list[list[int] | None] = []
        self.parameter_grads: dict[int, torch.Tensor] = {}

    def collect(self, m: int, outputs: Activation) -> None:
        self._parts[m] = outputs

    def join(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the whole outputs. Drops the parts, as the graph keeps this object.
        ValueError if microbatches cannot be joined; none if there are no outputs."""
        parts = [self._parts.pop(m) for m in sorted(self._parts)]
        if not parts:
            return ()
        first = parts[0].structure
        for m, part in enumerate(parts):
            if part.structure is not first and not part.structure.has_same_layout(first):
                raise ValueError(
                    f"{self._source} returned {len(part.tensors)} tensors for microbatch {m} and "
                    f"{len(parts[0].tensors)} before, or put them together in another way; all "
                    "microbatches must return the same structure"
                )
        if first is not SINGLE_TENSOR:
            self.structure = merged([part.structure for part in parts])
        columns = zip(*[part.wants_grad for part in parts], strict=True)
        self.wants_grad = [any(column) for column in columns]
        return tuple(
            [self._joined(column) for column in zip(*[p.tensors for p in parts], strict=True)]
        )

    def _joined(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """One output of all microbatches."""
        first, dim = parts[0], self._dim
        if first.dim() == 0 and (first.is_floating_point() or first.is_complex()):
            if any(part.dim() for part in parts):
                raise ValueError(
                    f"{self._source} returned a tensor for a microbatch where it returned a scalar "
                    "before; all microbatches must return the same structure"
                )
            self._weights = shares(self._sizes) if self._weights is None else self._weights
            self._lengths.append(None)
            weighted = [part * weight for part, weight in zip(parts, self._weights, strict=True)]
            return torch.stack(weighted).sum()
        if first.dim() <= dim:
            raise ValueError(
                f"{self._source} returned a tensor of shape {tuple(first.shape)} and dtype "
                f"{first.dtype}; tensors are joined along dimension {dim}, and only scalars of a "
                "floating-point dtype are averaged"
            )
        # The first part decides how many entries a row has, and all other dimensions.
        shape = list(first.shape)
        entries = shape[dim] // (self._sizes[0] or 1)
        for m, part in enumerate(parts if len(parts) > 1 else ()):
            shape[dim] = entries * self._sizes[m]
            if list(part.shape) != shape:
                raise ValueError(
                    f"{self._source} returned a tensor of shape {tuple(part.shape)} for microbatch "
                    f"{m}, of {self._sizes[m]} rows; outputs are joined along dimension {dim}, "
                    "which must equal the microbatch's rows or a common multiple of them, and the "
                    "other dimensions must be equal (drop it in a last layer, move its batch "
                    "dimension, or use chunks=1)"
                )
        self._lengths.append([part.size(dim) for part in parts])
        return torch.cat(parts, dim) if len(parts) > 1 else first

    def grads(self, m: int) -> Grads:
        result: list[torch.Tensor | None] = []
        for grad, lengths in zip(self.whole_grads, self._lengths, strict=True):
            if grad is None:
                result.append(None)
            elif lengths is None:
                result.append(grad * (self._weights or ())[m])
            else:
                result.append(grad.narrow(self._dim, sum(lengths[:m]), lengths[m]))
        return tuple(result)
