"""The inputs of a mini-batch, cut into those of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipekernels.pipeline.stage.task import Activation, Grads, differentiable
from pipekernels.pipeline.values.micro_batch import Batch, Scatter
from pipekernels.pipeline.values.structure import Structure


class Inputs:
    """The inputs of the first stage, on ``device``, one per micro-batch."""

    def __init__(self, batch: Batch, device: torch.device, *, grad: bool) -> None:
        # Detached if a backward can follow, as the autograd node that holds this object holds the
        # graph of the inputs.
        self.wants_grad = tuple(grad and wants_grad(tensor) for tensor in batch.tensors)
        tensors = [tensor.detach() for tensor in batch.tensors] if grad else batch.tensors
        self._scatter = Scatter(tensors, batch.chunks, batch.dim)
        self.rows, self.dim = self._scatter.batch, batch.dim
        self.sizes = self._scatter.sizes
        self.elements = self._scatter.elements(0)  # Of the first, the largest.
        structures = batch.structure.on(device).cut(self.sizes)
        self._structures: list[Structure | None] = list(structures)

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, m: int) -> Activation:
        """Micro-batch ``m``; call once. Drops the references to it, whose values may be large."""
        structure, self._structures[m] = self._structures[m], None
        assert structure is not None
        return Activation(self._scatter.take(m), self.wants_grad, structure)

    def joined(self, grads: Sequence[Grads]) -> Grads:
        """The gradients of the whole inputs, from those of the micro-batches."""
        columns = [
            [part[i] if part and wants else None for part in grads]
            for i, wants in enumerate(self.wants_grad)
        ]
        return tuple([self._scatter.joined(column) for column in columns])


def wants_grad(tensor: torch.Tensor) -> bool:
    """Whether an input is to get a gradient."""
    return tensor.requires_grad and differentiable(tensor)
