"""Slots: the memory and graphs of a captured stage's micro-batches in flight."""

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
    """Passes that differ only in the values of tensors, so that the same graph can run them."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        """The structure of the stage's input."""
        self.ran = False
        """Whether a pass, backward included, has ended without graphs."""
        self.watched = False
        """Whether a later pass has been watched: from then on graphs are used."""
        self.refused = False
        self.slots: list[Slot] = []

    def free_slot(self) -> Slot | None:
        """A slot not in use, or None."""
        return next((slot for slot in self.slots if slot.lease() is None), None)


@dataclass(eq=False)
class Backward:
    """A captured backward, with the memory of its arguments (``grads``) and results."""

    graph: Graph
    grads: Sequence[torch.Tensor]
    of_inputs: Grads
    of_leaves: Grads


class Slot:
    """Graphs for one micro-batch at a time, and all memory that must outlive a replay.

    Each slot has its own memory pool, because replays of other slots between a forward and its
    backward must not overwrite what the forward saved. Results of a backward are copied before the
    slot's next forward.

    Args:
        graph: of the forward.
        pool: memory pool of all the slot's captures.
        inputs: tensors that the graph reads.
        outputs: what the captured forward returned; None for a recomputation.
        tape: the captured forward's.
        leaves: the leaves that the captured forward used as trainable parameters.
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
        """Key: for each output, whether it has a gradient."""
        self.lease: Callable[[], Lease | None] = lambda: None
        """Weak reference to the latest lease; the slot is free once that is gone. Lease has no
        ``__del__``, in which a KeyboardInterrupt would be lost."""
        self._outputs = outputs
        self._leaves = leaves

    def copied_outputs(self) -> Activation | None:
        """Copies of the outputs of the latest replay."""
        if self._outputs is None:
            return None
        return replace(self._outputs, tensors=copies_of(self._outputs.tensors))

    def differentiate(self, task: Task, grads: Grads) -> tuple[Grads, Grads]:
        """Run the backward of the captured autograd graph; returns the gradients of inputs and of
        leaves."""
        assert self.tape is not None
        (of_inputs,) = task.backward([self.tape], [grads], keep_graph=True)
        of_leaves = tuple([leaf.grad for leaf in self._leaves])
        self.forget_grads()
        return of_inputs, of_leaves

    def forget_grads(self) -> None:
        assert self.tape is not None
        for parameter in self._leaves:
            parameter.grad = None
        for leaf in self.tape.leaves:
            if leaf is not None:
                leaf.take()


class Lease:
    """Reserves a slot as long as this object lives."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        slot.lease = weakref.ref(self)


@dataclass(slots=True)
class Traced(Tape):
    """The tape of a pass with a signature, which a backward will follow."""

    signature: Signature = None  # type: ignore[assignment]
    lease: Lease | None = None
    """Lease of the slot that has the tape's tensors; None if the pass ran without graphs."""
    versions: int = 0
    """``versions_of`` the parameters, at the forward."""

    @classmethod
    def of(
        cls, tape: Tape, signature: Signature, lease: Lease | None = None, versions: int = 0
    ) -> Traced:
        values = {field.name: getattr(tape, field.name) for field in fields(Tape)}
        return cls(**values, signature=signature, lease=lease, versions=versions)


def versions_of(parameters: Sequence[torch.Tensor]) -> int:
    """Sum of version counters: increases whenever a parameter is modified in place."""
    return sum([parameter._version for parameter in parameters])


@torch.no_grad()
def write(memory: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy ``values`` into ``memory``, which a graph reads. Through ``.data``: autograd saved these
    tensors in the capture and would reject a changed version counter."""
    for place, value in zip(memory, values, strict=True):
        place.data.copy_(value)


@torch.no_grad()
def copies_of(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Copies, which later replays do not overwrite; None stays None."""
    return tuple([None if tensor is None else tensor.clone() for tensor in tensors])
