"""One mini-batch: its micro-batches, and what its forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pipekernels._torch_private import is_profiler_enabled
from pipekernels.device.profiling import in_profile
from pipekernels.pipeline.engine.runners import Compute, Runner
from pipekernels.pipeline.engine.skip_table import SkipTable
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.engine.transport import Receiver, Transport
from pipekernels.pipeline.schedule.program import Action, Program
from pipekernels.pipeline.schedule.timeline import Timeline
from pipekernels.pipeline.stage.context import CallerContext
from pipekernels.pipeline.stage.parameters import StageParameters
from pipekernels.pipeline.stage.recomputation import ForwardState
from pipekernels.pipeline.stage.task import Activation, Grads, Tape, differentiable
from pipekernels.pipeline.values.micro_batch import Batch, Scatter
from pipekernels.pipeline.values.structure import Structure


class Inputs:
    """The inputs of the first stage, on ``device``, one per micro-batch."""

    def __init__(self, batch: Batch, device: torch.device, *, grad: bool) -> None:
        # Detached if a backward can follow, as the autograd node that holds this object holds the
        # graph of the inputs.
        self.wants_grad = tuple(grad and wants_grad(tensor) for tensor in batch.tensors)
        tensors = [tensor.detach() for tensor in batch.tensors] if grad else batch.tensors
        self._scatter = Scatter(tensors, batch.chunks, batch.dim)
        self.rows, self.dim = self._scatter.batch, batch.dim
        self.sizes = self._scatter.sizes
        self.elements = self._scatter.elements(0)  # Of the first, the largest.
        structures = batch.structure.on(device).cut(self.sizes)
        self._structures: list[Structure | None] = list(structures)

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, m: int) -> Activation:
        """Micro-batch ``m``; call once. Drops the references to it, whose values may be large."""
        structure, self._structures[m] = self._structures[m], None
        assert structure is not None
        return Activation(self._scatter.take(m), self.wants_grad, structure)

    def joined(self, grads: Sequence[Grads]) -> Grads:
        """The gradients of the whole inputs, from those of the micro-batches."""
        columns = [
            [part[i] if part and wants else None for part in grads]
            for i, wants in enumerate(self.wants_grad)
        ]
        return tuple([self._scatter.joined(column) for column in columns])


def wants_grad(tensor: torch.Tensor) -> bool:
    """Whether an input is to get a gradient."""
    return tensor.requires_grad and differentiable(tensor)


def _in_profile(compute: Compute, action: Action, value: Any) -> Any:
    with in_profile("%s stage %d, micro-batch %d", *action):
        return compute(action, value)


class MiniBatch:
    """What the forward and the backward of one mini-batch share.

    ``parameters`` are the stages', None if no backward can follow. ``recomputed`` tells which
    micro-batches keep only their inputs and are recomputed in the backward.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        stages: Stages,
        inputs: Inputs,
        parameters: list[StageParameters] | None,
        recomputed: Sequence[bool],
        timeline: Timeline | None,
    ) -> None:
        self.runner = runner
        self.stages = stages
        self.inputs = inputs
        self.grad = parameters is not None
        self.parameters = parameters or []
        self.recomputed = recomputed
        self.tasks = runner.tasks
        self._timeline = timeline
        # Context of the thread that starts the forward. Read only if recomputations need it: the
        # first read takes as long as two small layers.
        self.context: CallerContext | None = None
        self.forward_state: ForwardState | None = None  # If backwards recompute.
        self.tapes: list[list[Tape | None]] = [[None] * len(inputs) for _ in self.tasks]
        # Versions of the inputs of each (stage, micro-batch) to be recomputed.
        self.versions: dict[tuple[int, int], list[int]] = {}
        self.skips = SkipTable(stages.skips, stages.devices)
        # By (stage, micro-batch): the devices that its inputs were copied from, if on another one
        # than the stage's. Their gradients are copied back there.
        self._source_devices: dict[tuple[int, int], list[torch.device]] = {}
        # The last attribute, so that it is destroyed after the tapes: its end releases the
        # buffers that they received.
        self.transport = Transport(stages.with_streams)

    def execute(self, program: Program, compute: Compute) -> None:
        """Have the runner run ``program``, recorded by the timeline."""
        timeline, tasks = self._timeline, self.tasks
        if timeline is None or not timeline.is_recording:
            self._run(program, compute)
            return
        clocks = {task.device: self.transport.clock(task.device) for task in tasks}
        with timeline.recorded(compute, program, lambda s: clocks[tasks[s].device]) as recorded:
            self._run(program, recorded)

    def _run(self, program: Program, compute: Compute) -> None:
        if is_profiler_enabled():
            compute = partial(_in_profile, compute)
        placed = partial(self._on_device, compute) if self.stages.with_streams else compute
        self.runner.run(program, placed)

    def _on_device(self, compute: Compute, action: Action, value: Any) -> Any:
        """``compute``, with the current device set to that of the action's stage."""
        with self.transport.on(self.tasks[action.stage].device):
            return compute(action, value)

    def phase(self) -> AbstractContextManager[None]:
        """A context for a forward or a backward."""
        return self.transport.phase() if self.stages.with_streams else nullcontext()

    def send(self, value: Activation, stage: int, m: int) -> Activation:
        """Start copying ``value`` to the device of ``stage``, if it is on another one."""
        device = self.tasks[stage].device
        devices = [tensor.device for tensor in value.tensors]
        targets = [device] * len(devices)
        if devices == targets:
            return value
        self._source_devices[stage, m] = devices
        tensors = self.transport.send(value.tensors, targets, Receiver(stage, m))
        return replace(value, tensors=tensors)

    def send_back(self, grads: Grads, stage: int, m: int) -> Grads:
        """Start copying the gradients of the inputs of ``stage`` to the devices that :meth:`send`
        copied these inputs from."""
        devices = self._source_devices.get((stage, m))
        if devices is None:
            return grads
        return self.transport.send(grads, devices, Receiver(stage - 1, m, backward=True))
