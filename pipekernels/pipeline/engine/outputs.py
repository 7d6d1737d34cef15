"""What becomes of the last stage's outputs: one whole batch again, or a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from pipekernels.device.restoring import restoring
from pipekernels.local_ops.p2p_copy import p2p_copy
from pipekernels.pipeline.stage.entry import Entry
from pipekernels.pipeline.stage.parameters import Aside
from pipekernels.pipeline.stage.task import Activation, Grads
from pipekernels.pipeline.values.micro_batch import Gather, Scatter
from pipekernels.pipeline.values.structure import Structure, merged

LossFunction = Callable[..., torch.Tensor]


class Sink(Protocol):
    """Takes the last stage's micro-batches and knows their gradients; only its lane calls it."""

    def collect(self, m: int, outputs: Activation) -> None:
        """Take the outputs of micro-batch ``m``."""

    def grads(self, m: int) -> Grads:
        """The gradients of the outputs of micro-batch ``m``, None for one that has none."""


class Outputs:
    """Joins micro-batches into whole outputs, and cuts the gradients of those up again.

    Args:
        sizes: rows of each micro-batch.
        dim: the batch dimension.
    """

    def __init__(self, sizes: Sequence[int], dim: int) -> None:
        self.wants_grad: list[bool] = []
        self._sizes = sizes
        self._dim = dim
        self._structures: list[Structure] = []
        self._gathers: list[Gather] = []
        self._grads: list[Grads] = []

    def collect(self, m: int, outputs: Activation) -> None:
        """Write the outputs of micro-batch ``m`` to their place.

        Raises:
            ValueError: they are put together in another way than those of the micro-batches before.
        """
        if not self._gathers:
            self._gathers = [Gather(self._sizes, self._dim) for _ in outputs.tensors]
            self.wants_grad = [False] * len(outputs.tensors)
            self._structures = [outputs.structure] * len(self._sizes)
        self._structures[m] = outputs.structure
        if not outputs.structure.fits(self._structures[0]):
            raise ValueError(
                f"the last stage returned {len(outputs.tensors)} tensors for micro-batch {m} and "
                f"{len(self._gathers)} before, or put them together in another way; all micro-batches "
                "must be alike"
            )
        for i, (tensor, wants) in enumerate(zip(outputs.tensors, outputs.wants_grad, strict=True)):
            self._gathers[i].write(m, tensor)
            self.wants_grad[i] |= wants

    def take(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the whole outputs."""
        return tuple(gather.take() for gather in self._gathers)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The whole output, with ``tensors`` as those that :meth:`take` gave."""
        return merged(self._structures).build(tensors)

    @contextmanager
    def given(self, grads: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Have the gradients of the whole outputs in the body, None for one that nobody
        differentiated."""
        parts = [
            [None] * len(self._sizes) if grad is None else gather.slices(grad)
            for gather, grad in zip(self._gathers, grads, strict=True)
        ]
        with restoring(partial(setattr, self, "_grads", [])):
            self._grads = list(zip(*parts, strict=True))
            yield

    def grads(self, m: int) -> Grads:
        return self._grads[m]


class Losses:
    """Computes the loss of each micro-batch, weighted by its share of the batch.

    Args:
        loss: called with the outputs of a micro-batch, as the last stage returned them, and its
            targets; returns a scalar.
        targets: the tensors of the targets, None if ``loss`` takes none.
        structure: how a micro-batch's targets are put together.
        sizes: rows of each micro-batch.
        mean: whether ``loss`` is a mean over its rows, rather than a sum.
    """

    def __init__(
        self,
        loss: LossFunction,
        targets: Scatter | None,
        structure: Structure,
        sizes: Sequence[int],
        mean: bool,
    ) -> None:
        self._loss = loss
        self._targets = targets
        self._structure = structure
        batch = max(1, sum(sizes))
        self._weights = [size / batch if mean else 1.0 for size in sizes]
        self._leaves: list[Sequence[torch.Tensor | None]] = [()] * len(sizes)
        self._losses: list[torch.Tensor | None] = [None] * len(sizes)
        self._values: list[torch.Tensor] = [torch.empty(0)] * len(sizes)
        self._required_grad = False
        # Takes the gradients that losses have for the pipe's parameters.
        self.aside = Aside(())
        # Entered for the loss of a micro-batch: gives it random numbers of its own.
        self.randomness: Callable[[int], AbstractContextManager[Any]] = nullcontext

    def collect(self, m: int, outputs: Activation) -> None:
        """Compute the loss of micro-batch ``m``.

        Raises:
            ValueError: the loss is no real scalar.
            TypeError: it is no tensor.
        """
        leaves = [
            tensor.detach().requires_grad_() if wants else None
            for tensor, wants in zip(outputs.tensors, outputs.wants_grad, strict=True)
        ]
        tensors = [
            tensor if leaf is None else Entry.apply(leaf)  # A loss may work in place.
            for tensor, leaf in zip(outputs.tensors, leaves, strict=True)
        ]
        arguments = [outputs.structure.build(tensors)]
        if self._targets is not None:
            device = outputs.tensors[0].device
            parts: Sequence[torch.Tensor] = self._targets.take(m)
            if any(part.device != device for part in parts):
                parts = p2p_copy(parts, device)
            arguments.append(self._structure.on(device).build(parts))
        with self.randomness(m):
            loss = self._loss(*arguments)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss_fn returned {type(loss).__name__}; it must return a tensor")
        if loss.dim() != 0 or loss.is_complex():
            raise ValueError(
                f"loss_fn returned a {loss.dtype} of shape {tuple(loss.shape)}; it must return a real "
                "scalar, the mean or the sum over its micro-batch"
            )
        self._values[m] = loss.detach()
        if loss.requires_grad:
            self.aside.divert(loss.grad_fn)
            self._losses[m], self._leaves[m] = loss, leaves
            self._required_grad = True

    def grads(self, m: int) -> Grads:
        loss, self._losses[m] = self._losses[m], None
        leaves, self._leaves[m] = self._leaves[m], ()
        if loss is None:
            return ()
        torch.autograd.backward(loss, loss.new_full((), self._weights[m]))
        return tuple(None if leaf is None else leaf.grad for leaf in leaves)

    def check(self) -> None:
        """Whether there was anything to go through backwards, when all is done.

        Raises:
            RuntimeError: no loss required a gradient.
        """
        if not self._required_grad:
            raise RuntimeError(
                "no loss requires a gradient, so nothing can be trained: all parameters are frozen, "
                "loss_fn returns what does not depend on them, or torch.inference_mode() is on; to "
                "only evaluate, use loss_fn(pipe(input), target)"
            )

    def total(self) -> torch.Tensor:
        """The loss of the whole batch: micro-batches summed in their order."""
        weighted = [v * w for v, w in zip(self._values, self._weights, strict=True)]
        return torch.stack(weighted).sum()
