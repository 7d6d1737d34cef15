"""One mini-batch: its forward over all stages and its backward, together or one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from pipekernels.device.autocast import cast_cache
from pipekernels.device.restoring import restoring
from pipekernels.pipeline.engine import executor
from pipekernels.pipeline.engine.execution import Execution
from pipekernels.pipeline.engine.findings import ObservedLayerBehavior
from pipekernels.pipeline.engine.lanes import intra_op_threads
from pipekernels.pipeline.engine.losses import Losses
from pipekernels.pipeline.engine.outputs import Outputs, Sink
from pipekernels.pipeline.engine.skip_table import SkipTable
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.engine.transport import Receiver, Transport
from pipekernels.pipeline.schedule.program import Action, Program, order_of_issue
from pipekernels.pipeline.schedule.timeline import Timeline
from pipekernels.pipeline.stage.context import CallerContext, needs_this_thread
from pipekernels.pipeline.stage.error_notes import note_backward, note_layer
from pipekernels.pipeline.stage.parameters import (
    StageParameters,
    accumulated,
    installed,
    unique,
)
from pipekernels.pipeline.stage.random_state import preserved
from pipekernels.pipeline.stage.recomputation import (
    ForwardState,
    buffer_values_restored,
    drop_unchanged_copies,
    snapshot_buffers,
)
from pipekernels.pipeline.stage.split_backward import WeightBackward
from pipekernels.pipeline.stage.task import Activation, Grads, Tape, Task
from pipekernels.pipeline.values.micro_batch import Scatter, copy_if_aliased
from pipekernels.pipeline.values.structure import Structure

T = TypeVar("T")


class MiniBatch:
    """Runs one forward, and keeps its tapes for the backward. Knows the stages, not the pipe.

    Args:
        stages: the stages to run.
        execution: how to run them.
        findings: collects what is observed about the layers.
        scatter: the micro-batches; detached if a backward can follow, as the autograd node that
            holds this object holds the graph of the inputs.
        wants_grad: which inputs want a gradient.
        structures: that of the first stage's input, for each micro-batch.
        parameters: the stages' parameters; None if no backward can follow.
        recomputed: which micro-batches keep only their inputs and are recomputed in the backward.
        timeline: records the actions, if given.
    """

    def __init__(
        self,
        stages: Stages,
        execution: Execution,
        findings: ObservedLayerBehavior,
        scatter: Scatter,
        wants_grad: tuple[bool, ...],
        structures: Sequence[Structure],
        parameters: list[StageParameters] | None,
        recomputed: list[bool],
        timeline: Timeline | None,
    ) -> None:
        micro_batches = len(scatter)
        self.grad = parameters is not None
        self.sizes = scatter.sizes
        self.parameters = parameters or []
        self._stages = stages
        self._execution = execution
        self._findings = findings
        self._scatter = scatter
        self._wants_grad = wants_grad
        # Dropped after the forward: its non-tensor values may be large.
        self._structures: Sequence[Structure] = structures
        self._recomputed = recomputed
        self._recomputes = any(recomputed)
        self._timeline = timeline
        self._tasks = execution.tasks
        self._randomness = execution.randomness
        self._trainable = [
            self.grad and any(self.parameters[index].pairs for index, _ in task.stages)
            for task in self._tasks
        ]
        # Context of the thread that starts the forward. Read only if lanes or recomputations need
        # it: the first read takes as long as two small layers.
        self._context: CallerContext | None = None
        self._forward_state: ForwardState | None = None  # If backwards recompute.
        self._tapes: list[list[Tape | None]] = [[None] * micro_batches for _ in self._tasks]
        # Versions of the inputs of each (stage, micro-batch) to be recomputed.
        self._versions: dict[tuple[int, int], list[int]] = {}
        self._second_parts: dict[tuple[int, int], WeightBackward] = {}  # by (stage, micro-batch)
        self._skips = SkipTable(stages.skips, stages.devices)
        # By (stage, micro-batch): the devices that its inputs were copied from, if on another one
        # than the stage's. Their gradients are copied back there.
        self._homes: dict[tuple[int, int], list[torch.device]] = {}
        self._input_grads: list[Grads] = [()] * micro_batches
        self._released = False
        # The last attribute, so that it is destroyed after the tapes: its end releases the
        # buffers that they received.
        self._transport = Transport(stages.with_streams)

    def loss_randomness(self, micro_batch: int) -> AbstractContextManager[Any]:
        """Context for the loss of ``micro_batch``, seeded as if the loss were one more stage."""
        return self._randomness.of(micro_batch, len(self._stages.modules))

    def forward(self, outputs: Outputs, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run every forward of the program; returns the outputs ``[batch, ...]``. They share no
        memory with ``given``, as autograd would not know of it."""
        aliases = installed(self.parameters) if self.grad else nullcontext()
        forward = partial(self._forward, outputs)
        around: Callable[[], AbstractContextManager[None]] = nullcontext
        uncached = cast_cache(False) if self.grad else nullcontext()
        with preserved(self._stages.devices), aliases, self._phase(), uncached:
            if self._execution.way != "inline" or self._recomputes:
                self._context = CallerContext()
                around = self._context.applied
            program = self._execution.program.forwards
            self._execute(program, forward, around, last=not self.grad)
        self._structures = ()
        if self._recomputes:
            self._forward_state = ForwardState(self._stages.modules, self.parameters)
        whole = outputs.take()
        return whole if len(self.sizes) > 1 else copy_if_aliased(whole, given)

    def backward(
        self, outputs: Outputs, grads: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> tuple[Grads, Grads]:
        """Run every backward of the program.

        Args:
            outputs: the object that :meth:`forward` filled.
            grads: gradients of the outputs; None for an output that has none.
            keep_graph: whether another backward may follow.

        Returns:
            The gradients of the inputs, and of the parameters.

        Raises:
            RuntimeError: an earlier backward has released the stages' graphs.
        """
        if self._released:
            raise RuntimeError(
                "this is the second backward through a pipe's output, and the first one freed "
                "the graphs of its stages; pass retain_graph=True to the first"
            )
        self._released = not keep_graph
        forward_state = self._forward_state
        with (
            self._phase(),
            outputs.given(grads),
            self._accumulating() as results,
            nullcontext() if forward_state is None else preserved(self._stages.devices),
            nullcontext() if forward_state is None else forward_state.restored(),
        ):
            if self._tasks == [self._stages.fused] and forward_state is None:
                self._backward_at_once(self._tasks[0], outputs, keep_graph)
            else:
                backward = partial(self._backward, outputs, keep_graph)
                inline = self._execution.way == "inline"
                around = nullcontext if inline else CallerContext().applied
                self._execute(self._execution.program.backwards, backward, around, last=True)
        return results.inputs, results.parameters

    def train(self, losses: Losses) -> tuple[Grads, Grads]:
        """Run the whole program, with the losses between forwards and backwards.

        Returns:
            The gradients of the inputs, and those of the parameters that ``losses`` has not
            captured.
        """

        with cast_cache(False):
            self._context = context = CallerContext()

        def compute(action: Action, value: Any) -> Any:
            if action.kind == "F":
                with context.applied():
                    return self._forward(losses, action, value)
            return self._backward(losses, False, action, value)

        with (
            context.without_autocast(),
            self._phase(),
            self._accumulating() as results,
            preserved(self._stages.devices),
            installed(self.parameters),
        ):
            self._execute(self._execution.program, compute, nullcontext, last=True)
        return results.inputs, results.parameters

    def _forward(self, sink: Sink, action: Action, inputs: Activation | None) -> Activation:
        _, stage, m = action
        if inputs is None:
            inputs = Activation(self._scatter.take(m), self._wants_grad, self._structures[m])
            inputs = self._to_device(inputs, stage, m)
        task = self._tasks[stage]
        if task.received_skips:
            inputs = inputs.with_skips(self._skips.take(task.received_skips, m))
        if self._transport.arrivals:
            self._transport.receive(Receiver(stage, m))
        if self._recomputed[m]:
            self._versions[stage, m] = inputs.versions()
        found = snapshot_buffers([layers for _, layers in task.stages]) if self._recomputes else []
        randomness = self._randomness.kept if self._recomputed[m] else self._randomness.of
        try:
            outputs, tape = task.forward(
                inputs,
                partial(randomness, m),
                grad=self._trainable[stage] or (self.grad and any(inputs.wants_grad)),
                drop=self._recomputed[m],
            )
        except Exception as error:
            note_layer(error, task.stages, m, "forward")
            raise
        if found:
            earlier = [tape.buffers for tape in self._tapes[stage] if tape is not None]
            drop_unchanged_copies(found, self._findings.changing_buffers, earlier)
            if self._recomputed[m] and tape is not None:
                tape.buffers = found
        self._tapes[stage][m] = tape
        outputs, sent = outputs.without_skips()
        if sent:
            self._skips.leave(sent, m, self._transport)
        if stage == len(self._tasks) - 1:
            sink.collect(m, outputs)
            return outputs
        return self._to_device(outputs, stage + 1, m)

    def _to_device(self, value: Activation, stage: int, m: int) -> Activation:
        """Start copying ``value`` to the device of ``stage``, if it is on another one."""
        device = self._tasks[stage].device
        for tensor in value.tensors:
            if tensor.device != device:
                break
        else:
            return value
        self._homes[stage, m] = [tensor.device for tensor in value.tensors]
        targets = [device] * len(value.tensors)
        return replace(
            value, tensors=self._transport.send(value.tensors, targets, Receiver(stage, m))
        )

    def _backward(self, sink: Sink, keep_graph: bool, action: Action, grads: Grads | None) -> Grads:
        kind, stage, m = action
        task = self._tasks[stage]
        if kind == "W":
            second_part = self._second_parts.pop((stage, m), None)
            if second_part is not None:
                self._run_backward(task, m, partial(second_part, keep_graph))
            return ()
        if self._transport.arrivals:
            self._transport.receive(Receiver(stage, m, backward=True))
        if grads is None:
            with self._execution.in_backward():
                grads = sink.grads(m)
        tape = self._tapes[stage][m]
        if not keep_graph:
            self._tapes[stage][m] = None
        if tape is None:
            return ()
        if tape.sent:
            grads = grads or (None,) * tape.outputs
            grads = (*grads, *self._skips.take_grads(tape.sent, m))
        if all(grad is None for grad in grads):
            return ()
        if tape.inputs is not None:
            tape = self._recompute(tape, tape.inputs, stage, m)
        # Not in two parts if tensors have hooks: each part would call them.
        if kind == "I" and not self._randomness.saw_tensor_hooks:
            compute = partial(task.backward_of_inputs, tape, grads, keep_graph=keep_graph)
            result, second_part = self._run_backward(task, m, compute)
            if second_part is not None:
                self._second_parts[stage, m] = second_part
        else:
            whole = partial(task.backward, [tape], [grads], keep_graph=keep_graph)
            (result,) = self._run_backward(task, m, whole)
        if tape.received:
            n = len(result) - len(tape.received)
            self._skips.leave_grads(tape.received, result[n:], m, self._transport)
            result = result[:n]
        if self._homes:
            result = self._to_homes(result, stage, m)
        if stage == 0:
            self._input_grads[m] = result
        return result

    def _run_backward(self, task: Task, m: int, compute: Callable[[], T]) -> T:
        """Call ``compute``, which runs autograd on graphs of micro-batch ``m``."""
        try:
            with self._execution.in_backward():
                return compute()
        except Exception as error:
            note_backward(error, task.stages, m)
            raise

    def _recompute(self, tape: Tape, inputs: Activation, stage: int, m: int) -> Tape:
        """The tape of a second forward on the ``inputs`` of ``tape``."""
        if inputs.versions() != self._versions[stage, m]:
            raise RuntimeError(
                f"an input of stage {stage} was modified in place after the stage was given it, "
                "and checkpointing needs it to recompute the stage; modify a copy, or use "
                "checkpoint='never'"
            )
        # With the forward's autocast and other settings: this may be another thread.
        task, context = self._tasks[stage], self._context
        assert context is not None
        try:
            with context.applied(), buffer_values_restored(tape.buffers):
                return task.recompute(tape, partial(self._randomness.again, m))
        except Exception as error:
            note_layer(error, task.stages, m, "recomputation")
            raise

    def _to_homes(self, grads: Grads, stage: int, m: int) -> Grads:
        """Start copying the gradients of the inputs of ``stage`` back to these inputs' devices."""
        if (stage, m) not in self._homes:
            return grads
        receiver = Receiver(stage - 1, m, backward=True)
        return self._transport.send(grads, self._homes[stage, m], receiver)

    def _backward_at_once(self, task: Task, outputs: Outputs, keep_graph: bool) -> None:
        """Enter autograd once for all micro-batches: possible on one thread with nothing to
        recompute. Autograd takes the latest forward first, as the program does."""
        begin = time.perf_counter()
        # No tape is None here: parameters or inputs want gradients.
        tapes = [tape for tape in self._tapes[0] if tape is not None]
        if not keep_graph:
            self._tapes[0] = []
        with intra_op_threads(self._execution.threads):
            grads = [outputs.grads(m) for m in range(len(tapes))]
            try:
                with self._transport.on(task.device), self._execution.in_backward():
                    results = task.backward(tapes, grads, keep_graph=keep_graph)
            except Exception as error:
                note_backward(error, task.stages, 0 if len(tapes) == 1 else None)
                raise
            self._input_grads = results
            if self._homes:
                self._input_grads = [self._to_homes(r, 0, m) for m, r in enumerate(results)]
        self._note_time(time.perf_counter() - begin, last=True)

    @contextmanager
    def _accumulating(self) -> Iterator[_Results]:
        """Collect the gradients of the body's backwards. Drop them after a failure: they must not
        leak into the next backward."""
        results = _Results()
        self.deny_foreign_backwards()
        with restoring(partial(self._take_grads, results)):
            yield results
            if self._transport.arrivals:
                for m in range(len(self._scatter)):
                    self._transport.receive(Receiver(-1, m, backward=True))
            columns = [
                [grads[i] if grads and wants else None for grads in self._input_grads]
                for i, wants in enumerate(self._wants_grad)
            ]
            results.inputs = tuple([self._scatter.joined(column) for column in columns])

    def deny_foreign_backwards(self) -> None:
        """See :meth:`Stages.deny_foreign_backwards`."""
        self._stages.deny_foreign_backwards(self.parameters)

    def _take_grads(self, results: _Results) -> None:
        self._second_parts.clear()
        self._skips.forget_grads()
        self._input_grads = [()] * len(self._scatter)
        results.parameters = tuple(accumulated(unique(self.parameters), self.parameters))

    def _execute(
        self,
        program: Program,
        compute: Callable[[Action, Any], Any],
        around: Callable[[], AbstractContextManager[Any]],
        *,
        last: bool,
    ) -> None:
        """Run ``program`` as the execution says; ``last``: no other part of the pass follows."""
        begin = time.perf_counter()
        threads = self._execution.threads
        with self._recorded(compute, program) as recorded:
            # The caller may have entered a mode for the backward alone.
            if self._execution.way != "inline" and not needs_this_thread():
                executor.run_on_lanes(program, recorded, threads=threads, around=around)
            else:
                order = None
                if self._stages.with_streams:
                    recorded = self._placed(recorded)
                    order = order_of_issue(program, self._stages.done_when_issued)
                with intra_op_threads(threads):
                    executor.run_inline(program, recorded, order)
        self._note_time(time.perf_counter() - begin, last=last)

    def _recorded(
        self, compute: Callable[[Action, Any], Any], program: Program
    ) -> AbstractContextManager[Callable[[Action, Any], Any]]:
        if self._timeline is None or not self._timeline.is_recording:
            return nullcontext(compute)
        devices = {task.device for task in self._tasks}
        clocks = {device: self._transport.clock(device) for device in devices}
        return self._timeline.recorded(compute, program, lambda s: clocks[self._tasks[s].device])

    def _placed(self, compute: Callable[[Action, Any], Any]) -> Callable[[Action, Any], Any]:
        """``compute``, with the current device set to that of the action's stage."""

        def placed(action: Action, value: Any) -> Any:
            with self._transport.on(self._tasks[action.stage].device):
                return compute(action, value)

        return placed

    def _phase(self) -> AbstractContextManager[None]:
        return self._transport.phase() if self._stages.with_streams else nullcontext()

    def _note_time(self, seconds: float, *, last: bool) -> None:
        if self._execution.timing is not None:
            self._execution.timing.add(seconds, last=last)


@dataclass
class _Results:
    """Gradients of the inputs and of the parameters."""

    inputs: Grads = ()
    parameters: Grads = ()
