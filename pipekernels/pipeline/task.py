"""The work of one stage, or of several in a row, on one micro-batch: forward, recomputation,
backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipekernels.pipeline import checkpoint
from pipekernels.pipeline.entry import Entry
from pipekernels.pipeline.split_backward import WeightBackward, backward_of_inputs

Grads = tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class Activation:
    """What travels between stages: the tensors of one micro-batch, detached from the stage that
    made them."""

    tensors: tuple[torch.Tensor, ...]
    wants_grad: tuple[bool, ...]
    single: bool
    """True for a lone tensor, False for a tuple of them."""


@dataclass(slots=True)
class Tape:
    """What a forward leaves behind for its backward.

    ``roots`` are graph edges, not tensors, so that an output's memory is free as soon as nobody
    needs its values. A checkpointed forward has ``inputs`` instead.
    """

    leaves: Sequence[torch.Tensor | None] = ()
    roots: Sequence[GradientEdge | None] = ()
    inputs: Activation | None = None


def _take_grad(leaf: torch.Tensor | None) -> torch.Tensor | None:
    if leaf is None:
        return None
    grad, leaf.grad = leaf.grad, None
    return grad


def _may_modify_inputs(module: nn.Module) -> bool:
    """Whether a layer might work in place on what it is given; torch's own layers say so by
    ``inplace``."""
    return any(
        getattr(layer, "inplace", False) or not type(layer).__module__.startswith("torch.nn.")
        for layer in module.modules()
    )


def as_tensors(value: Any, *what: object) -> tuple[tuple[torch.Tensor, ...], bool]:
    """``value``, which an error calls ``what``, as (tensors, whether it was a lone tensor).

    Raises:
        TypeError: ``value`` is neither a tensor nor a non-empty tuple of tensors.
    """
    if isinstance(value, torch.Tensor):
        return (value,), True
    if isinstance(value, tuple) and value:
        for i, item in enumerate(value):
            if not isinstance(item, torch.Tensor):
                raise TypeError(
                    f"{_words(what)} must be a tensor or a tuple of tensors; "
                    f"item {i} is {type(item).__name__}"
                )
        return value, False
    raise TypeError(
        f"{_words(what)} must be a tensor or a non-empty tuple of tensors, "
        f"not {type(value).__name__}"
    )


def _words(what: tuple[object, ...]) -> str:
    return " ".join(map(str, what))


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether autograd can carry a gradient of ``tensor``'s dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


Randomness = Callable[[int], AbstractContextManager[Any]]
"""Gives the forward of a stage, by its index, random numbers of its own, the same again when it is
recomputed."""


class Task:
    """Runs consecutive stages of one device as one graph per micro-batch. Holds no state of a run:
    a Tape does.

    Args:
        stages: the stages' layers.
        first: index of the first of them.
        device: where they live; inputs are copied there.
    """

    def __init__(self, stages: Sequence[nn.Sequential], first: int, device: torch.device) -> None:
        self.stages = list(enumerate(stages, first))
        self.device = device
        self._needs_entry = any(_may_modify_inputs(stage) for stage in stages)
        # Whether a checkpointed input must be cloned because it is overwritten; None until one was
        # watched.
        self._overwrites_input: bool | None = None if self._needs_entry else False

    def forward(
        self, inputs: Activation, randomness: Randomness, *, grad: bool, drop: bool
    ) -> tuple[Activation, Tape | None]:
        """Run the stages.

        Args:
            inputs: the micro-batch, as the stage before left it.
            randomness: entered for each stage.
            grad: whether a backward may follow: inputs or parameters want gradients.
            drop: checkpoint: keep the inputs instead of the graph.

        Returns:
            The outputs, detached, and the tape, None without ``grad``.
        """
        inputs = self._received(inputs)
        if not grad:
            with torch.no_grad():
                tensors, single = self._call(inputs, inputs.tensors, randomness)
            return Activation(tensors, (False,) * len(tensors), single), None
        if drop:
            with torch.no_grad(), checkpoint.checkpointing():
                tensors, single = self._call_preserving(inputs, randomness)
            # Casts made under no_grad would be found again, without a graph, by the next forward
            # that wants one.
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()
            wants = tuple(differentiable(tensor) for tensor in tensors)
            return Activation(tensors, wants, single), Tape(inputs=inputs)
        tensors, single, tape = self._record(inputs, randomness)
        outputs = tuple([tensor.detach() for tensor in tensors])
        return Activation(outputs, tuple([root is not None for root in tape.roots]), single), tape

    def recompute(self, tape: Tape, randomness: Randomness) -> Tape:
        """Run the stages a second time on the tape's inputs, now with a graph. Buffers keep their
        values."""
        assert tape.inputs is not None
        with checkpoint.recomputing(), _buffers_aside([stage for _, stage in self.stages]):
            return self._record(tape.inputs, randomness)[2]

    def backward(
        self, tapes: Sequence[Tape], grads: Sequence[Grads], *, keep_graph: bool
    ) -> list[Grads]:
        """Accumulate into the parameters' aliases and return the gradients of the inputs.

        Args:
            tapes: of one micro-batch or of several; autograd takes the latest forward first.
            grads: for each tape, the gradients of its outputs.
            keep_graph: whether another backward may follow.
        """
        roots, root_grads = [], []
        for tape, output_grads in zip(tapes, grads, strict=True):
            for root, grad in self._rooted(tape, output_grads):
                roots.append(root)
                root_grads.append(grad)
        if roots:
            torch.autograd.backward(roots, root_grads, retain_graph=keep_graph)
        return [tuple([_take_grad(leaf) for leaf in tape.leaves]) for tape in tapes]

    def backward_of_inputs(
        self, tape: Tape, grads: Grads, *, keep_graph: bool
    ) -> tuple[Grads, WeightBackward | None]:
        """The backward's first part: returns the gradients of the inputs and what accumulates into
        the parameters' aliases later, None where all was done at once."""
        rooted = self._rooted(tape, grads)
        leaves = [leaf for leaf in tape.leaves if leaf is not None]
        rest = None
        if rooted and leaves:
            roots, root_grads = zip(*rooted, strict=True)
            rest = backward_of_inputs(roots, root_grads, leaves)
        if rest is None:
            return self.backward([tape], [grads], keep_graph=keep_graph)[0], None
        return tuple([_take_grad(leaf) for leaf in tape.leaves]), rest

    def _rooted(self, tape: Tape, grads: Grads) -> list[tuple[GradientEdge, torch.Tensor]]:
        return [
            (root, grad if grad.device == self.device else grad.to(self.device))
            for root, grad in zip(tape.roots, grads, strict=True)
            if root is not None and grad is not None
        ]

    def _received(self, inputs: Activation) -> Activation:
        for tensor in inputs.tensors:
            if tensor.device != self.device:
                break
        else:
            return inputs
        # A copy to the CPU must have arrived before the CPU computes; others are ordered by streams.
        overlap = self.device.type != "cpu"
        moved = tuple(tensor.to(self.device, non_blocking=overlap) for tensor in inputs.tensors)
        return Activation(moved, inputs.wants_grad, inputs.single)

    def _record(
        self, inputs: Activation, randomness: Randomness
    ) -> tuple[tuple[torch.Tensor, ...], bool, Tape]:
        """Run with a graph of their own, cut off from whatever made the inputs."""
        leaves: list[torch.Tensor | None] = []
        args = []
        with torch.enable_grad():
            for tensor, wants in zip(inputs.tensors, inputs.wants_grad, strict=True):
                leaf = tensor.detach().requires_grad_() if wants else None
                leaves.append(leaf)
                if leaf is None:
                    args.append(tensor)
                else:
                    args.append(Entry.apply(leaf) if self._needs_entry else leaf)
            tensors, single = self._call(inputs, args, randomness)
        roots = [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
        return tensors, single, Tape(leaves, roots)

    def _call(
        self, inputs: Activation, tensors: Sequence[torch.Tensor], randomness: Randomness
    ) -> tuple[tuple[torch.Tensor, ...], bool]:
        value: Any = tensors[0] if inputs.single else tuple(tensors)
        for index, stage in self.stages:
            with randomness(index):
                value = stage(value)
            result = as_tensors(value, "the output of stage", index)
        return result

    def _call_preserving(
        self, inputs: Activation, randomness: Randomness
    ) -> tuple[tuple[torch.Tensor, ...], bool]:
        """Run on copies of the inputs if they are overwritten: the recomputation needs the
        originals."""
        if self._overwrites_input is False:
            return self._call(inputs, inputs.tensors, randomness)
        copies = tuple(tensor.clone() for tensor in inputs.tensors)
        versions = [copy._version for copy in copies]
        result = self._call(inputs, copies, randomness)
        self._overwrites_input = versions != [copy._version for copy in copies]
        return result


@contextmanager
def _buffers_aside(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Let the body update copies of the buffers (running statistics, counters): the forward updated
    the real ones."""
    saved = [
        (layer._buffers, name, buffer)
        for stage in stages
        for layer in stage.modules()
        for name, buffer in layer._buffers.items()
        if buffer is not None
    ]
    for owner, name, buffer in saved:
        owner[name] = buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in saved:
            owner[name] = buffer
