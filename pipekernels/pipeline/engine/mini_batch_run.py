"""One mini-batch: its forwards and backwards, and what the former keep for the latter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pipekernels._torch_private import is_profiler_enabled
from pipekernels.device import streams
from pipekernels.device.profiling import in_profile
from pipekernels.pipeline.context import (
    NOTHING,
    CallerContext,
    checkpointing,
    draw_seed,
    during,
    own_state,
    seed_task,
)
from pipekernels.pipeline.engine.entry import copied_apart
from pipekernels.pipeline.engine.execution import ExecutionPlan
from pipekernels.pipeline.engine.parameters import Parameters, versions
from pipekernels.pipeline.engine.split_backward import WeightBackward
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.engine.task import SavedGraph, Values, buffers_now, may_join
from pipekernels.pipeline.engine.transport import NO_SKIPS, STILL, SkipTable, Transport
from pipekernels.pipeline.microbatch import (
    Activation,
    Grads,
    OutputConsumer,
    Outputs,
    Scatter,
    copy_if_aliased,
)
from pipekernels.pipeline.nested import merged
from pipekernels.pipeline.schedule import Action, Program

Compute = Callable[[Action, Any], Any]
Contexts = Callable[[], AbstractContextManager[Any]]

_AT_ONCE = Program([[Action("B", 0, -1)]])  # Stands for the backwards of all microbatches.


class MiniBatchRun:
    """Runs the actions of one mini-batch.

    A microbatch passes through these parts of a stage in its forward, and back in its backward::

        1  skips in   tensors that layers of earlier stages stashed
        2  receive    copies from the stage before, or of the input, are waited for
        3  layers     leaves, layers, roots: a graph of its own; checkpointed, its inputs alone
        4  skips out  tensors that layers of later stages pop
        5  send       copies to the stage after are started; the last stage's outputs are collected

    Args:
        plan: decides where and in which order they run.
        stages: what they run.
        inputs: one per microbatch.
        parameters: the stages', None if no backward can follow.
        dropped: how many microbatches, from the first, keep only their inputs and are recomputed
            in the backward.
        record: called with the seconds that the mini-batch took, when it has ended, if not None.
    """

    def __init__(
        self,
        *,
        plan: ExecutionPlan,
        stages: Stages,
        inputs: Scatter,
        parameters: Parameters | None,
        dropped: int,
        record: Callable[[float], object] | None,
    ) -> None:
        self.stages = stages
        self.inputs = inputs
        self.parameters = parameters
        self.outputs = Outputs(inputs.sizes, inputs.dim)
        self._plan = plan
        self._seed = draw_seed()  # That of each task follows from it.
        self._tasks = plan.tasks
        self._dropped = dropped
        self._record = record
        self._seconds = 0.0
        self._consumer: OutputConsumer = self.outputs  # In a training step, the losses.
        self._trains = False  # Whether this is a training step.
        # Context of the thread that starts the forward. Read only if recomputations need it: the
        # first read takes as long as two small layers.
        self._context: CallerContext | None = None
        # Versions of the parameters after the forward, if backwards recompute.
        self._parameter_versions: list[int] = []
        self._buffer_values: Values = {}  # As they were before checkpointed forwards.
        self._graphs: list[list[SavedGraph | None]] = [
            [None] * len(inputs.sizes) for _ in self._tasks
        ]
        self._skips = SkipTable(stages.skips, stages.devices) if stages.skips.receiver else NO_SKIPS
        # Makes a context for the time in which autograd runs, on this thread or on another.
        self._in_autograd: Contexts = plan.in_autograd
        self._keep_graph = False  # Whether the present backward is to.
        self._second_parts: dict[tuple[int, int], WeightBackward] = {}  # by (stage, microbatch)
        self._input_grads: list[Grads] = []  # By microbatch, in a backward.
        self._released = False  # A backward has freed the graphs.
        self._device = stages.devices[0]  # The current one, with its stream (Transport.phase).
        self._moves = len({*stages.devices, *inputs.devices}) > 1
        # The last attribute, so that it is destroyed after the graphs: its end releases the
        # buffers that they received.
        copies = self._moves or stages.with_streams
        self._transport = Transport(stages.with_streams) if copies else STILL

    # ---- passes ----------------------------------------------------------------------------------

    def is_alone(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether there is one microbatch, ``given`` whole, and nothing between the model and its
        graph: then it is the model, and autograd runs its backward."""
        return (
            len(self._tasks) == len(self.inputs.sizes) == 1
            and not self._dropped
            and self._plan.is_fused
            and not self._moves
            and not self._tasks[0].may_overwrite(given)
        )

    def run_alone(self, given: Sequence[torch.Tensor]) -> Any:
        """Run a microbatch that :meth:`is_alone`, ``given``, in the caller's graph; returns its
        value."""
        inputs = replace(self.inputs.take(0), tensors=tuple(given))
        with own_state(self.stages.generators):
            outputs, _ = self._tasks[0].forward(inputs, self.seeded, 0, alone=True)
        return merged([outputs.structure]).build(copy_if_aliased(outputs.tensors, given))

    def forward(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run every forward; returns the outputs ``[batch, ...]``. They share no memory with
        ``given``, as autograd would not know of it."""
        parameters = self.parameters
        with (
            own_state(self.stages.generators),
            NOTHING if parameters is None else parameters.installed(),
            self._transport.phase() if self.stages.with_streams else NOTHING,
        ):
            if self._dropped:
                self._context = CallerContext()
            program = self._plan.program.forwards
            with self._observed(program, self._forward, ends=parameters is None) as compute:
                self._plan.run(program, compute)
        if parameters is not None and self._dropped:
            self._parameter_versions = versions(parameters.tensors)
        # Joined outputs are new tensors; that of a single microbatch is the layers' own.
        whole = self.outputs.join()
        return whole if len(self.inputs.sizes) > 1 else copy_if_aliased(whole, given)

    def backward(
        self, grads: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> list[torch.Tensor | None]:
        """Run every backward of the program; returns the gradients of the inputs, then those of the
        parameters.

        Args:
            grads: gradients of the outputs; None for an output that has none.
            keep_graph: whether another backward may follow.

        Raises:
            RuntimeError: an earlier backward has released the stages' graphs, or the stages are to
                be recomputed and have changed.
        """
        if self._released:
            raise RuntimeError(
                "this is the second backward through a pipe's output, and the first one freed "
                "the graphs of its stages; pass retain_graph=True to the first"
            )
        parameters = self.parameters
        assert parameters is not None
        self._released = not keep_graph  # As autograd frees what it keeps for other nodes.
        self._keep_graph = keep_graph
        self.outputs.whole_grads = grads
        compute: Compute = self._backward
        program = self._plan.program.backwards
        if self._plan.is_fused and not self._dropped and may_join(self._graphs[0]):
            compute, program = self._backward_at_once, _AT_ONCE  # Autograd is entered once.
        # Streams as in the forward.
        with self._transport.phase() if self.stages.with_streams else NOTHING:
            if not self._dropped:
                return self._gradients(program, compute)
            change = ""
            if parameters.layers.have_changed():
                change = "layers, their modes, or which parameters they have, were changed"
            elif versions(parameters.tensors) != self._parameter_versions:
                change = "parameters were modified in place"
            if change:
                raise RuntimeError(
                    f"the pipe is to recompute stages, but {change} after their forward; do that "
                    "after the backward, or use checkpoint='never'"
                )
            # Layers that run again need their parameter copies, and may write to them.
            with own_state(self.stages.generators), parameters.installed():
                found = self._gradients(program, compute)
            self._parameter_versions = versions(parameters.tensors)
            return found

    def train(self, losses: OutputConsumer, waiting: Contexts | None) -> list[torch.Tensor | None]:
        """Run the whole program, with ``losses`` between forwards and backwards; returns as
        :meth:`backward`. Autograd runs, on this thread or another, in contexts of ``waiting``."""
        assert self.parameters is not None
        self._in_autograd = waiting or self._in_autograd
        self._consumer, self._trains = losses, True
        with own_state(self.stages.generators):
            self._context = CallerContext()  # For forwards on any thread.
            # Backwards run without the caller's autocast, as autograd's do; forwards apply it.
            with (
                self._context.without_autocast(),
                self._transport.phase() if self.stages.with_streams else NOTHING,
                self.parameters.installed(),
            ):
                return self._gradients(self._plan.program, self._action)

    @contextmanager
    def _observed(self, program: Program, compute: Compute, *, ends: bool) -> Iterator[Compute]:
        """Yield ``compute``, shown by the timeline and the profiler, for the body, which runs
        ``program``; time the body. ``ends`` says whether the mini-batch has then ended."""
        self._device = self.stages.devices[0]
        timeline = self.stages.timeline
        recorded: AbstractContextManager[Any] = NOTHING
        # A fused task has no stages to show: the timeline began after its forward.
        if timeline is not None and not self._plan.is_fused:
            clocks = {task.device: self._transport.clock(task.device) for task in self._tasks}
            clock_of = [clocks[task.device] for task in self._tasks].__getitem__
            recorded = timeline.recorded(compute, program, clock_of)
        with recorded as recording:
            compute = recording or compute
            begin = time.perf_counter()
            yield partial(_in_profile, compute) if is_profiler_enabled() else compute
            self._seconds += time.perf_counter() - begin
        if ends and self._record is not None:
            self._record(self._seconds)

    def _gradients(self, program: Program, compute: Compute) -> list[torch.Tensor | None]:
        """Run ``program``, which has backwards; returns the gradients of the inputs, then those of
        the parameters."""
        parameters = self.parameters
        assert parameters is not None
        # Left by a backward that began past the pipe's output, in a graph that layers have kept.
        parameters.deny_accumulated()
        self._input_grads = [()] * len(self.inputs.sizes)
        try:
            with self._observed(program, compute, ends=True) as observed:
                self._plan.run(program, observed)
            # Gradients that were copied to the caller's device (stage -1) are waited for last.
            if self._transport.pending:
                for m in range(len(self.inputs.sizes)):
                    self._transport.receive((-1, m, True))
            of_losses = self._consumer.parameter_grads
            return [*self.inputs.joined(self._input_grads), *parameters.accumulated(of_losses)]
        except BaseException:
            parameters.drop_accumulated()
            raise
        finally:
            # After a failure too: nothing may leak into the next backward.
            self._second_parts.clear()
            self._skips.grads.clear()
            self._input_grads = []
            self.outputs.whole_grads = ()

    def seeded(self, stage: int, m: int) -> AbstractContextManager[Any]:
        """A context for a forward or its recomputation, made and entered on its thread: both get
        the same numbers from torch's default generators."""
        # Before the context is made: an audit remembers the state that it begins with.
        seed = seed_task(self._plan.generators, self._seed, stage, m)
        return NOTHING if self._plan.drawing is None else self._plan.drawing(seed)

    # ---- actions ---------------------------------------------------------------------------------

    def _action(self, action: Action, value: Any) -> Any:
        """An action of a training step, whose thread may have another context than the caller's."""
        if action.type != "F":
            return self._backward(action, value)
        assert self._context is not None
        with self._context.applied():
            return self._forward(action, value)

    def _forward(self, action: Action, inputs: Activation | None) -> Any:
        """Run a stage on the previous stage's outputs, None for the first; returns its own, which
        the consumer receives from the last one. Leaves its graph."""
        _, stage, m = action
        task, dropped = self._tasks[stage], m < self._dropped
        if task.device != self._device:
            self._device = task.device
            streams.make_device_current(task.device)
        if inputs is None:
            inputs = self.inputs.take(m)
            inputs = self._send(inputs, stage, m) if self._moves else inputs
        # 1, 2. A copied skip arrives with the inputs, so copies are waited for after both.
        if task.received_skips:
            inputs = self._skips.take(inputs, task.received_skips, m)
        if (stage, m, False) in self._transport.pending:
            self._transport.receive((stage, m, False))
        # 3. What a recomputation must find again is noted before layers can change it.
        before = versions(inputs.tensors) if dropped else []
        has_buffers = dropped and any(layer._buffers for layer in task.layers)
        buffers = buffers_now(task.layers, self._buffer_values) if has_buffers else []
        with during(checkpointing) if dropped else NOTHING:
            outputs, graph = task.forward(
                inputs, self.seeded, m, parameters=self.parameters, preserve=dropped
            )
        if dropped:
            # The graph was made all the same: it says which outputs want gradients, and torch has
            # other kernels without one, whose bits differ (of LSTMs, of attention).
            nodes = graph.node_types()
            graph = replace(
                graph,
                leaves=(),
                roots=(),
                inputs=inputs,
                versions=before,
                nodes=nodes,
                buffers=buffers,
            )
        if any(outputs.wants_grad):
            self._graphs[stage][m] = graph
        # Layers may return their input, and what gets that may write to it: the next stage, the
        # loss, or the caller. The caller's tensors must not change, nor a recomputation's inputs.
        is_last = stage == len(self._tasks) - 1
        are_copied = is_last and not self._trains and len(self.inputs.sizes) > 1
        if (dropped or stage == 0) and not are_copied:
            outputs = replace(outputs, tensors=copied_apart(outputs.tensors, inputs.tensors))
        # 4, 5.
        if outputs.skips:
            outputs = self._skips.leave(outputs, m, self._transport)
        if is_last:
            # A loss is seeded as one more stage.
            with self.seeded(len(self.stages.modules), m) if self._trains else NOTHING:
                self._consumer.collect(m, outputs)
            return None
        return self._send(outputs, stage + 1, m) if self._moves else outputs

    def _backward(self, action: Action, grads: Grads | None) -> Grads:
        """Run a stage's backward, whole or a part, on the gradients of its outputs, None if the
        consumer has them; returns those of its inputs."""
        part, stage, m = action
        task = self._tasks[stage]
        if task.device != self._device:
            self._device = task.device
            streams.make_device_current(task.device)
        if part == "W":
            second_part = self._second_parts.pop((stage, m), None)
            if second_part is not None:
                with self._in_autograd():
                    second_part(self._keep_graph)
            return ()
        # 5. Gradients of the outputs, from the stage after or from the consumer.
        if (stage, m, True) in self._transport.pending:
            self._transport.receive((stage, m, True))
        if grads is None:
            with self._in_autograd():
                grads = self._consumer.grads(m)
        graph = self._graphs[stage][m]
        if not self._keep_graph:
            self._graphs[stage][m] = None
        if graph is None:
            return ()
        # 4. Those of the skips that this stage has sent.
        if graph.sent:
            grads = grads or (None,) * graph.outputs
            grads = (*grads, *self._skips.take_grads(graph.sent, m))
        if all(grad is None for grad in grads):
            return ()
        # 3. A checkpointed stage runs its layers again first, with the forward's autocast and other
        # settings: this may be another thread.
        if graph.inputs is not None:
            assert self._context is not None and self.parameters is not None
            shown = partial(in_profile, "recomputation stage %d, microbatch %d", stage, m)
            with self._context.applied(), shown() if is_profiler_enabled() else NOTHING:
                graph = task.recompute(graph, self.seeded, m, self.parameters)
        with self._in_autograd():
            # Not in two parts if tensors have hooks: each part would call them.
            if part == "I" and not self.stages.observed.tensor_hooks:
                result, second_part = task.backward_of_inputs(graph, grads, self._keep_graph)
                if second_part is not None:
                    self._second_parts[stage, m] = second_part
            else:
                (result,) = task.backward([graph], [grads], self._keep_graph)
        # 2, 1. Gradients of skips and inputs leave for the stages that sent them.
        if graph.received:
            n = len(result) - len(graph.received)
            skips = dict(zip(graph.received, result[n:], strict=True))
            self._skips.leave_grads(skips, m, self._transport)
            result = result[:n]
        if graph.sources:
            result = self._transport.send(result, graph.sources, (stage - 1, m, True))
        if stage == 0:
            self._input_grads[m] = result
        return result

    def _backward_at_once(self, action: Action, _: Any) -> None:
        """Enter autograd once for all microbatches: possible on one thread with nothing to
        recompute. Autograd takes the latest forward first, as the program does."""
        graphs = {m: graph for m, graph in enumerate(self._graphs[0]) if graph is not None}
        if not self._keep_graph:
            self._graphs[0] = []
        grads = [self._consumer.grads(m) for m in graphs]
        with self._in_autograd():
            results = self._tasks[0].backward([*graphs.values()], grads, self._keep_graph)
        for (m, graph), result in zip(graphs.items(), results, strict=True):
            if graph.sources:
                result = self._transport.send(result, graph.sources, (-1, m, True))
            self._input_grads[m] = result

    def _send(self, value: Activation, stage: int, m: int) -> Activation:
        """Start copying ``value`` to the device of ``stage``, if it is on another one."""
        device = self._tasks[stage].device
        devices = [tensor.device for tensor in value.tensors]
        targets = [device] * len(devices)
        if devices == targets:
            return value
        tensors = self._transport.send(value.tensors, targets, (stage, m, False))
        return replace(value, tensors=tensors, sources=devices)


def _in_profile(compute: Compute, action: Action, value: Any) -> Any:
    with in_profile("%s stage %d, microbatch %d", *action):
        return compute(action, value)
