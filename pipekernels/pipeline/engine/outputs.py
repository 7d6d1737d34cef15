"""The last stage's outputs joined into those of the whole mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from pipekernels.pipeline.stage.task import Activation, Grads, differentiable
from pipekernels.pipeline.values.micro_batch import Average, Gather, shares
from pipekernels.pipeline.values.structure import Structure, merged


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
        self._weights = shares(sizes) if weights is None else weights
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
            return Average(self._weights)
        return Gather(self._sizes, self._dim, self._source)

    def take(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the whole outputs."""
        return tuple(gather.take() for gather in self._gathers)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The whole output, built of ``tensors``, the result of :meth:`take`."""
        return merged(self._structures).build(tensors)

    @contextmanager
    def given(self, grads: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Keep the gradients of the whole outputs during the body, None for one without."""
        parts = [
            [None] * len(self._sizes) if grad is None else gather.slices(grad)
            for gather, grad in zip(self._gathers, grads, strict=True)
        ]
        try:
            self._grads = list(zip(*parts, strict=True))
            yield
        finally:
            self._grads = []

    def grads(self, m: int) -> Grads:
        return self._grads[m]
