"""The inputs of a mini-batch, cut into those of its micro-batches, and its outputs, joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pipekernels.pipeline.stage.task import Activation, Grads, differentiable
from pipekernels.pipeline.values.micro_batch import Average, Batch, Gather, Scatter, shares
from pipekernels.pipeline.values.structure import Structure, merged


class Inputs:
    """The inputs of the first stage, on ``device``, one per micro-batch.

    Args:
        batch: the whole inputs.
        device: of the first stage.
        wants_grad: whether each of its tensors is to get a gradient.
        detached: whether a backward can follow that does not go through the caller's graph. The
            autograd node that holds this object holds the graph of the inputs.
    """

    def __init__(
        self, batch: Batch, device: torch.device, wants_grad: Sequence[bool], *, detached: bool
    ) -> None:
        self._wants_grad = tuple(wants_grad)
        tensors = [tensor.detach() for tensor in batch.tensors] if detached else batch.tensors
        self._scatter = Scatter(tensors, batch.chunks, batch.dim)
        self.rows, self.dim = self._scatter.batch, batch.dim
        self.sizes = self._scatter.sizes
        self.elements = self._scatter.elements(0)  # Of the first, the largest.
        structures = batch.structure.on(device).cut(self.sizes)
        self._structures: list[Structure | None] = list(structures)

    def take(self, m: int) -> Activation:
        """Micro-batch ``m``; call once. Drops the references to it, whose values may be large."""
        structure, self._structures[m] = self._structures[m], None
        assert structure is not None
        return Activation(self._scatter.take(m), self._wants_grad, structure)

    def joined(self, grads: Sequence[Grads]) -> Grads:
        """The gradients of the whole inputs, from those of the micro-batches."""
        if not any(self._wants_grad):
            return (None,) * len(self._wants_grad)
        columns = [
            [part[i] if part and wants else None for part in grads]
            for i, wants in enumerate(self._wants_grad)
        ]
        return tuple([self._scatter.joined(column) for column in columns])


def wants_grad(tensor: torch.Tensor) -> bool:
    """Whether an input is to get a gradient."""
    return tensor.requires_grad and differentiable(tensor)


class Sink(Protocol):
    """Receives the last stage's outputs and returns their gradients; only that stage's lane calls
    it."""

    def collect(self, m: int, outputs: Activation) -> None:
        """Take the outputs of micro-batch ``m``."""

    def grads(self, m: int) -> Grads:
        """The gradients of the outputs of micro-batch ``m``, None for an output without one."""


class Outputs:
    """Joins micro-batches of ``sizes`` rows along ``dim``, and splits the gradients of the whole
    outputs. Scalars are averaged with ``weights``, by default each micro-batch's share of the rows.
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

    def collect(self, m: int, outputs: Activation) -> None:
        """Write the outputs of micro-batch ``m`` to their place.

        Raises:
            ValueError: their structure differs from that of earlier micro-batches.
        """
        if not self._gathers:
            self._gathers = [self._gather(tensor) for tensor in outputs.tensors]
            self.wants_grad = [False] * len(outputs.tensors)
            self._structures = [outputs.structure] * len(self._sizes)
        self._structures[m] = outputs.structure
        if not outputs.structure.has_same_layout(self._structures[0]):
            raise ValueError(
                f"{self._source} returned {len(outputs.tensors)} tensors for micro-batch {m} and "
                f"{len(self._gathers)} before, or put them together in another way; all "
                "micro-batches must return the same structure"
            )
        for i, (tensor, wants) in enumerate(zip(outputs.tensors, outputs.wants_grad, strict=True)):
            self._gathers[i].write(m, tensor)
            self.wants_grad[i] |= wants

    def _gather(self, tensor: torch.Tensor) -> Gather | Average:
        if tensor.dim() == 0 and differentiable(tensor):
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
