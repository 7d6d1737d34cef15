"""Runs mini-batches, and keeps what a pipe carries from one to the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from pipekernels._log import info_once
from pipekernels._torch_private import in_backward, is_profiler_enabled
from pipekernels.pipeline.engine.auto import Signature
from pipekernels.pipeline.engine.inputs import Inputs, wants_grad
from pipekernels.pipeline.engine.losses import Losses
from pipekernels.pipeline.engine.node import GivenGradients, PipeNode
from pipekernels.pipeline.engine.outputs import Outputs
from pipekernels.pipeline.engine.runners import Runners
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.engine.step import Step
from pipekernels.pipeline.schedule.program import GPIPE, Schedule
from pipekernels.pipeline.schedule.timeline import Timeline
from pipekernels.pipeline.stage.batchnorm import committed
from pipekernels.pipeline.stage.checkpoint import checkpointed
from pipekernels.pipeline.stage.parameters import StageParameters, unique
from pipekernels.pipeline.values.micro_batch import Batch

_log = logging.getLogger(__name__)

# Engines whose layers are running: on this thread, or on the caller's if this thread is a lane
# (lanes run in a copy of their caller's context).
_running: ContextVar[tuple[Engine, ...]] = ContextVar("pipekernels_running", default=())


class Engine:
    """Runs mini-batches through stages.

    Lanes run only if every stage is on the CPU. CUDA launches return at once, so one thread keeps
    all devices busy, and a backward that waited for other threads would block autograd's only
    thread for that device.

    With stages on CUDA devices, a backward runs on autograd's thread for the output's device. While
    that thread waits for another device, it may start the backward of another mini-batch of this
    pipe before the first one has ended. Mini-batches on CUDA therefore share nothing that a
    backward changes: each has its own aliases, and restores those that it replaced.

    Args:
        partitions: the stages.
        devices: one per stage.
        execution: one of ``runners.EXECUTIONS``.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        devices: Sequence[torch.device],
        execution: str,
    ) -> None:
        self.stages = Stages(partitions, devices)
        self._runners = Runners(self.stages, execution)
        self._timeline: Timeline | None = None
        # Held during each forward and each backward: both install the aliases and take the
        # gradients that those accumulate.
        self._lock = threading.RLock()
        # Entered while a training step waits for autograd's threads: such a thread may be starting
        # a backward of this pipe, which needs the lock. Other training steps and forwards must not
        # get it, as they would mistake the aliases for parameters: `_turns` keeps them out.
        self._unlocked = _Unlocked(self._lock)
        self._turns = threading.RLock()
        self._parameters = [StageParameters(stage) for stage in partitions]
        # Aliases of mini-batches that have ended, for reuse on CUDA.
        self._spare: list[list[StageParameters]] = []

    def run(self, batch: Batch, checkpoint: str) -> Any:
        """Run a mini-batch through all stages; returns the last one's value. ``checkpoint`` is one
        of ``checkpoint.MODES``."""
        # A training step may be waiting for a thread that runs a backward, so a forward on such a
        # thread must not wait for the step.
        turn = nullcontext() if in_backward() else self._turns
        with self._as_running(), turn, self._lock:
            step = self._start(GPIPE, batch, checkpoint, trains=False)
            outputs = Outputs(step.inputs.sizes, batch.dim)
            with self._committed():
                if step.grad:
                    inputs = (*batch.tensors, *unique(self._parameters))
                    tensors = PipeNode.apply(step, outputs, self._lock, self._recycle, *inputs)
                else:
                    tensors = step.forward(outputs, batch.tensors)
        return outputs.build(tensors)

    def train(
        self,
        batch: Batch,
        make_losses: Callable[[Step], Losses],
        checkpoint: str,
        schedule: Schedule,
    ) -> Any:
        """Run a mini-batch forward and backward, and accumulate its gradients; returns
        ``Losses.total()``."""
        with self._as_running(), self._turns, self._lock, torch.enable_grad():
            step = self._start(schedule, batch, checkpoint, trains=True)
            losses = make_losses(step)
            waiting = self._unlocked if self.stages.with_streams else nullcontext()
            parameters = unique(self._parameters)
            with self._committed():
                inputs, own = step.train(losses, waiting)
                losses.check()
            self._recycle(step)
            # Keep no other reference to a gradient: autograd would then copy it.
            grads = [*inputs, *losses.gradients.added_to(own, parameters)]
            targets = [*batch.tensors, *parameters]
            del inputs, own
            wanted = [t for t, grad in zip(targets, grads, strict=True) if grad is not None]
            # Accumulated by autograd, so that the parameters' hooks run.
            root = GivenGradients.apply(grads, *wanted) if wanted else None
        if root is not None:
            torch.autograd.backward(root)
        return losses.total()

    @contextmanager
    def recorded_by(self, timeline: Timeline) -> Iterator[Timeline]:
        """Record the body with ``timeline`` instead of an enclosing timeline."""
        outer, self._timeline = self._timeline, timeline
        if outer is not None:
            outer.is_recording = False
        timeline.is_recording = True
        try:
            yield timeline
        finally:
            timeline.is_recording = False
            if outer is not None:
                outer.is_recording = True
            self._timeline = outer

    @contextmanager
    def _as_running(self) -> Iterator[None]:
        """Mark this engine as running. Refuse a nested run, which on a lane would wait for the lock
        of the caller, who waits for the lane."""
        around = _running.get()
        if self in around:
            raise RuntimeError(
                "a layer of a pipe calls the pipe that it is in; give the layer, in place of the "
                "pipe, the module that it is to call"
            )
        try:
            _running.set((*around, self))
            yield
        finally:
            _running.set(around)

    def _committed(self) -> AbstractContextManager[None]:
        deferred = self.stages.traits.has_deferred_batch_norm
        return committed(self.stages.modules) if deferred else nullcontext()

    def _recycle(self, step: Step) -> None:
        """Keep the aliases of a mini-batch that has ended, for reuse."""
        if self.stages.with_streams and step.parameters:
            self._spare.append(step.parameters)

    def _start(self, schedule: Schedule, batch: Batch, checkpoint: str, *, trains: bool) -> Step:
        """Make the next mini-batch."""
        stages = self.stages
        known: Sequence[StageParameters | None] = self._parameters
        if stages.with_streams:
            known = self._spare.pop() if self._spare else [None] * len(stages.modules)
        parameters = [
            former if former is not None and former.is_current() else StageParameters(stage, former)
            for stage, former in zip(stages.modules, known, strict=True)
        ]
        if parameters != self._parameters:
            if not all(map(StageParameters.has_same_layers, parameters, self._parameters)):
                stages.traits = stages.inspect_layers()
            self._parameters = parameters
        grad = torch.is_grad_enabled() and (
            any(map(wants_grad, batch.tensors)) or bool(unique(parameters))
        )
        inputs = Inputs(batch, stages.devices[0], grad=grad)
        count = len(inputs)
        if count < batch.chunks:
            message = "an input of %d rows makes %d micro-batches, fewer than chunks=%d"
            info_once(_log, message, inputs.rows, count, batch.chunks)
        recomputed = [grad and checkpointed(checkpoint, m, count) for m in range(count)]
        signature = Signature(
            schedule,
            micro_batches=count,
            size_bits=inputs.elements.bit_length(),
            grad=grad,
            training=stages.traits.training,
            recomputed=sum(recomputed),
            trains=trains,
        )
        if stages.with_streams and not grad:
            self._spare.append(parameters)
        fuses = self._timeline is None and not is_profiler_enabled()
        return Step(
            runner=self._runners.make(signature, fuses=fuses),
            stages=stages,
            inputs=inputs,
            parameters=parameters if grad else None,
            recomputed=recomputed,
            timeline=self._timeline,
        )


class _Unlocked:
    """Releases a lock, held once, while the body runs."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, *error: object) -> None:
        self._lock.acquire()
