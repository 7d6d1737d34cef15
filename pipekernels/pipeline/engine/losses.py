"""The loss of each micro-batch, computed inside the pipeline, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from pipekernels._torch_private import run_backward
from pipekernels.local_ops.p2p_copy import p2p_copy
from pipekernels.pipeline.engine.outputs import Outputs
from pipekernels.pipeline.stage.entry import PAST_THE_OUTPUT, StageInput
from pipekernels.pipeline.stage.parameters import StageParameters, add_gradients
from pipekernels.pipeline.stage.task import Activation, Grads
from pipekernels.pipeline.values.micro_batch import Batch, Scatter, rows_of, shares
from pipekernels.pipeline.values.structure import (
    Structure,
    deny_packed,
    flatten,
    tensors_in,
)

LossFunction = Callable[..., Any]
"""Returns a scalar, or a tuple of one and of other values to return."""


class LossGradients:
    """Gradients that flow from a loss directly to parameters of stages, whose aliases are
    installed. They are summed separately: stages accumulate into the aliases at the same time, and
    the order, and so the last bits of a common sum, would depend on timing.

    Args:
        stages: the parameters of each stage.
        modules: the layers of each stage.
    """

    def __init__(self, stages: Sequence[StageParameters], modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._keys = {id(alias): key for stage in stages for key, (_, alias) in stage.pairs.items()}
        self._grads: dict[int, torch.Tensor] = {}  # by id of the parameter

    def capture(self, root: Node | None) -> None:
        """Register hooks that take the gradients of aliases in a backward from ``root``.

        Raises:
            RuntimeError: the graph has that of a value that a layer has left in an attribute.
        """
        stack = [] if root is None else [root]
        seen = set(stack)
        reached = False
        while stack:
            node = stack.pop()
            for i, (child, _) in enumerate(node.next_functions):
                if child is None or child in seen:
                    continue
                key = self._keys.get(id(getattr(child, "variable", None)))
                if key is not None and not child.next_functions:
                    reached = True
                    node.register_hook(partial(self._take, key, i))
                else:
                    seen.add(child)
                    stack.append(child)
        if reached:
            self._deny_attributes(seen)

    def _deny_attributes(self, nodes: set[Node]) -> None:
        for index, module in enumerate(self._modules):
            for name, layer in module.named_modules():
                for attribute, value in vars(layer).items():
                    if any(tensor.grad_fn in nodes for tensor in tensors_in(value)):
                        raise RuntimeError(
                            f"loss_fn uses {attribute!r} of layer {name!r} of stage {index}, where "
                            f"another micro-batch may be by now. {PAST_THE_OUTPUT}"
                        )

    def _take(
        self, key: int, i: int, grads: tuple[torch.Tensor | None, ...], _: object
    ) -> tuple[torch.Tensor | None, ...]:
        grad = grads[i]
        if grad is not None:
            self._grads[key] = add_gradients(self._grads[key], grad) if key in self._grads else grad
        return (*grads[:i], None, *grads[i + 1 :])

    def added_to(
        self, grads: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]
    ) -> tuple[torch.Tensor | None, ...]:
        """``grads``, those of ``parameters``, plus the captured gradients."""
        own = [self._grads.get(id(parameter)) for parameter in parameters]
        return tuple(
            [
                a if b is None else b if a is None else add_gradients(a, b)
                for a, b in zip(grads, own, strict=True)
            ]
        )


def targets_for(batch: Batch, target: Any) -> tuple[Scatter | None, Sequence[Structure]]:
    """The micro-batches of the tensors in ``target``, None if there are none, and the structure of
    each.

    Raises:
        TypeError: there is no tensor in ``target``, or one that cannot be cut.
        ValueError: a target has a graph, or another batch size than the inputs of ``batch``.
    """
    if target is None:
        return None, ()
    if batch.chunks > 1:
        deny_packed(target, "the target")
    tensors, structure = flatten(target, "target", cuts=True)
    if any(tensor.grad_fn is not None for tensor in tensors):
        raise ValueError(
            "a target has a graph, whose backward each micro-batch would run again; detach it, or "
            "use loss_fn(pipe(input), target).backward()"
        )
    targets = Scatter(tensors, batch.chunks, batch.dim, "target")
    rows = rows_of(batch.tensors, batch.dim, "input")
    if targets.batch != rows:
        raise ValueError(
            f"the target has batch size {targets.batch} and the input {rows}; both are split along "
            f"dimension {batch.dim} and must agree in it"
        )
    return targets, structure.cut(targets.sizes)


class Losses:
    """Computes the loss of each micro-batch, weighted by its share of the batch.

    Args:
        loss: called with the last stage's output for a micro-batch, and its targets; returns a
            scalar.
        targets: the tensors of the targets, None if ``loss`` takes none.
        structures: of the targets of each micro-batch.
        mean: whether ``loss`` is a mean over its rows, rather than a sum.
        dim: the batch dimension.
        sizes: rows of each micro-batch.
        randomness: takes a micro-batch; returns a context that seeds its loss.
        gradients: captures the gradients that losses have for the pipe's parameters.
    """

    def __init__(
        self,
        loss: LossFunction,
        targets: Scatter | None,
        structures: Sequence[Structure],
        mean: bool,
        dim: int,
        sizes: Sequence[int],
        randomness: Callable[[int], AbstractContextManager[Any]],
        gradients: LossGradients,
    ) -> None:
        self._loss = loss
        self._targets = targets
        self._structures = structures
        self._weights = shares(sizes) if mean else [1.0] * len(sizes)
        self._extras: Outputs | None = None
        self._new_extras = partial(Outputs, sizes, dim, self._weights, "loss_fn")
        self._leaves: list[Sequence[torch.Tensor | None]] = [()] * len(sizes)
        self._losses: list[torch.Tensor | None] = [None] * len(sizes)
        self._values: list[torch.Tensor] = [torch.empty(0)] * len(sizes)
        self._required_grad = False
        self._randomness = randomness
        self.gradients = gradients

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
            # A loss may modify its input in place.
            tensor if leaf is None else StageInput.apply(leaf)
            for tensor, leaf in zip(outputs.tensors, leaves, strict=True)
        ]
        arguments = [outputs.structure.build(tensors)]
        if self._targets is not None:
            device = outputs.tensors[0].device
            parts: Sequence[torch.Tensor] = self._targets.take(m)
            if any(part.device != device for part in parts):
                parts = p2p_copy(parts, device)
            arguments.append(self._structures[m].on(device).build(parts))
        with self._randomness(m):
            loss = self._loss(*arguments)
        if isinstance(loss, tuple) and len(loss) == 2:
            loss, extras = loss
            self._collect_extras(m, extras)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"loss_fn returned {type(loss).__name__}; it must return a tensor, or a tuple of "
                "it and of values to return beside the loss"
            )
        if loss.dim() != 0 or loss.is_complex():
            raise ValueError(
                f"loss_fn returned a {loss.dtype} of shape {tuple(loss.shape)}; it must return a "
                "real scalar, the mean or the sum over its micro-batch"
            )
        self._values[m] = loss.detach()
        if loss.requires_grad:
            self.gradients.capture(loss.grad_fn)
            self._losses[m], self._leaves[m] = loss, leaves
            self._required_grad = True

    def _collect_extras(self, m: int, extras: Any) -> None:
        tensors, structure = flatten(extras, "what loss_fn returns beside the loss")
        detached = tuple([tensor.detach() for tensor in tensors])
        if self._extras is None:
            self._extras = self._new_extras()
        self._extras.collect(m, Activation(detached, (False,) * len(detached), structure))

    def grads(self, m: int) -> Grads:
        loss, self._losses[m] = self._losses[m], None
        leaves, self._leaves[m] = self._leaves[m], ()
        if loss is None:
            return ()
        run_backward([loss], [loss.new_full((), self._weights[m])], keep_graph=False)
        return tuple(None if leaf is None else leaf.grad for leaf in leaves)

    def check(self) -> None:
        """After all micro-batches: raise a RuntimeError if no loss required a gradient."""
        if not self._required_grad:
            raise RuntimeError(
                "no loss requires a gradient, so nothing can be trained: all parameters are "
                "frozen, loss_fn returns what does not depend on them, or torch.inference_mode() "
                "is on; to only evaluate, use loss_fn(pipe(input), target)"
            )

    def total(self) -> Any:
        """The loss of the whole batch: micro-batches summed in their order; in a tuple with the
        values returned beside it, if there are any."""
        weighted = [v * w for v, w in zip(self._values, self._weights, strict=True)]
        total = torch.stack(weighted).sum()
        return total if self._extras is None else (total, self._extras.build(self._extras.take()))
