"""The loss of each microbatch, computed inside the pipeline, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from pipekernels._torch_private import run_backward
from pipekernels.ops.device_copy import p2p_copy
from pipekernels.pipeline.engine.entry import PAST_THE_OUTPUT, StageInput
from pipekernels.pipeline.engine.mini_batch_run import MiniBatchRun
from pipekernels.pipeline.engine.parameters import added
from pipekernels.pipeline.microbatch import (
    Activation,
    Batch,
    Grads,
    Outputs,
    Scatter,
    rows_of,
    shares,
)
from pipekernels.pipeline.nested import flatten, tensors_in

LossFunction = Callable[..., Any]
"""Returns a scalar, or a tuple of one and of other values to return."""


class Targets:
    """The targets of each microbatch of ``batch``.

    Raises:
        TypeError: there is no tensor in ``target``, or one that cannot be cut.
        ValueError: a target has another batch size than the inputs of ``batch``.
    """

    def __init__(self, batch: Batch, target: Any) -> None:
        self._parts: Scatter | None = None
        if target is None:
            return
        tensors, structure = flatten(target, "target", is_batch=True)
        whole = replace(batch, tensors=tensors, structure=structure)
        self._parts = Scatter(whole, what="target")
        rows = rows_of(batch.tensors, batch.dim, "input")
        if self._parts.rows != rows:
            raise ValueError(
                f"the target has batch size {self._parts.rows} and the input {rows}; both are "
                f"split along dimension {batch.dim} and must agree in it"
            )

    def take(self, m: int, device: torch.device) -> list[Any]:
        """A list of the target of microbatch ``m``, on ``device``; empty if there is none."""
        if self._parts is None:
            return []
        part = self._parts.take(m)
        tensors: Sequence[torch.Tensor] = part.tensors
        if any(tensor.device != device for tensor in tensors):
            tensors = p2p_copy(tensors, device)
        return [part.structure.on(device).build(tensors)]


class Losses:
    """Computes the loss of each microbatch. If ``loss`` is a ``mean`` over its rows, rather than a
    sum, it is weighted by the microbatch's share of the batch.

    Gradients that flow from a loss directly to parameters of stages are in ``parameter_grads``, by
    id of the parameter, and not in the parameter copies: the order of a common sum, and so its last
    bits, would depend on which stages run as one.
    """

    def __init__(self, loss: LossFunction, targets: Targets, mean: bool, run: MiniBatchRun) -> None:
        inputs, stages = run.inputs, run.stages
        self._loss = loss
        self._targets = targets
        self._weights = shares(inputs.sizes) if mean else [1.0] * len(inputs.sizes)
        self._extras = Outputs(inputs.sizes, inputs.dim, self._weights, "loss_fn")
        self._values: dict[int, torch.Tensor] = {}  # By microbatch, detached.
        # By microbatch: a loss with a graph, and the list that gets the gradients of the outputs.
        self._losses: dict[int, tuple[torch.Tensor, list[torch.Tensor | None]]] = {}
        self._required_grad = False
        self._modules = stages.modules
        assert run.parameters is not None
        self._keys = run.parameters.keys()  # Graphs have the copies, whose keys these are.
        self._drop_accumulated = run.parameters.drop_accumulated
        self.parameter_grads: dict[int, torch.Tensor] = {}

    def collect(self, m: int, outputs: Activation) -> None:
        """Compute the loss of microbatch ``m``; a ValueError if it is not a real scalar, a
        TypeError if it is not a tensor."""
        # The graph of the loss begins at leaves of its own, like the graph of a stage.
        tensors = list(outputs.tensors)
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        for i, wants in enumerate(outputs.wants_grad):
            if wants:
                leaf = tensors[i].detach().requires_grad_()
                tensors[i] = StageInput.apply(leaf, grads, i, self._drop_accumulated)
        value = outputs.structure.build(tensors)
        target = self._targets.take(m, outputs.tensors[0].device)
        loss = self._loss(value, *target)
        if isinstance(loss, tuple) and len(loss) == 2:  # With values to return beside it.
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
                "real scalar, the mean or the sum over its microbatch"
            )
        self._values[m] = loss.detach()
        if loss.requires_grad:
            self._capture(loss.grad_fn)
            self._losses[m] = loss, grads
            self._required_grad = True

    def _collect_extras(self, m: int, extras: Any) -> None:
        tensors, structure = flatten(extras, "what loss_fn returns beside the loss")
        detached = tuple([tensor.detach() for tensor in tensors])
        self._extras.collect(m, Activation(detached, (False,) * len(detached), structure))

    def grads(self, m: int) -> Grads:
        if m not in self._losses:
            return ()
        loss, grads = self._losses.pop(m)
        run_backward([loss], [loss.new_full((), self._weights[m])], keep_graph=False)
        return tuple(grads)

    def _capture(self, root: Node | None) -> None:
        """Have a backward from ``root`` leave the gradients of parameter copies in
        ``parameter_grads``. RuntimeError if it leads into a graph that a layer left behind."""
        stack = [] if root is None else [root]
        seen = set(stack)
        reached = False
        while stack:
            node = stack.pop()
            for i, (child, _) in enumerate(node.next_functions):
                if child is None or child in seen:
                    continue
                # Nodes that accumulate have the parameter copy as `variable`, and no children.
                key = self._keys.get(id(getattr(child, "variable", None)))
                # The hook of the node before takes the gradient that it would pass on to it.
                if key is not None and not child.next_functions:
                    reached = True
                    node.register_hook(partial(self._take, key, i))
                else:
                    seen.add(child)
                    stack.append(child)
        if reached:  # Else nothing leads past the output.
            self._deny_attributes(seen)

    def _deny_attributes(self, nodes: set[Node]) -> None:
        for index, module in enumerate(self._modules):
            for name, layer in module.named_modules():
                for attribute, value in vars(layer).items():
                    if any(tensor.grad_fn in nodes for tensor in tensors_in(value)):
                        raise RuntimeError(
                            f"loss_fn uses {attribute!r} of layer {name!r} of stage {index}, where "
                            f"another microbatch may be by now. {PAST_THE_OUTPUT}"
                        )

    def _take(
        self, key: int, i: int, grads: tuple[torch.Tensor | None, ...], _: object
    ) -> tuple[torch.Tensor | None, ...]:
        grad = grads[i]
        if grad is not None:
            total = self.parameter_grads
            total[key] = added(total[key], grad) if key in total else grad
        return (*grads[:i], None, *grads[i + 1 :])  # Nothing for the parameter copy.

    def total(self) -> Any:
        """The loss of the whole batch: microbatches summed in their order; in a tuple with the
        values returned beside it, if there are any. RuntimeError if no loss required a gradient."""
        if not self._required_grad:
            raise RuntimeError(
                "no loss requires a gradient, so nothing can be trained: all parameters are "
                "frozen, loss_fn returns what does not depend on them, or torch.inference_mode() "
                "is on; to only evaluate, use loss_fn(pipe(input), target)"
            )
        weighted = [self._values[m] * weight for m, weight in enumerate(self._weights)]
        total = torch.stack(weighted).sum()
        extras = self._extras.join()
        return (total, self._extras.structure.build(extras)) if extras else total
