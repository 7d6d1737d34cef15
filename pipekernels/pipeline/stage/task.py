"""The work of one stage, or of several in a row, on one micro-batch: forward, recomputation,
backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipekernels._torch_private import is_node_of_python, run_backward
from pipekernels.device.restoring import restoring
from pipekernels.pipeline.stage import checkpoint
from pipekernels.pipeline.stage.entry import Entry
from pipekernels.pipeline.stage.partition import layers
from pipekernels.pipeline.stage.recomputation import FoundBuffer, versions
from pipekernels.pipeline.stage.skip import Key, carried, skips_of
from pipekernels.pipeline.stage.split_backward import WeightBackward, backward_of_inputs
from pipekernels.pipeline.values.structure import Arguments, Structure, take_apart

Grads = tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class Activation:
    """What travels between stages: the tensors of one micro-batch, detached from the stage that
    made them."""

    tensors: tuple[torch.Tensor, ...]
    wants_grad: tuple[bool, ...]
    structure: Structure
    """How the stage's value is put together from the first of ``tensors``."""
    skips: tuple[Key, ...] = ()
    """What the others are, in their order."""

    def versions(self) -> list[int]:
        """How often each tensor has been written to."""
        return versions(self.tensors)

    def with_skips(self, skips: Mapping[Key, tuple[torch.Tensor, bool]]) -> Activation:
        """The same and ``skips``, with whether each wants a gradient."""
        if not skips:
            return self
        tensors, wants = zip(*skips.values(), strict=True)
        return Activation(
            self.tensors + tensors, self.wants_grad + wants, self.structure, tuple(skips)
        )

    def without_skips(self) -> tuple[Activation, dict[Key, tuple[torch.Tensor, bool]]]:
        """The value alone, and the skips."""
        if not self.skips:
            return self, {}
        n = len(self.tensors) - len(self.skips)
        skips = zip(self.tensors[n:], self.wants_grad[n:], strict=True)
        return (
            Activation(self.tensors[:n], self.wants_grad[:n], self.structure),
            dict(zip(self.skips, skips, strict=True)),
        )


Root = GradientEdge | torch.Tensor


@dataclass(slots=True)
class Tape:
    """What a forward leaves behind for its backward.

    ``roots`` are graph edges, not tensors, so that an output's memory is free as soon as nobody
    needs its values. If the stage returns an input unchanged, its root is that leaf tensor. A
    checkpointed forward has ``inputs`` instead of both.
    """

    leaves: Sequence[torch.Tensor | None] = ()
    roots: Sequence[Root | None] = ()
    inputs: Activation | None = None
    received: tuple[Key, ...] = ()
    """The skips that the last of ``leaves`` are."""
    sent: tuple[Key, ...] = ()
    """The skips that the last of ``roots`` are."""
    outputs: int = 0
    """How many there are without them."""
    buffers: Sequence[FoundBuffer] = ()
    """What a checkpointed forward found, for its recomputation."""


def _root(tensor: torch.Tensor) -> Root | None:
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        return tensor
    if is_node_of_python(node):
        # Nor does an edge keep the graph alive, in torch 2.6.
        return get_gradient_edge(tensor) if "ownership_token" in GradientEdge._fields else tensor
    return GradientEdge(node, tensor.output_nr)


def _take_grad(leaf: torch.Tensor | None) -> torch.Tensor | None:
    if leaf is None:
        return None
    grad, leaf.grad = leaf.grad, None
    return grad


def _may_modify_inputs(module: nn.Module) -> bool:
    """Whether a layer, or a hook before it, might work in place on what it is given; torch's own
    layers say so by ``inplace``."""
    return any(
        getattr(layer, "inplace", False)
        or layer._forward_pre_hooks
        or not type(layer).__module__.startswith("torch.nn.")
        for layer in module.modules()
    )


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
        device: where they live, and where the inputs must be.
        received: skips that come from other tasks.
        sent: skips that go to other tasks.
    """

    def __init__(
        self,
        stages: Sequence[nn.Sequential],
        first: int,
        device: torch.device,
        received: Sequence[Key] = (),
        sent: Sequence[Key] = (),
    ) -> None:
        self.stages = list(enumerate(stages, first))
        self.device = device
        self.received_skips = tuple(received)
        self.sent_skips = tuple(sent)
        self._skips = [skips_of(stage) for stage in stages]
        self._has_skips = any(self._skips)
        self.look_at_layers()

    def look_at_layers(self) -> None:
        """To be called when they have changed.

        Raises:
            RuntimeError: so have their skips.
        """
        for (index, stage), skips in zip(self.stages, self._skips, strict=True):
            if skips_of(stage) != skips:
                raise RuntimeError(
                    f"layers with skips were added to stage {index}, or removed, after the pipe "
                    "was made, which settled then where skips go; change the layers before they "
                    "become a pipe, or make a new one of pipe.to_sequential()"
                )
        self._needs_entry = any(_may_modify_inputs(stage) for _, stage in self.stages)
        # Whether inputs that must stay as they are, checkpointed ones and the caller's, are cloned
        # because they are overwritten; None until one was watched.
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
        if not grad:
            with torch.no_grad():
                outputs = self._call(inputs, inputs.tensors, randomness)
            return outputs, None
        if drop:
            with torch.no_grad(), checkpoint.checkpointing():
                outputs = self._call_preserving(inputs, randomness)
            outputs.wants_grad = tuple(differentiable(tensor) for tensor in outputs.tensors)
            return outputs, self._tape(inputs, outputs, inputs=inputs)
        # Micro-batches are views of the caller's tensors: what works on them in place would change
        # these behind autograd's back, and each other's versions.
        is_first = self.stages[0][0] == 0
        outputs, tape = self._record(inputs, randomness, preserve=is_first)
        outputs.tensors = tuple([tensor.detach() for tensor in outputs.tensors])
        return outputs, tape

    def recompute(self, tape: Tape, randomness: Randomness) -> Tape:
        """Run the stages a second time on the tape's inputs, now with a graph. Buffers keep their
        values, and so do the inputs: those of the stage before may be in the same memory, and
        another recomputation may follow."""
        assert tape.inputs is not None
        with checkpoint.recomputing(), _buffers_aside([stage for _, stage in self.stages]):
            return self._record(tape.inputs, randomness, preserve=True)[1]

    def backward(
        self, tapes: Sequence[Tape], grads: Sequence[Grads], *, keep_graph: bool
    ) -> list[Grads]:
        """Accumulate into the parameters' aliases and return the gradients of the inputs.

        Args:
            tapes: of one micro-batch or of several; autograd takes the latest forward first.
            grads: for each tape, the gradients of its outputs.
            keep_graph: whether another backward may follow.
        """
        roots: list[Any] = []
        root_grads = []
        for tape, output_grads in zip(tapes, grads, strict=True):
            for root, grad in self._rooted(tape, output_grads):
                roots.append(root)
                root_grads.append(grad)
        if roots:
            try:
                run_backward(roots, root_grads, keep_graph=keep_graph)
            except BaseException:
                for tape in tapes:  # Their graphs may be gone through once more.
                    for leaf in tape.leaves:
                        if leaf is not None:
                            leaf.grad = None
                raise
        return [tuple([_take_grad(leaf) for leaf in tape.leaves]) for tape in tapes]

    def backward_of_inputs(
        self, tape: Tape, grads: Grads, *, keep_graph: bool
    ) -> tuple[Grads, WeightBackward | None]:
        """The backward's first part: returns the gradients of the inputs and what accumulates into
        the parameters' aliases later, None where all was done at once."""
        rooted = self._rooted(tape, grads)
        leaves = [leaf for leaf in tape.leaves if leaf is not None]
        rest = None
        edges = [(root, grad) for root, grad in rooted if isinstance(root, GradientEdge)]
        if edges and leaves and len(edges) == len(rooted):
            roots, root_grads = zip(*edges, strict=True)
            rest = backward_of_inputs(roots, root_grads, leaves)
        if rest is None:
            return self.backward([tape], [grads], keep_graph=keep_graph)[0], None
        return tuple([_take_grad(leaf) for leaf in tape.leaves]), rest

    def _rooted(self, tape: Tape, grads: Grads) -> list[tuple[Root, torch.Tensor]]:
        return [
            (root, grad)
            for root, grad in zip(tape.roots, grads, strict=True)
            if root is not None and grad is not None
        ]

    def _record(
        self, inputs: Activation, randomness: Randomness, *, preserve: bool
    ) -> tuple[Activation, Tape]:
        """Run with a graph of their own, cut off from whatever made the inputs; ``preserve``
        these."""
        leaves: list[torch.Tensor | None] = []
        args = []
        copies = preserve and self._overwrites_input is not False
        with torch.enable_grad():
            for tensor, wants in zip(inputs.tensors, inputs.wants_grad, strict=True):
                leaf = tensor.detach().requires_grad_() if wants else None
                leaves.append(leaf)
                given = tensor if leaf is None else leaf
                if copies:
                    given = given.clone()
                elif leaf is not None and self._needs_entry:
                    given = Entry.apply(leaf)
                args.append(given)
            versions = [arg._version for arg in args] if copies else []
            outputs = self._call(inputs, args, randomness)
        if copies:
            self._overwrites_input = versions != [arg._version for arg in args]
        roots = [_root(tensor) for tensor in outputs.tensors]
        outputs.wants_grad = tuple([root is not None for root in roots])
        return outputs, self._tape(inputs, outputs, leaves=leaves, roots=roots)

    @staticmethod
    def _tape(arguments: Activation, outputs: Activation, **kept: Any) -> Tape:
        return Tape(
            received=arguments.skips,
            sent=outputs.skips,
            outputs=len(outputs.tensors) - len(outputs.skips),
            **kept,
        )

    def _call(
        self, inputs: Activation, tensors: Sequence[torch.Tensor], randomness: Randomness
    ) -> Activation:
        """Run on ``tensors`` in place of the inputs' own. The outputs want no gradient yet."""
        if not self._has_skips:
            tensors, structure = self._run_layers(inputs.structure.build(tensors), randomness)
            return Activation(tensors, (False,) * len(tensors), structure)
        n = len(tensors) - len(inputs.skips)
        given = dict.fromkeys(self.received_skips) | dict(
            zip(inputs.skips, tensors[n:], strict=True)
        )
        with carried(given) as left:
            tensors, structure = self._run_layers(inputs.structure.build(tensors[:n]), randomness)
        stashed = [(key, left[key]) for key in self.sent_skips]
        sent = {key: tensor for key, tensor in stashed if tensor is not None}
        tensors = (*tensors, *sent.values())
        return Activation(tensors, (False,) * len(tensors), structure, tuple(sent))

    def _run_layers(
        self, value: Any, randomness: Randomness
    ) -> tuple[tuple[torch.Tensor, ...], Structure]:
        for index, stage in self.stages:
            with randomness(index):
                if isinstance(value, Arguments):
                    first, *rest = layers(stage)  # children() leaves out a layer's second place
                    value = first(*value.args, **value.kwargs)
                    for layer in rest:
                        value = layer(value)
                else:
                    value = stage(value)
            result = take_apart(value, "the output of stage", index)
        return result

    def _call_preserving(self, inputs: Activation, randomness: Randomness) -> Activation:
        """Run on copies of the inputs if they are overwritten: the recomputation needs the
        originals."""
        if self._overwrites_input is False:
            return self._call(inputs, inputs.tensors, randomness)
        copies = tuple(tensor.clone() for tensor in inputs.tensors)
        versions = [copy._version for copy in copies]
        outputs = self._call(inputs, copies, randomness)
        self._overwrites_input = versions != [copy._version for copy in copies]
        return outputs


@contextmanager
def _buffers_aside(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Let the body update copies of the buffers (running statistics, counters): the forward updated
    the real ones."""
    saved = [
        (layer._buffers, name, buffer)
        for stage in stages
        for layer in stage.modules()
        for name, buffer in layer._buffers.items()
        # One that wants a gradient gets it.
        if buffer is not None and not buffer.requires_grad
    ]

    def put_back() -> None:
        for owner, name, buffer in saved:
            owner[name] = buffer

    copies: dict[int, torch.Tensor] = {}  # Layers may share a buffer.
    with restoring(put_back):
        for owner, name, buffer in saved:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            owner[name] = copies[id(buffer)]
        yield
