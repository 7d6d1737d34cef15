"""A stage's forwards and backwards as CUDA graphs, which cost one launch instead of many.

Every *signature* (kind of pass, shapes of the input, settings of layers and of torch) is run twice
without graphs, so that lazy initialisation is done; the second run is watched for operations that a
graph could not repeat. From then on each micro-batch in flight has a *slot*: a graph of the
forward, one of the backward for each set of outputs that have gradients, and their memory, reserved
until the tape of the micro-batch is gone. Inputs of a graph are copied in and results copied out,
so no user, edge or other stage refers to memory that a replay overwrites. A slot also keeps the
autograd graph of its capture: it has the tensors saved for backward, and runs a backward that has
no CUDA graph.

A capture runs no kernel. It uses leaves of its own in place of the parameters, which no other
stream has used and autocast has not cached. Generators are seeded before a replay as before any
forward, and torch's graphs draw from the generators' current state, so random numbers are the same
with graphs and without.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pipekernels._torch_private import add_to_each, copy_to_each
from pipekernels.device import graphs
from pipekernels.pipeline.cuda_graphs.checks import Layout, torch_settings, unfit, watched
from pipekernels.pipeline.cuda_graphs.slots import (
    Backward,
    Lease,
    Signature,
    Slot,
    Traced,
    copies_of,
    versions_of,
    write,
)
from pipekernels.pipeline.stage.parameters import StageParameters, installed
from pipekernels.pipeline.stage.split_backward import WeightBackward
from pipekernels.pipeline.stage.task import Activation, Grads, Randomness, Tape, Task

_log = logging.getLogger(__name__)

LIMIT = 128
"""The most signatures, settings and slots of a stage."""
PATIENCE = 5
"""Consecutive mini-batches with new settings or tensors after which a stage warns."""

Work = Callable[[Activation, Randomness], tuple[Activation | None, Tape | None]]
"""A forward or recomputation of a stage, given its input."""


class StageGraphs:
    """The graphs of one stage, kept across mini-batches."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.recorder = graphs.recorder(task.device)
        ((self.index, self.stage),) = task.stages
        self._slots: list[weakref.ref[Slot]] = []
        self._tensors: list[Any] = []
        self._settings: dict[Any, int] = {}
        self._signatures: dict[Any, list[Signature]] = {}
        self._known = 0
        self._new_in_a_row = 0
        self._warned: set[str] = set()

    def slots(self) -> list[Slot]:
        """All slots, in use or free."""
        return [slot for reference in self._slots if (slot := reference()) is not None]

    def add(self, slot: Slot) -> None:
        """Add a slot to :meth:`slots`, which signatures and leases keep alive."""
        self._slots = [weakref.ref(known) for known in (*self.slots(), slot)]

    def of_run(self, parameters: StageParameters | None) -> GraphedTask:
        """The stage for one mini-batch, in which its layers must not change. Backwards accumulate
        into the aliases of ``parameters``, None if there are none."""
        layout = Layout(self.stage, self.task.device)
        if layout.why_not is not None:
            self.warn(layout.why_not)
            return GraphedTask(self, parameters, None)
        if layout.tensors != self._tensors:
            # Captured graphs use, and keep alive, the former tensors.
            self._signatures.clear()
            self._settings.clear()
            self._known = 0
            self._tensors = layout.tensors
        settings = (layout.settings, torch_settings())
        self._new_in_a_row = 0 if settings in self._settings else self._new_in_a_row + 1
        if self._new_in_a_row == PATIENCE:
            self.warn("its layers' tensors or attributes are others in every mini-batch")
        if settings not in self._settings and len(self._settings) == LIMIT:
            self.warn(f"its layers have had {LIMIT} different settings")
            return GraphedTask(self, parameters, None)
        number = self._settings.setdefault(settings, len(self._settings))
        return GraphedTask(self, parameters, number)

    def signature(self, kind: Any, inputs: Activation) -> Signature | None:
        """The signature of passes of one kind on such inputs; None if they run without graphs."""
        why_not = unfit(inputs, self.task.device)
        if why_not is not None:
            self.warn(f"it is given {why_not}")
            return None
        if any(tensor.numel() == 0 for tensor in inputs.tensors):
            return None
        shapes = tuple([(t.shape, t.stride(), t.dtype) for t in inputs.tensors])
        key = (kind, shapes, inputs.wants_grad, inputs.skips)
        for signature in self._signatures.get(key, ()):
            if signature.structure.same(inputs.structure):
                return None if signature.refused else signature
        if self._known == LIMIT:
            self.warn(f"it has been given {LIMIT} different kinds of inputs")
            return None
        self._known += 1
        signature = Signature(inputs.structure)
        self._signatures.setdefault(key, []).append(signature)
        return signature

    def capture(self, work: Callable[[], Any], pool: Any, signature: Signature) -> Any:
        """As ``Recorder.capture``; if it raises, refuse ``signature`` and return None."""
        try:
            return self.recorder.capture(work, pool)
        except Exception as error:  # noqa: BLE001 - an error of `work` recurs without graphs
            self.refuse(signature, _reason(error))
            return None

    def refuse(self, signature: Signature, why: str) -> None:
        """Run passes of ``signature`` without graphs from now on."""
        signature.refused = True
        signature.slots.clear()
        self.warn(why)

    def warn(self, why: str) -> None:
        """Warn, once per reason, that passes of the stage run without graphs."""
        if why not in self._warned:
            self._warned.add(why)
            message = f"stage {self.index} runs without CUDA graphs: {why}"
            _log.warning(message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


class GraphedTask:
    """A :class:`Task` in one mini-batch, which uses graphs where possible. ``settings`` is the
    number of the stage's settings, None if it runs without graphs."""

    def __init__(
        self, graphs: StageGraphs, parameters: StageParameters | None, settings: int | None
    ) -> None:
        self.stages = graphs.task.stages
        self.device = graphs.task.device
        self.received_skips = graphs.task.received_skips
        self.sent_skips = graphs.task.sent_skips
        self._task = graphs.task
        self._graphs = graphs
        self._aliases = [alias for _, alias in parameters.pairs.values()] if parameters else []
        self._settings = settings

    def forward(
        self, inputs: Activation, randomness: Randomness, *, grad: bool, drop: bool
    ) -> tuple[Activation, Tape | None]:
        """As :meth:`Task.forward`."""
        work = partial(self._task.forward, grad=grad, drop=drop)
        outputs, tape = self._run((grad, drop), work, inputs, randomness)
        if tape is not None and tape.inputs is not None:
            tape = replace(tape, inputs=inputs)  # Not the slot's, which a replay overwrites.
        assert outputs is not None
        return outputs, tape

    def recompute(self, tape: Tape, randomness: Randomness) -> Tape:
        """As :meth:`Task.recompute`."""

        def work(inputs: Activation, randomness: Randomness) -> tuple[None, Tape]:
            return None, self._task.recompute(replace(tape, inputs=inputs), randomness)

        assert tape.inputs is not None
        _, recomputed = self._run("recompute", work, tape.inputs, randomness)
        assert recomputed is not None
        return recomputed

    def backward(
        self, tapes: Sequence[Tape], grads: Sequence[Grads], *, keep_graph: bool
    ) -> list[Grads]:
        """As :meth:`Task.backward`.

        Raises:
            RuntimeError: parameters were modified in place since the forward.
        """
        return [
            self._backward(tape, output_grads, keep_graph)
            for tape, output_grads in zip(tapes, grads, strict=True)
        ]

    def backward_of_inputs(
        self, tape: Tape, grads: Grads, *, keep_graph: bool
    ) -> tuple[Grads, WeightBackward | None]:
        """The whole backward: CUDA graphs are not cut in two."""
        return self._backward(tape, grads, keep_graph), None

    def _run(
        self, kind: Any, work: Work, inputs: Activation, randomness: Randomness
    ) -> tuple[Activation | None, Tape | None]:
        signature = None
        if self._settings is not None:
            signature = self._graphs.signature((kind, self._settings), inputs)
        if signature is None:
            return work(inputs, randomness)
        if not signature.watched:
            return self._warmed_up(signature, work, inputs, randomness)
        with self._graphs.recorder.turn() as ours:
            slot = self._slot(signature, work, inputs) if ours else None
            if slot is not None:
                lease = Lease(slot)
                write(slot.inputs, inputs.tensors)
                with randomness(self._graphs.index):
                    slot.graph.replay()
                outputs, tape = slot.copied_outputs(), slot.tape
                if tape is not None and tape.inputs is None:
                    tape = Traced.of(tape, signature, lease, versions_of(self._aliases))
                return outputs, tape
        return work(inputs, randomness)

    def _warmed_up(
        self, signature: Signature, work: Work, inputs: Activation, randomness: Randomness
    ) -> tuple[Activation | None, Tape | None]:
        if signature.ran:
            with watched(self._graphs.stage, self.device) as watch:
                outputs, tape = work(inputs, randomness)
            signature.watched = True
            why_not = watch.why_not
            if why_not is None and outputs is not None:
                returned = unfit(outputs, self.device)
                why_not = returned and f"it returns {returned}"
            if why_not is not None:
                self._graphs.refuse(signature, why_not)
        else:
            outputs, tape = work(inputs, randomness)
        if tape is None or tape.inputs is not None:
            signature.ran = True  # The pass has no backward.
            return outputs, tape
        return outputs, Traced.of(tape, signature)

    def _slot(self, signature: Signature, work: Work, inputs: Activation) -> Slot | None:
        """A free slot, captured if there is none; None if that fails or the limit is reached."""
        free = signature.free_slot()
        if free is not None:
            return free
        if len(self._graphs.slots()) >= LIMIT:
            self._graphs.warn(f"more than {LIMIT} micro-batches had graphs of their own")
            return None
        leaves = StageParameters(self._graphs.stage, own_versions=True)
        pool = graphs.new_pool()

        def captured() -> tuple[Activation, Activation | None, Tape | None]:
            memory = replace(inputs, tensors=tuple(map(graphs.input_like, inputs.tensors)))
            with installed([leaves]):
                results = work(memory, _unseeded)
                if leaves.has_moved_aliases():
                    raise RuntimeError("a layer gives its parameters other memory")
            return memory, *results

        found = self._graphs.capture(captured, pool, signature)
        if found is None:
            return None
        graph, (memory, outputs, tape) = found
        stand_ins = [leaf for _, leaf in leaves.pairs.values()]
        slot = Slot(graph, pool, memory.tensors, outputs, tape, stand_ins)
        signature.slots.append(slot)
        self._graphs.add(slot)
        return slot

    def _backward(self, tape: Tape, grads: Grads, keep_graph: bool) -> Grads:
        if not isinstance(tape, Traced) or tape.lease is None:
            (result,) = self._task.backward([tape], [grads], keep_graph=keep_graph)
            if isinstance(tape, Traced):
                tape.signature.ran = True
            return result
        if tape.versions != versions_of(self._aliases):
            raise RuntimeError(
                f"parameters of stage {self._graphs.index} were modified in place between its "
                "forward and its backward, which needs them as they were; do it afterwards"
            )
        slot = tape.lease.slot
        with self._graphs.recorder.turn() as ours:
            backward = self._backward_graph(slot, tape.signature, grads) if ours else None
            if backward is not None:
                write(backward.grads, [grad for grad in grads if grad is not None])
                backward.graph.replay()
                self._accumulate(backward.of_leaves)
                return copies_of(backward.of_inputs)
        of_inputs, of_leaves = self._graphs.recorder.alone(
            lambda: slot.differentiate(self._task, grads)
        )
        self._accumulate(of_leaves)
        return of_inputs

    def _backward_graph(self, slot: Slot, signature: Signature, grads: Grads) -> Backward | None:
        """The captured backward for outputs with such gradients; None if it cannot be captured."""
        present = tuple([grad is not None for grad in grads])
        if present not in slot.backwards and not signature.refused:

            def captured() -> tuple[Grads, Grads, Grads]:
                memory = tuple([None if g is None else graphs.input_like(g) for g in grads])
                results = slot.differentiate(self._task, memory)
                for grad in (*results[0], *results[1]):
                    if grad is not None and grad.layout is not torch.strided:
                        raise RuntimeError(f"a gradient has layout {grad.layout}")
                return memory, *results

            found = self._graphs.capture(captured, slot.pool, signature)
            if found is None:
                slot.forget_grads()
            else:
                graph, (memory, of_inputs, of_leaves) = found
                written = [grad for grad in memory if grad is not None]
                slot.backwards[present] = Backward(graph, written, of_inputs, of_leaves)
        return slot.backwards.get(present)

    @torch.no_grad()
    def _accumulate(self, grads: Grads) -> None:
        """Add ``grads``, memory that later replays overwrite, to the aliases' gradients."""
        pairs = [(a, g) for a, g in zip(self._aliases, grads, strict=True) if g is not None]
        sums = [(alias.grad, grad) for alias, grad in pairs if alias.grad is not None]
        first = [(alias, grad) for alias, grad in pairs if alias.grad is None]
        if sums:
            add_to_each([total for total, _ in sums], [grad for _, grad in sums])
        if first:
            copies = [torch.empty_like(grad) for _, grad in first]
            copy_to_each(copies, [grad for _, grad in first])
            for (alias, _), copy in zip(first, copies, strict=True):
                alias.grad = copy


def _reason(error: BaseException) -> str:
    """The first line of the message of ``error``, or of its context: if a capture fails, ending it
    raises a second error."""
    first = error.__context__ or error
    return str(first).strip().partition("\n")[0] or type(first).__name__


def _unseeded(stage: int) -> AbstractContextManager[Any]:
    """Randomness of a capture: generators are seeded before each replay."""
    return nullcontext()
