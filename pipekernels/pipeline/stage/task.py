"""One stage, or several in a row, on one micro-batch: forward, recomputation, backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipekernels._torch_private import is_node_of_python, run_backward
from pipekernels.pipeline.stage import checkpoint
from pipekernels.pipeline.stage.entry import Leaf, StageInput, copy_of
from pipekernels.pipeline.stage.error_notes import name_of
from pipekernels.pipeline.stage.partition import layers
from pipekernels.pipeline.stage.recomputation import BufferSnapshot, buffers_of_forward, versions
from pipekernels.pipeline.stage.skip import Key, carried, skips_of
from pipekernels.pipeline.stage.split_backward import WeightBackward, backward_of_inputs
from pipekernels.pipeline.values.structure import Arguments, Structure, flatten

Grads = tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class Activation:
    """Tensors of one micro-batch that go from stage to stage: those of a value, then the skips.
    They are detached from the graph of the stage that made them."""

    tensors: tuple[torch.Tensor, ...]
    wants_grad: tuple[bool, ...]
    structure: Structure
    """How to build the value from its tensors."""
    skips: tuple[Key, ...] = ()
    """Keys of the skips, the last of ``tensors``."""

    def versions(self) -> list[int]:
        """The version counters of the tensors."""
        return versions(self.tensors)

    def with_skips(self, skips: Mapping[Key, tuple[torch.Tensor, bool]]) -> Activation:
        """This activation with ``skips`` added, each a tensor and whether it wants a gradient."""
        if not skips:
            return self
        tensors, wants = zip(*skips.values(), strict=True)
        wants = self.wants_grad + wants
        return Activation(self.tensors + tensors, wants, self.structure, tuple(skips))

    def without_skips(self) -> tuple[Activation, dict[Key, tuple[torch.Tensor, bool]]]:
        """The activation of the value alone, and the skips."""
        if not self.skips:
            return self, {}
        n = len(self.tensors) - len(self.skips)
        skips = zip(self.tensors[n:], self.wants_grad[n:], strict=True)
        value = Activation(self.tensors[:n], self.wants_grad[:n], self.structure)
        return value, dict(zip(self.skips, skips, strict=True))


Root = GradientEdge | torch.Tensor


@dataclass(slots=True)
class Tape:
    """What a forward keeps for its backward.

    ``roots`` are graph edges, not tensors, so that an output's memory can be freed before the
    backward. If the stage returns an input unchanged, its root is that leaf tensor. A checkpointed
    forward has ``inputs`` and ``nodes`` instead of leaves and roots.
    """

    leaves: Sequence[Leaf | None] = ()
    roots: Sequence[Root | None] = ()
    inputs: Activation | None = None
    nodes: Sequence[str] = ()
    """Names of the nodes of a checkpointed forward's graph, which its recomputation must have."""
    received: tuple[Key, ...] = ()
    """Keys of the skips among the inputs, the last of ``leaves``."""
    sent: tuple[Key, ...] = ()
    """Keys of the skips among the outputs, the last of ``roots``."""
    outputs: int = 0
    """Number of output tensors without skips."""
    buffers: Sequence[BufferSnapshot] = ()
    """Buffers before a checkpointed forward, for its recomputation."""

    def rooted(self, grads: Grads) -> list[tuple[Root, torch.Tensor]]:
        """The roots that get gradients, with those, of ``grads`` of the outputs."""
        pairs = zip(self.roots, grads, strict=True)
        return [(root, grad) for root, grad in pairs if root is not None and grad is not None]

    def open(self) -> None:
        """Begin a backward."""
        for leaf in self.leaves:
            if leaf is not None:
                leaf.open()

    def take(self) -> Grads:
        """End the backward; returns the gradients of the inputs."""
        return tuple([None if leaf is None else leaf.take() for leaf in self.leaves])


def _root(tensor: torch.Tensor) -> Root | None:
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        return tensor
    if is_node_of_python(node):
        # A node written in Python is freed unless something owns it. The edge does, by its
        # ownership_token, which torch 2.6 lacks: there keep the tensor.
        return get_gradient_edge(tensor) if "ownership_token" in GradientEdge._fields else tensor
    return GradientEdge(node, tensor.output_nr)


def _names(roots: Sequence[Root | None]) -> list[str]:
    """The names of all nodes that ``roots`` lead to, in one order for equal graphs."""
    stack = [root.node for root in reversed(roots) if isinstance(root, GradientEdge)]
    seen = set()
    names = []
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            names.append(node.name())
            stack.extend(child for child, _ in node.next_functions if child is not None)
    return names


def _may_modify_inputs(module: nn.Module) -> bool:
    """Whether a layer or one of its forward pre-hooks might modify its input in place. torch's own
    layers do so only if they have ``inplace=True``."""
    return any(
        getattr(layer, "inplace", False)
        or layer._forward_pre_hooks
        or not type(layer).__module__.startswith("torch.nn.")
        for layer in module.modules()
    )


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``'s dtype can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


Randomness = Callable[[int], AbstractContextManager[Any]]
"""Takes the index of a stage and returns a context that seeds its forward; a recomputation gets the
same random numbers."""


class Task:
    """Runs consecutive stages of one device as one graph per micro-batch, whose state is in a Tape.

    Args:
        stages: the stages' layers.
        first: index of the first stage.
        device: the device of the stages and of their inputs.
        received, sent: skips that come from, and go to, other tasks.

    Attributes:
        saw_foreign_backward: whether a backward that is none of this task's has raised an error at
            its inputs. Others reset it.
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
        self.saw_foreign_backward = False
        self.inspect_layers()

    def inspect_layers(self) -> None:
        """Must be called after the layers have changed. RuntimeError if their skips have."""
        for (index, stage), skips in zip(self.stages, self._skips, strict=True):
            if skips_of(stage) != skips:
                raise RuntimeError(
                    f"layers with skips were added to stage {index}, or removed, after the pipe "
                    "was made, which fixed the routes of skips; change the layers before making a "
                    "pipe, or make a new one of pipe.to_sequential()"
                )
        self._needs_entry = any(_may_modify_inputs(stage) for _, stage in self.stages)
        # Whether layers overwrite their input, so that it is cloned where it must not change: if
        # checkpointed, or the caller's. None: unknown until the first clone has been used.
        self._overwrites_input: bool | None = None if self._needs_entry else False

    def forward(
        self, inputs: Activation, randomness: Randomness, *, grad: bool, drop: bool
    ) -> tuple[Activation, Tape | None]:
        """Run the stages; returns the detached outputs, and the tape if ``grad``: a backward may
        follow. ``drop``: checkpoint, that is keep the inputs instead of the graph."""
        # Micro-batches are views of the caller's tensors, which layers must not modify in place:
        # autograd would not know, and the views share one version counter.
        is_first = self.stages[0][0] == 0
        if not grad:
            return self._run(inputs, randomness, grad=False, preserve=is_first)[0], None
        with checkpoint.checkpointing() if drop else nullcontext():
            outputs, tape = self._run(inputs, randomness, grad=True, preserve=drop or is_first)
        outputs.tensors = tuple([tensor.detach() for tensor in outputs.tensors])
        if drop:
            # The graph is made all the same: it says which outputs want gradients, and torch has
            # other kernels without one, whose bits differ (of LSTMs, of attention).
            nodes = _names(tape.roots)
            tape = replace(tape, leaves=(), roots=(), inputs=inputs, nodes=nodes)
        return outputs, tape

    def recompute(self, tape: Tape, randomness: Randomness) -> Tape:
        """Run the stages a second time on the tape's inputs, now with a graph. Buffers and inputs
        keep their values: the previous stage's inputs may share memory with these, and another
        recomputation may follow. RuntimeError if the graph is not that of the forward."""
        assert tape.inputs is not None
        stages = [stage for _, stage in self.stages]
        with checkpoint.recomputing(), buffers_of_forward(stages, tape.buffers):
            recomputed = self._run(tape.inputs, randomness, grad=True, preserve=True)[1]
        again = _names(recomputed.roots)
        if again != tape.nodes:
            raise RuntimeError(
                f"the recomputation of {name_of(self.stages)} made a graph of {len(again)} nodes "
                f"that differs from that of its forward, of {len(tape.nodes)}: a layer "
                "chooses what it computes by something that changes between the two; choose by "
                "the inputs or by numbers of torch's default generators, or use checkpoint='never'"
            )
        return recomputed

    def backward(
        self, tapes: Sequence[Tape], grads: Sequence[Grads], *, keep_graph: bool
    ) -> list[Grads]:
        """Accumulate into the parameters' aliases; returns the gradients of each tape's inputs,
        given those of its outputs. Autograd takes the latest forward first."""
        rooted = [pair for tape, of in zip(tapes, grads, strict=True) for pair in tape.rooted(of)]
        for tape in tapes:
            tape.open()
        try:
            if rooted:
                run_backward(*zip(*rooted, strict=True), keep_graph=keep_graph)
        finally:  # Another backward may use the graphs of one that failed.
            results = [tape.take() for tape in tapes]
        return results

    def backward_of_inputs(
        self, tape: Tape, grads: Grads, *, keep_graph: bool
    ) -> tuple[Grads, WeightBackward | None]:
        """Run the backward's first part; returns the gradients of the inputs and the second part,
        which accumulates into the parameters' aliases. It is None if the whole backward was run."""
        rooted = tape.rooted(grads)
        leaves = [leaf.tensor for leaf in tape.leaves if leaf is not None]
        if rooted and leaves and all(isinstance(root, GradientEdge) for root, _ in rooted):
            tape.open()
            roots, root_grads = zip(*rooted, strict=True)
            second_part = backward_of_inputs(roots, root_grads, leaves)
            if second_part is not None:
                return tape.take(), second_part
        return self.backward([tape], [grads], keep_graph=keep_graph)[0], None

    def _note_foreign_backward(self) -> None:
        self.saw_foreign_backward = True

    def _run(
        self, inputs: Activation, randomness: Randomness, *, grad: bool, preserve: bool
    ) -> tuple[Activation, Tape]:
        """Run the layers, with ``grad`` in a graph that begins at detached inputs; ``preserve``
        their values."""
        tensors: Sequence[torch.Tensor] = inputs.tensors
        before = None
        if preserve and self._overwrites_input is not False:
            with torch.inference_mode(False):  # Whose tensors have no versions.
                tensors = [copy_of(tensor) for tensor in tensors]
            before = versions(tensors)
        leaves: list[Leaf | None] = []
        args = tensors
        with torch.enable_grad() if grad else torch.no_grad():
            if grad:
                args = []
                for tensor, wants in zip(tensors, inputs.wants_grad, strict=True):
                    leaf = Leaf(tensor, self._note_foreign_backward) if wants else None
                    leaves.append(leaf)
                    if leaf is None:
                        args.append(tensor)
                    elif self._needs_entry:
                        args.append(StageInput.apply(leaf.tensor))
                    else:
                        args.append(leaf.tensor)
            outputs, structure, sent = self._call(inputs, args, randomness)
        if before is not None:
            self._overwrites_input = versions(tensors) != before
        roots = [_root(tensor) for tensor in outputs] if grad else []
        wants_grad = tuple([root is not None for root in roots]) or (False,) * len(outputs)
        tape = Tape(
            leaves, roots, received=inputs.skips, sent=sent, outputs=len(outputs) - len(sent)
        )
        return Activation(outputs, wants_grad, structure, sent), tape

    def _call(
        self, inputs: Activation, tensors: Sequence[torch.Tensor], randomness: Randomness
    ) -> tuple[tuple[torch.Tensor, ...], Structure, tuple[Key, ...]]:
        """Run the layers on ``tensors`` instead of ``inputs.tensors``; returns those of the result
        and of the skips, the result's structure, and the skips' keys."""
        n = len(tensors) - len(inputs.skips)
        value = inputs.structure.build(tensors[:n])
        given = dict(zip(inputs.skips, tensors[n:], strict=True))
        carrying: AbstractContextManager[dict[Key, Any]] = nullcontext({})
        if self._has_skips:
            carrying = carried(dict.fromkeys(self.received_skips) | given)
        with carrying as skips:
            for index, stage in self.stages:
                with randomness(index):
                    if isinstance(value, Arguments):
                        first, *rest = layers(stage)  # children() lists a repeated layer only once.
                        value = first(*value.args, **value.kwargs)
                        for layer in rest:
                            value = layer(value)
                    else:
                        value = stage(value)
                result, structure = flatten(value, f"the output of stage {index}")
        stashed = {key: skips[key] for key in self.sent_skips}
        sent = {key: tensor for key, tensor in stashed.items() if tensor is not None}
        return (*result, *sent.values()), structure, tuple(sent)
