"""One mini-batch: its forwards and backwards, and what the former keep for the latter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pipekernels._torch_private import is_profiler_enabled
from pipekernels.device import streams
from pipekernels.device.profiling import in_profile
from pipekernels.pipeline.context import (
    NOTHING,
    Settings,
    checkpointing,
    draw_seed,
    during,
    own_state,
    seed_task,
)
from pipekernels.pipeline.engine.entry import Copied, copied_apart
from pipekernels.pipeline.engine.parameters import Parameters, versions
from pipekernels.pipeline.engine.split_backward import HookWatch, WeightBackward
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.engine.task import SavedGraph, Values, buffers_now
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
from pipekernels.pipeline.schedule import Action, Program, Schedule, order_of_issue

Contexts = Callable[[], AbstractContextManager[Any]]

_RANGE = "%s stage %d, microbatch %d"  # What the profiler shows.


class MiniBatchRun:
    """Runs the actions of one mini-batch, one after another, on the calling thread.

    A microbatch passes through these parts of a stage in its forward, and back in its backward::

        1  skips in   tensors that layers of earlier stages stashed
        2  receive    copies from the stage before, or of the input, are waited for
        3  layers     leaves, layers, roots: a graph of its own; checkpointed, its inputs alone
        4  skips out  tensors that layers of later stages pop
        5  send       copies to the stage after are started; the last stage's outputs are collected

    Args:
        stages: what it runs.
        schedule: the order.
        inputs: one per microbatch.
        dropped: how many microbatches, from the first, keep only their inputs and are recomputed
            in the backward.

    Attributes:
        parameters: the stages', None if no backward of this object can follow.
    """

    def __init__(
        self,
        *,
        stages: Stages,
        schedule: Schedule,
        inputs: Scatter,
        dropped: int,
    ) -> None:
        self.stages = stages
        self.inputs = inputs
        self.parameters: Parameters | None = None
        self.outputs = Outputs(inputs.sizes, inputs.dim)
        count = len(inputs.sizes)
        # As one task, stages of one device make fewer graphs. Not where each stage is to be shown,
        # nor if they share a layer: its gradients would be added up in another order than apart.
        is_shown = stages.timeline is not None or is_profiler_enabled()
        fused = None if is_shown or (count > 1 and stages.share_layers) else stages.fused
        self._tasks = stages.tasks if fused is None else [fused]
        self._is_fused = fused is not None
        self._program = partial(schedule.program, len(self._tasks), count)
        # Called before a stage's forward of a microbatch, and before its recomputation: both get
        # the same numbers from torch's default generators.
        self._seed = partial(seed_task, stages.generators, draw_seed())
        self._dropped = dropped
        self._consumer: OutputConsumer = self.outputs  # In a training step, the losses.
        self._trains = False  # Whether this is a training step.
        # The settings of the forward's thread, if a backward is to recompute.
        self._settings: Settings | None = None
        # Versions of the parameters after the forward, if backwards recompute.
        self._parameter_versions: list[int] = []
        self._buffer_values: Values = {}  # As they were before checkpointed forwards.
        self._graphs: list[list[SavedGraph | None]] = [[None] * count for _ in self._tasks]
        self._skips = SkipTable(stages.skips, stages.devices) if stages.skips.receiver else NO_SKIPS
        # By microbatch: what the next stage's forward gets, and, in a backward, the previous
        # stage's; at last, the gradients of the input.
        self._activations: dict[int, Activation] = {}
        self._grads: list[Grads] = []
        # Makes a context for the time in which autograd runs, on this thread or on another.
        self._in_autograd: Contexts = nullcontext
        self._keep_graph = False  # Whether the present backward is to.
        self._second_parts: dict[tuple[int, int], WeightBackward] = {}  # by (stage, microbatch)
        self._hook_watch: HookWatch | None = None  # If backwards are in two parts.
        self._released = False  # A backward has freed the graphs.
        self._moves = len({*stages.devices, *inputs.devices}) > 1
        # Whether nothing is between the layers and their graph: then it is in the caller's, and
        # autograd runs its backward. That adds up the gradients of all uses of a parameter, the
        # latest first, so each microbatch may use it but once.
        is_direct = fused is not None and not dropped and not self._moves
        uses_once = fused is not None and fused.is_plain and not inputs.want_grad
        self.is_direct = is_direct and (count == 1 or uses_once)
        # The last attribute, so that it is destroyed after the graphs: its end releases the
        # buffers that they received.
        copies = self._moves or stages.with_streams
        self._transport = Transport(stages.with_streams) if copies else STILL

    # ---- passes ----------------------------------------------------------------------------------

    def run_direct(self, given: Sequence[torch.Tensor]) -> Any:
        """Run the microbatches of ``given`` in the caller's graph, if ``is_direct``; returns the
        value."""
        (task,), count = self._tasks, len(self.inputs.sizes)
        with own_state(self.stages.generators):
            for m in range(count):
                inputs = self.inputs.take(m)
                tensors = inputs.tensors if count > 1 else given
                if task.may_overwrite:
                    tensors = [Copied.apply(tensor) for tensor in tensors]
                inputs.tensors = tuple(tensors)
                outputs, _ = task.forward(inputs, self._seed, m, direct=True)
                self.outputs.collect(m, outputs)
        if count == 1:
            return merged([outputs.structure]).build(copy_if_aliased(outputs.tensors, given))
        tensors = self.outputs.join()
        return self.outputs.structure.build(tensors)

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
                self._settings = Settings()
            self._run(self._program().forwards)
        if parameters is not None and self._dropped:
            self._parameter_versions = versions(parameters.tensors)
        # Joined outputs are new tensors; the output of a single microbatch is the layers' own.
        whole = tuple([tensor.detach() for tensor in self.outputs.join()])
        return whole if len(self.inputs.sizes) > 1 else copy_if_aliased(whole, given)

    def backward(
        self, grads: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> list[torch.Tensor | None]:
        """Run every backward of the program; returns the gradients of the inputs, then of the
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
        program = self._program().backwards
        # Streams as in the forward.
        with self._transport.phase() if self.stages.with_streams else NOTHING:
            if not self._dropped:
                return self._gradients(program)
            change = ""
            if parameters.layers.have_changed() or any(p.requires_grad for p in parameters.frozen):
                change = "layers, their modes, or which parameters they have or train, were changed"
            elif versions(parameters.tensors) != self._parameter_versions:
                change = "parameters were modified in place"
            if change:
                raise RuntimeError(
                    f"the pipe is to recompute stages, but {change} after their forward; do that "
                    "after the backward, or use checkpoint='never'"
                )
            # Layers that run again need their parameter copies, and may write to them.
            with own_state(self.stages.generators), parameters.installed():
                found = self._gradients(program)
            self._parameter_versions = versions(parameters.tensors)
            return found

    def train(self, losses: OutputConsumer, in_autograd: Contexts) -> list[torch.Tensor | None]:
        """Run the whole program, with ``losses`` between forwards and backwards; returns as
        :meth:`backward`. Autograd runs, on this thread or another, in contexts of
        ``in_autograd``, if autocast is on or devices have streams."""
        assert self.parameters is not None
        self._consumer, self._trains = losses, True
        is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if is_cast or self.stages.with_streams:
            self._in_autograd = in_autograd
        self._hook_watch = HookWatch() if self._program().is_split else None
        with (
            own_state(self.stages.generators),
            self._transport.phase() if self.stages.with_streams else NOTHING,
            self.parameters.installed(),
            self._hook_watch or NOTHING,
        ):
            return self._gradients(self._program())

    def _run(self, program: Program) -> None:
        """Run all actions of ``program``: the mini-batch's, or its forwards or backwards."""
        stages, timeline = self.stages, self.stages.timeline
        device = stages.devices[0]  # The current one, with its stream (Transport.phase).
        # Where devices work asynchronously, the order of issue keeps them all busy.
        order = order_of_issue(program, stages.on_host) if stages.with_streams else program.order
        recording: AbstractContextManager[Any] = NOTHING
        # A fused task has no stages to show: the timeline began after its forward.
        if timeline is not None and not self._is_fused:
            clocks = {task.device: self._transport.clock(task.device) for task in self._tasks}
            recording = timeline.recorded(program, [clocks[task.device] for task in self._tasks])
        is_profiled = is_profiler_enabled()
        with recording as shown:
            for action in order:
                task = self._tasks[action.stage]
                if task.device != device:
                    device = task.device
                    streams.make_device_current(device)
                act = self._forward if action.type == "F" else self._backward
                try:
                    with (
                        shown(action) if shown else NOTHING,
                        in_profile(_RANGE, *action) if is_profiled else NOTHING,
                    ):
                        act(action)
                except Exception as error:
                    _add_note(error, action, task.name)
                    raise

    def _gradients(self, program: Program) -> list[torch.Tensor | None]:
        """Run ``program``, which has backwards; returns the gradients of the inputs, then of the
        parameters."""
        parameters = self.parameters
        assert parameters is not None
        # Left by a backward that began past the pipe's output, in a graph that layers have kept.
        parameters.deny_accumulated()
        self._grads = [()] * len(self.inputs.sizes)
        try:
            self._run(program)
            # Gradients that were copied to the caller's device (stage -1) are waited for last.
            if self._transport.pending:
                for m in range(len(self.inputs.sizes)):
                    self._transport.receive((-1, m, True))
            of_losses = self._consumer.parameter_grads
            return [*self.inputs.joined(self._grads), *parameters.accumulated(of_losses)]
        except BaseException:
            parameters.drop_accumulated()
            raise
        finally:
            # After a failure too: nothing may leak into the next backward.
            self._second_parts.clear()
            self._skips.grads.clear()
            self._grads = []
            self.outputs.whole_grads = ()

    # ---- actions ---------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        """Run a stage on the previous stage's outputs, or the first on the input. Leaves its
        outputs, which the consumer receives from the last one, and its graph."""
        _, stage, m = action
        task, dropped = self._tasks[stage], m < self._dropped
        if stage == 0:
            inputs = self.inputs.take(m)
            inputs = self._send(inputs, stage, m) if self._moves else inputs
        else:
            inputs = self._activations.pop(m)
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
                inputs, self._seed, m, parameters=self.parameters, preserve=dropped
            )
        if dropped:
            # The graph was made all the same: it says which outputs want gradients, and torch has
            # other kernels without one, whose bits differ (of LSTMs, of attention).
            nodes = task.nodes_of(graph)
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
            if self._trains:
                self._seed(len(self.stages.modules), m)  # A loss is seeded as one more stage.
            self._consumer.collect(m, outputs)
        else:
            outputs = self._send(outputs, stage + 1, m) if self._moves else outputs
            self._activations[m] = outputs

    def _backward(self, action: Action) -> None:
        """Run a stage's backward, whole or a part, on the gradients of its outputs, which for the
        last one the consumer has; leaves the gradients of its inputs."""
        part, stage, m = action
        task = self._tasks[stage]
        if part == "W":
            second_part = self._second_parts.pop((stage, m), None)
            if second_part is not None:
                with self._in_autograd():
                    second_part(self._keep_graph)
            return
        # 5. Gradients of the outputs, from the stage after or from the consumer.
        if (stage, m, True) in self._transport.pending:
            self._transport.receive((stage, m, True))
        grads, self._grads[m] = self._grads[m], ()
        if stage == len(self._tasks) - 1:
            with self._in_autograd():
                grads = self._consumer.grads(m)
        graph = self._graphs[stage][m]
        if not self._keep_graph:
            self._graphs[stage][m] = None
        if graph is None:
            return
        # 4. Those of the skips that this stage has sent.
        if graph.sent:
            grads = grads or (None,) * graph.outputs
            grads = (*grads, *self._skips.take_grads(graph.sent, m))
        if all(grad is None for grad in grads):
            return
        # 3. A checkpointed stage runs its layers again first, with the forward's settings.
        if graph.inputs is not None:
            assert self.parameters is not None
            with (
                NOTHING if self._settings is None else self._settings.applied(),
                in_profile(_RANGE, "recomputation", stage, m) if is_profiler_enabled() else NOTHING,
            ):
                graph = task.recompute(graph, self._seed, m, self.parameters)
        with self._in_autograd():
            # Not in two parts if tensors have hooks: each part would call them.
            watch = self._hook_watch
            if part == "I" and not (watch and watch.has_seen_hooks):
                result, second_part = task.backward_of_inputs(graph, grads, self._keep_graph)
                if second_part is not None:
                    self._second_parts[stage, m] = second_part
            else:
                result = task.backward(graph, grads, self._keep_graph)
        # 2, 1. Gradients of skips and inputs leave for the stages that sent them.
        if graph.received:
            n = len(result) - len(graph.received)
            skips = dict(zip(graph.received, result[n:], strict=True))
            self._skips.leave_grads(skips, m, self._transport)
            result = result[:n]
        if graph.sources:
            result = self._transport.send(result, graph.sources, (stage - 1, m, True))
        self._grads[m] = result

    def _send(self, value: Activation, stage: int, m: int) -> Activation:
        """Start copying ``value`` to the device of ``stage``, if it is on another one."""
        device = self._tasks[stage].device
        devices = [tensor.device for tensor in value.tensors]
        targets = [device] * len(devices)
        if devices == targets:
            return value
        tensors = self._transport.send(value.tensors, targets, (stage, m, False))
        return replace(value, tensors=tensors, sources=devices)


def _add_note(error: Exception, action: Action, stage: str) -> None:
    """Say in a note (PEP 678) that ``action``, of ``stage``, has raised ``error``."""
    what = "forward" if action.type == "F" else "backward"
    note = f"raised in the {what} of {stage}, microbatch {action.micro_batch} of a pipe"
    # BaseException.add_note() needs Python 3.11. A layer may raise one object repeatedly.
    notes = vars(error).setdefault("__notes__", [])
    notes += {note}.difference(notes)
