"""The forward of one mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch

from pipekernels.device.autocast import cast_cache
from pipekernels.pipeline.engine.mini_batch import MiniBatch
from pipekernels.pipeline.engine.outputs import Outputs, Sink
from pipekernels.pipeline.engine.transport import Receiver
from pipekernels.pipeline.schedule.program import Action
from pipekernels.pipeline.stage.context import CallerContext
from pipekernels.pipeline.stage.error_notes import note_layer
from pipekernels.pipeline.stage.parameters import installed
from pipekernels.pipeline.stage.random_state import preserved
from pipekernels.pipeline.stage.recomputation import (
    ForwardState,
    drop_unchanged_copies,
    snapshot_buffers,
)
from pipekernels.pipeline.stage.sent_memory import SentMemory
from pipekernels.pipeline.stage.task import Activation
from pipekernels.pipeline.values.micro_batch import copy_if_aliased


def forward(
    mini_batch: MiniBatch, outputs: Outputs, given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run every forward of a mini-batch; returns the outputs ``[batch, ...]``. They share no memory
    with ``given``, as autograd would not know of it."""
    aliases = installed(mini_batch.parameters) if mini_batch.grad else nullcontext()
    uncached = cast_cache(False) if mini_batch.grad else nullcontext()
    recomputes = any(mini_batch.recomputed)
    with preserved(mini_batch.stages.devices), aliases, mini_batch.phase(), uncached:
        if recomputes:
            mini_batch.context = CallerContext()
        mini_batch.execute(mini_batch.runner.program.forwards, Forward(mini_batch, outputs).run)
    if recomputes:
        mini_batch.forward_state = ForwardState(mini_batch.stages.modules, mini_batch.parameters)
    whole = outputs.take()
    return whole if len(mini_batch.inputs) > 1 else copy_if_aliased(whole, given)


class Forward:
    """Runs the forwards of a mini-batch, and leaves their tapes there. ``sink`` receives the
    outputs of the last stage."""

    def __init__(self, mini_batch: MiniBatch, sink: Sink) -> None:
        self._mini_batch = mini_batch
        self._sink = sink
        self._recomputes = any(mini_batch.recomputed)
        self._sent = SentMemory()
        self._trainable = [
            mini_batch.grad and any(mini_batch.parameters[index].pairs for index, _ in task.stages)
            for task in mini_batch.tasks
        ]

    def run(self, action: Action, inputs: Activation | None) -> Activation:
        """Run a stage on the previous stage's outputs, None for the first; returns its own."""
        _, stage, m = action
        batch = self._mini_batch
        if inputs is None:
            inputs = batch.send(batch.inputs.take(m), stage, m)
        task, recomputed = batch.tasks[stage], batch.recomputed[m]
        if task.received_skips:
            inputs = inputs.with_skips(batch.skips.take(task.received_skips, m))
        if batch.transport.arrivals:
            batch.transport.receive(Receiver(stage, m))
        if recomputed:
            batch.versions[stage, m] = inputs.versions()
        buffers = snapshot_buffers([s for _, s in task.stages]) if self._recomputes else []
        try:
            outputs, tape = task.forward(
                inputs,
                partial(batch.runner.seeded, m),
                grad=self._trainable[stage] or (batch.grad and any(inputs.wants_grad)),
                drop=recomputed,
            )
        except Exception as error:
            note_layer(error, task.stages, m, "forward")
            raise
        if buffers:
            earlier = [tape.buffers for tape in batch.tapes[stage] if tape is not None]
            drop_unchanged_copies(buffers, batch.stages.observed.changing_buffers, earlier)
            if recomputed and tape is not None:
                tape.buffers = buffers
        batch.tapes[stage][m] = tape
        if stage < len(batch.tasks) - 1 and len(batch.inputs) > 1:
            self._sent.note(f"stage {task.stages[-1][0]}", m, outputs.tensors, inputs.tensors)
        outputs, sent = outputs.without_skips()
        if sent:
            batch.skips.leave(sent, m, batch.transport)
        if stage < len(batch.tasks) - 1:
            return batch.send(outputs, stage + 1, m)
        self._sink.collect(m, outputs)
        return outputs
