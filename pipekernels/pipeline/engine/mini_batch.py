"""One mini-batch: its forward over all stages and its backward, together or one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipekernels.device.restoring import restore_despite_interrupt, restoring
from pipekernels.pipeline.cuda_graphs.stage_graphs import GraphedTask
from pipekernels.pipeline.engine import executor
from pipekernels.pipeline.engine.draws import Draws
from pipekernels.pipeline.engine.lanes import intra_op_threads
from pipekernels.pipeline.engine.outputs import (
    Losses,
    Outputs,
    Sink,
)
from pipekernels.pipeline.engine.pace import (
    Kind,
    Pass,
    Way,
)
from pipekernels.pipeline.engine.skip_table import SkipTable
from pipekernels.pipeline.engine.transport import Receiver, Transport
from pipekernels.pipeline.schedule.program import (
    Action,
    Program,
    Schedule,
    order_of_issue,
)
from pipekernels.pipeline.stage.checkpoint import checkpointed
from pipekernels.pipeline.stage.context import (
    CallerContext,
    cast_cache,
    needs_this_thread,
)
from pipekernels.pipeline.stage.error_notes import note_backward, note_layer
from pipekernels.pipeline.stage.parameters import (
    Aside,
    StageParameters,
    accumulated,
    installed,
    unique,
)
from pipekernels.pipeline.stage.random_state import preserved
from pipekernels.pipeline.stage.recomputation import (
    AsInForward,
    found_buffers,
    keep_changed,
    with_found,
)
from pipekernels.pipeline.stage.split_backward import WeightBackward
from pipekernels.pipeline.stage.task import (
    Activation,
    Grads,
    Tape,
    Task,
)
from pipekernels.pipeline.values.micro_batch import Scatter, apart
from pipekernels.pipeline.values.structure import Structure

if TYPE_CHECKING:
    from pipekernels.pipeline.engine.engine import Engine


class Run:
    """Holds what one forward leaves for its backward.

    Args:
        engine: the stages and what is known about their speed.
        schedule: who runs what when.
        scatter: the micro-batches, detached where a backward can follow: the graph of the inputs
            belongs to the autograd node, which holds this run.
        wants_grad: which inputs want a gradient.
        structure: how the first stage's input is put together.
        parameters: the stages' parameters, None where no backward can follow.
        checkpoint: one of ``checkpoint.MODES``.
        may_split: whether backwards, whole in the schedule, may be done in two parts where that is
            faster. A schedule that the user has named runs as it is.
    """

    def __init__(
        self,
        engine: Engine,
        schedule: Schedule,
        scatter: Scatter,
        wants_grad: tuple[bool, ...],
        structure: Structure,
        parameters: list[StageParameters] | None,
        checkpoint: str,
        may_split: bool,
    ) -> None:
        lanes = schedule.lanes(len(engine.stages))  # Raises whatever way is taken.
        self.grad = parameters is not None
        self.sizes = scatter.sizes
        self._engine = engine
        self._parameters = parameters or []
        self._scatter = scatter
        self._wants_grad = wants_grad
        # What else is in the input may be large: not kept beyond the forward.
        self._structure: Structure | None = structure
        # Of the thread that begins the run. Asked for where lanes or recomputations need it: cold, it
        # takes as long as two small layers.
        self._context: CallerContext
        self._draws = Draws(engine)
        micro_batches = len(scatter)
        self._drop = [
            self.grad and checkpointed(checkpoint, m, micro_batches) for m in range(micro_batches)
        ]
        # Entered where graphs are gone through backwards.
        self._in_autograd: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._pass = self._begun(schedule, may_split)
        self._way: Way = "inline" if self._pass is None else self._pass.way
        self._tasks: Sequence[Task | GraphedTask] = engine.tasks
        if self._way == "inline" and engine.chain is not None and engine.timeline is None:
            self._tasks = [engine.chain]
        elif engine.graphs:
            self._tasks = [self._with_graphs(index) for index in range(len(engine.tasks))]
        self._trainable = [
            self.grad and any(self._parameters[index].pairs for index, _ in task.stages)
            for task in self._tasks
        ]
        self._program = schedule.program(
            len(self._tasks), micro_batches, split=self._way == "split"
        )
        if self._program.splits:
            self._draws.watch_hooks()
        self._tapes: list[list[Tape | None]] = [[None] * micro_batches for _ in self._tasks]
        # Where backwards recompute.
        self._as_in_forward: AsInForward
        # Of the inputs of each (stage, micro-batch) that is to be recomputed.
        self._versions: dict[tuple[int, int], list[int]] = {}
        self._second_parts: dict[tuple[int, int], WeightBackward] = {}  # by (stage, micro-batch)
        self._skips = SkipTable(engine.skips, engine.devices)
        # Where inputs of a stage were before they were brought to its device; those that were there are
        # left out. Their gradients go back to it.
        self._homes: dict[tuple[int, int], list[torch.device]] = {}
        self._input_grads: list[Grads] = [()] * micro_batches
        self._released = False
        # Intra-op threads are shared out alike on lanes and inline, so that the way taken cannot
        # show in the bits.
        self._threads = torch.get_num_threads()
        if engine.may_use_lanes:
            self._threads = max(1, self._threads // min(lanes, micro_batches))
        # The last attribute, so that it outlives the tapes: with its end it takes back what they used.
        self._transport = Transport(engine.with_streams)

    def forward(self, outputs: Outputs, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run every forward of the program; returns the outputs ``[batch, ...]``, in memory of their own
        and not that of ``given``: autograd would not know that they share it."""
        aliases = installed(self._parameters) if self.grad else nullcontext()
        forward = partial(self._forward, outputs)
        around: Callable[[], AbstractContextManager[None]] = nullcontext
        uncached = cast_cache(False) if self.grad else nullcontext()
        with preserved(self._engine.devices), aliases, self._phase(), uncached:
            if self._way != "inline" or any(self._drop):
                self._context = CallerContext()
                around = self._context.applied
            self._execute(self._program.forwards, forward, around, last=not self.grad)
        self._structure = None
        if any(self._drop):
            self._as_in_forward = AsInForward(self._engine.stages, self._parameters)
        whole = outputs.take()
        return whole if len(self.sizes) > 1 else apart(whole, given)

    def backward(
        self, outputs: Outputs, grads: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> tuple[Grads, Grads]:
        """Run every backward of the program.

        Args:
            outputs: what :meth:`forward` filled.
            grads: of the outputs, None for one that nobody differentiated.
            keep_graph: whether another backward may follow.

        Returns:
            The gradients of the inputs, and of the parameters.

        Raises:
            RuntimeError: an earlier backward has released the stages' graphs.
        """
        with self._engine.lock:
            if self._released:
                raise RuntimeError(
                    "this is the second backward through a pipe's output, and the first one freed "
                    "the graphs of its stages; pass retain_graph=True to the first"
                )
            self._released = not keep_graph
            return self._backwards(outputs, grads, keep_graph)

    @restore_despite_interrupt
    def _backwards(
        self, outputs: Outputs, grads: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> tuple[Grads, Grads]:
        engine = self._engine
        again = any(self._drop)
        with (
            self._phase(),
            outputs.given(grads),
            self._accumulating() as results,
            preserved(engine.devices) if again else nullcontext(),
            self._as_in_forward.again() if again else nullcontext(),
        ):
            if self._tasks == [engine.chain] and not again:
                self._backward_at_once(outputs, keep_graph)
            else:
                backward = partial(self._backward, outputs, keep_graph)
                around = nullcontext if self._way == "inline" else CallerContext().applied
                self._execute(self._program.backwards, backward, around, last=True)
        if not keep_graph:
            engine.give_back(self._parameters)
        return results.inputs, results.parameters

    def train(self, losses: Losses) -> tuple[Grads, Grads]:
        """Run the whole program, the loss in between.

        Returns:
            The gradients of the inputs, and of the parameters.
        """

        def compute(action: Action, value: Any) -> Any:
            if action.kind == "F":
                with self._context.applied():
                    return self._forward(losses, action, value)
            return self._backward(losses, False, action, value)

        if self._engine.with_streams:
            self._in_autograd = lambda: self._engine.unlocked
        # As if the loss were a stage behind the last one.
        losses.randomness = lambda m: self._draws.of(m, len(self._engine.stages))
        losses.aside = Aside(self._parameters)
        with cast_cache(False):
            self._context = CallerContext()
        with (
            self._context.without_autocast(),
            self._phase(),
            self._accumulating() as results,
            preserved(self._engine.devices),
            installed(self._parameters),
        ):
            self._execute(self._program, compute, nullcontext, last=True)
        if self.grad:
            self._engine.give_back(self._parameters)
        return results.inputs, losses.aside.added_to(results.parameters, unique(self._parameters))

    def _forward(self, sink: Sink, action: Action, inputs: Activation | None) -> Activation:
        _, stage, m = action
        if inputs is None:
            assert self._structure is not None
            inputs = Activation(self._scatter.take(m), self._wants_grad, self._structure)
            inputs = self._sent(inputs, stage, m)
        task = self._tasks[stage]
        if task.received_skips:
            inputs = inputs.with_skips(self._skips.take(task.received_skips, m))
        if self._transport.arrivals:
            self._transport.receive(Receiver(stage, m))
        if self._drop[m]:
            self._versions[stage, m] = inputs.versions()
        found = found_buffers([layers for _, layers in task.stages]) if any(self._drop) else []
        try:
            outputs, tape = task.forward(
                inputs,
                partial(self._draws.of, m),
                grad=self._trainable[stage] or (self.grad and any(inputs.wants_grad)),
                drop=self._drop[m],
            )
        except Exception as error:
            note_layer(error, task.stages, m, "forward")
            raise
        if found:
            earlier = [tape.buffers for tape in self._tapes[stage] if tape is not None]
            keep_changed(found, self._engine.changing_buffers, earlier)
            if self._drop[m] and tape is not None:
                tape.buffers = found
        self._tapes[stage][m] = tape
        outputs, sent = outputs.without_skips()
        if sent:
            self._skips.leave(sent, m, self._transport)
        if stage == len(self._tasks) - 1:
            sink.collect(m, outputs)
            return outputs
        return self._sent(outputs, stage + 1, m)

    def _sent(self, value: Activation, stage: int, m: int) -> Activation:
        """``value``, on its way to the device of ``stage``."""
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
        if kind == "W":
            second_part = self._second_parts.pop((stage, m), None)
            if second_part is not None:
                with self._noted(self._tasks[stage], m), self._in_autograd():
                    second_part(keep_graph)
            return ()
        if self._transport.arrivals:
            self._transport.receive(Receiver(stage, m, backward=True))
        if grads is None:
            with self._in_autograd():
                grads = sink.grads(m)
        task, tape = self._tasks[stage], self._tapes[stage][m]
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
            tape = self._recomputed(tape, tape.inputs, stage, m)
        with self._noted(task, m), self._in_autograd():
            # Hooks on tensors would be called in both parts.
            if kind == "I" and not self._draws.saw_tensor_hooks:
                result, second_part = task.backward_of_inputs(tape, grads, keep_graph=keep_graph)
                if second_part is not None:
                    self._second_parts[stage, m] = second_part
            else:
                (result,) = task.backward([tape], [grads], keep_graph=keep_graph)
        if tape.received:
            n = len(result) - len(tape.received)
            self._skips.leave_grads(tape.received, result[n:], m, self._transport)
            result = result[:n]
        if self._homes:
            result = self._returned(result, stage, m)
        if stage == 0:
            self._input_grads[m] = result
        return result

    @contextmanager
    def _noted(self, task: Task | GraphedTask, m: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            note_backward(error, task.stages, m)
            raise

    def _recomputed(self, tape: Tape, inputs: Activation, stage: int, m: int) -> Tape:
        """What a second forward on the ``inputs`` of ``tape`` leaves behind."""
        if inputs.versions() != self._versions[stage, m]:
            raise RuntimeError(
                f"an input of stage {stage} was modified in place after the stage was given it, "
                "and checkpointing needs it to recompute the stage; modify a copy, or use "
                "checkpoint='never'"
            )
        # The forward's autocast and the like, on a thread that may be another.
        task = self._tasks[stage]
        try:
            with self._context.applied(), with_found(tape.buffers):
                return task.recompute(tape, partial(self._draws.of, m))
        except Exception as error:
            note_layer(error, task.stages, m, "recomputation")
            raise

    def _returned(self, grads: Grads, stage: int, m: int) -> Grads:
        """Gradients of the inputs of ``stage``, on their way to where these have come from."""
        if (stage, m) not in self._homes:
            return grads
        receiver = Receiver(stage - 1, m, backward=True)
        return self._transport.send(grads, self._homes[stage, m], receiver)

    def _backward_at_once(self, outputs: Outputs, keep_graph: bool) -> None:
        """On one thread, with nothing to recompute, autograd needs to be entered only once. It goes
        through the micro-batches in the program's order, the latest forward first."""
        begin = time.perf_counter()
        # None is missing: whoever gets here has parameters or inputs that want gradients.
        tapes = [tape for tape in self._tapes[0] if tape is not None]
        if not keep_graph:
            self._tapes[0] = []
        with intra_op_threads(self._threads):
            assert self._engine.chain is not None
            grads = [outputs.grads(m) for m in range(len(tapes))]
            task, m = self._engine.chain, 0 if len(tapes) == 1 else None
            with self._noted(task, m), self._transport.on(task.device), self._in_autograd():
                results = task.backward(tapes, grads, keep_graph=keep_graph)
            self._input_grads = results
            if self._homes:
                self._input_grads = [self._returned(r, 0, m) for m, r in enumerate(results)]
        self._note_time(time.perf_counter() - begin, last=True)

    @contextmanager
    def _accumulating(self) -> Iterator[_Results]:
        """Fill in the results of the body's backwards. After a failure nothing is kept: what was
        accumulated must not leak into the next backward."""
        results = _Results()
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

    def _take_grads(self, results: _Results) -> None:
        self._second_parts.clear()
        self._skips.forget_grads()
        self._input_grads = [()] * len(self._scatter)
        results.parameters = tuple(accumulated(unique(self._parameters), self._parameters))

    def _execute(
        self,
        program: Program,
        compute: Callable[[Action, Any], Any],
        around: Callable[[], AbstractContextManager[Any]],
        *,
        last: bool,
    ) -> None:
        """Run ``program`` the way that was chosen for this run; ``last`` tells that nothing of the
        run follows."""
        engine = self._engine
        begin = time.perf_counter()
        with self._recorded(compute, program) as recorded:
            # Observed may be a backward alone.
            if self._way != "inline" and not needs_this_thread():
                executor.run_on_lanes(program, recorded, threads=self._threads, around=around)
            else:
                order = None
                if engine.with_streams:
                    recorded = self._placed(recorded)
                    order = order_of_issue(program, engine.waits)
                with intra_op_threads(self._threads):
                    executor.run_inline(program, recorded, order)
        self._note_time(time.perf_counter() - begin, last=last)

    def _recorded(
        self, compute: Callable[[Action, Any], Any], program: Program
    ) -> AbstractContextManager[Callable[[Action, Any], Any]]:
        timeline = self._engine.timeline
        if timeline is None:
            return nullcontext(compute)
        devices = {task.device for task in self._tasks}
        clocks = {device: self._transport.clock(device) for device in devices}
        return timeline.recorded(compute, program, lambda s: clocks[self._tasks[s].device])

    def _placed(self, compute: Callable[[Action, Any], Any]) -> Callable[[Action, Any], Any]:
        """``compute``, with each stage's device as the current one."""

        def placed(action: Action, value: Any) -> Any:
            with self._transport.on(self._tasks[action.stage].device):
                return compute(action, value)

        return placed

    def _phase(self) -> AbstractContextManager[None]:
        return self._transport.phase() if self._engine.with_streams else nullcontext()

    def _note_time(self, seconds: float, *, last: bool) -> None:
        if self._pass is not None:
            self._pass.add(seconds, last=last)

    def _with_graphs(self, stage: int) -> Task | GraphedTask:
        if stage not in self._engine.graphs:
            return self._engine.tasks[stage]
        parameters = self._parameters[stage] if self._parameters else None
        return self._engine.graphs[stage].of_run(parameters)

    def _begun(self, schedule: Schedule, may_split: bool) -> Pass | None:
        """This run as a pass that is timed; None where it can only go inline. Also tells ``_draws``
        which way it goes."""
        engine = self._engine
        several = min(len(engine.stages), len(self._scatter)) > 1
        if not (engine.may_use_lanes and several) or needs_this_thread():
            return None
        may_split = may_split and self.grad and not any(self._drop)
        kind = Kind(
            schedule,
            len(self._scatter),
            self._scatter.elements(0).bit_length(),
            self.grad,
            engine.modes,
            sum(self._drop),
            may_split,
        )
        ways: list[Way] = ["inline", "lanes", "split"] if may_split else ["inline", "lanes"]
        begun = Pass(engine.pace, kind, ways)
        if begun.is_first:
            self._in_autograd = self._draws.audited()
        if engine.has_hidden_randomness():
            begun.way = "inline"
        elif begun.way != "inline":
            self._in_autograd = self._draws.on_lanes()
        return begun


class _Results:
    """Gradients of the inputs and of the parameters."""

    inputs: Grads = ()
    parameters: Grads = ()
