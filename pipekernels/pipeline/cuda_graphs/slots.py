"""What graphs of a stage's passes work on: the slots of its micro-batches in flight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from pipekernels.device.graphs import Graph
from pipekernels.pipeline.stage.task import Activation, Grads, Tape, Task
from pipekernels.pipeline.values.structure import Structure


class Signature:
    """Passes that one graph fits, given other values.

    Args:
        structure: how the stage's input is put together.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.ran = False
        """Whether one has gone by without graphs, its backward included."""
        self.watched = False
        """Whether one has been watched since: from then on graphs are used."""
        self.refused = False
        self.slots: list[Slot] = []

    def free_slot(self) -> Slot | None:
        """One that nobody uses, if there is one."""
        return next((slot for slot in self.slots if slot.lease() is None), None)


@dataclass(eq=False)
class Backward:
    """A captured backward: the memory of the outputs' gradients, and that of its results."""

    graph: Graph
    grads: Sequence[torch.Tensor]
    of_inputs: Grads
    of_leaves: Grads


class Slot:
    """Graphs for one micro-batch at a time, and all memory that outlives a replay.

    They have a pool of their own: what a forward leaves behind must survive all that is replayed
    until its backward, and what a backward does is copied before the next forward.

    Args:
        graph: of the forward.
        pool: what it was captured with, and backwards will be.
        inputs: what it reads.
        outputs: what it returned; None for a recomputation.
        tape: what it left for the backward.
        leaves: what stood in for the trainable parameters.
    """

    def __init__(
        self,
        graph: Graph,
        pool: Any,
        inputs: Sequence[torch.Tensor],
        outputs: Activation | None,
        tape: Tape | None,
        leaves: list[nn.Parameter],
    ) -> None:
        self.graph = graph
        self.pool = pool
        self.inputs = inputs
        self.tape = tape
        self.backwards: dict[tuple[bool, ...], Backward] = {}
        """By which outputs have gradients."""
        self.lease: Callable[[], Lease | None] = lambda: None
        """The latest, while there is somebody who has it. Nothing is done when it ends: Ctrl-C that
        comes up in a ``__del__`` is lost."""
        self._outputs = outputs
        self._leaves = leaves

    def copied_outputs(self) -> Activation | None:
        """What the latest replay returned."""
        if self._outputs is None:
            return None
        return replace(self._outputs, tensors=copies_of(self._outputs.tensors))

    def differentiate(self, task: Task, grads: Grads) -> tuple[Grads, Grads]:
        """Go through the autograd graph; returns the gradients of the inputs and of the leaves."""
        assert self.tape is not None
        (of_inputs,) = task.backward([self.tape], [grads], keep_graph=True)
        of_leaves = tuple([leaf.grad for leaf in self._leaves])
        self.forget_grads()
        return of_inputs, of_leaves

    def forget_grads(self) -> None:
        assert self.tape is not None
        for leaf in (*self._leaves, *self.tape.leaves):
            if leaf is not None:
                leaf.grad = None


class Lease:
    """The use of a slot, until this object is gone."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        slot.lease = weakref.ref(self)


@dataclass(slots=True)
class Traced(Tape):
    """A tape that a backward follows, of a pass with a signature."""

    signature: Signature = None  # type: ignore[assignment]
    lease: Lease | None = None
    """Of the slot whose memory it is about; None if it was not captured."""
    versions: int = 0
    """Of the parameters, at the forward."""

    @classmethod
    def of(
        cls, tape: Tape, signature: Signature, lease: Lease | None = None, versions: int = 0
    ) -> Traced:
        values = {field.name: getattr(tape, field.name) for field in fields(Tape)}
        return cls(**values, signature=signature, lease=lease, versions=versions)


def versions_of(parameters: Sequence[torch.Tensor]) -> int:
    """Grows whenever one is modified in place."""
    return sum([parameter._version for parameter in parameters])


@torch.no_grad()
def write(memory: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Set what a graph reads, behind autograd's back, which remembers it from the capture."""
    for place, value in zip(memory, values, strict=True):
        place.data.copy_(value)


@torch.no_grad()
def copies_of(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """What may be referred to while graphs are replayed."""
    return tuple([None if tensor is None else tensor.clone() for tensor in tensors])
