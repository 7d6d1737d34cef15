"""Runs mini-batches, and keeps what a pipe carries from one to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pipekernels._torch_private import (
    current_backward,
    keeps_graph,
    when_backward_ends,
)
from pipekernels.ops.dispatch import check_differentiated_once
from pipekernels.pipeline.batchnorm import committed
from pipekernels.pipeline.context import NOTHING
from pipekernels.pipeline.engine.losses import Losses
from pipekernels.pipeline.engine.mini_batch_run import MiniBatchRun
from pipekernels.pipeline.engine.parameters import Layers, Parameters
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.microbatch import Batch, Scatter
from pipekernels.pipeline.schedule import GPIPE, Schedule
from pipekernels.pipeline.timeline import Timeline

# Whether a pipe runs what the thread runs: a layer, a loss, a hook.
_is_in_pipe = ContextVar("pipekernels_in_pipe", default=False)


class Engine:
    """Runs mini-batches through stages, on the calling thread. CUDA launches return at once, so one
    thread keeps all devices busy; stages on the CPU take turns, each with all intra-op threads.

    With stages on CUDA devices, a backward runs on autograd's thread for the output's device. While
    that thread waits for another device, it may start the backward of another mini-batch of this
    pipe before the first one has ended. So mini-batches share nothing that a backward changes: each
    has its own parameter copies, and restores those that it replaced.

    Args:
        partitions: the stages.
        devices: one per stage.
    """

    def __init__(
        self, partitions: Sequence[nn.Sequential], devices: Sequence[torch.device]
    ) -> None:
        self.stages = Stages(partitions, devices)
        # Held during each forward and each backward, which install the parameter copies and take
        # their gradients, but not while a training step waits for autograd's threads, which may
        # be starting a backward: then `_turns` keeps other training steps and forwards out.
        self.lock = threading.RLock()
        self._turns = threading.Lock()
        self._layers = Layers(partitions)
        # Those of mini-batches that have ended, for reuse: making them takes time.
        self._free_parameters: list[Parameters] = []

    def run(self, batch: Batch, checkpoint: str) -> Any:
        """Run a mini-batch through all stages; returns the last one's value. ``checkpoint`` is one
        of ``context.MODES``."""
        # A training step may be waiting for a thread that runs a backward, so a forward on such a
        # thread must not wait for the step.
        turn = self._turns if current_backward() == -1 else NOTHING
        with _in_pipe(), turn, self.lock:
            run = self._start(GPIPE, batch, checkpoint, trains=False)
            with committed(self.stages.modules) if self.stages.has_deferred_batch_norm else NOTHING:
                if run.is_direct:  # Else the pipe is one node in the caller's graph.
                    return run.run_direct(batch.tensors)
                if run.parameters is None:
                    tensors = run.forward(batch.tensors)
                else:
                    tensors = PipeNode.apply(self, run, *batch.tensors, *run.parameters.unique)
        return run.outputs.structure.build(tensors)

    def train(
        self,
        batch: Batch,
        make_losses: Callable[[MiniBatchRun], Losses],
        checkpoint: str,
        schedule: Schedule,
    ) -> Any:
        """Run a mini-batch forward and backward, and accumulate its gradients; returns
        ``Losses.total()``."""
        schedule.lanes(len(self.stages.modules))  # Checks it, also if one task runs all stages.
        with _in_pipe(), self._turns, self.lock, torch.enable_grad():
            run = self._start(schedule, batch, checkpoint, trains=True)
            losses = make_losses(run)
            with committed(self.stages.modules) if self.stages.has_deferred_batch_norm else NOTHING:
                grads = run.train(losses, self._in_autograd)
                total = losses.total()
            assert run.parameters is not None
            targets = [*batch.tensors, *run.parameters.unique]
            self.recycle(run.parameters)
            device = (self.stages.with_streams or self.stages.devices)[0]
            wanted = [t for t, grad in zip(targets, grads, strict=True) if grad is not None]
            # Accumulated by autograd, so that the parameters' hooks run.
            root = GivenGradients.apply(grads, device, *wanted) if wanted else None
        if root is not None:
            torch.autograd.backward(root)
        return total

    def recycle(self, parameters: Parameters | None, *, in_use: bool = False) -> None:
        """Keep the parameter copies of a mini-batch that has ended, for reuse, unless another
        backward may follow. RuntimeError if they have gradients of other backwards."""
        if parameters is None:
            return
        with self.lock:
            parameters.deny_accumulated()
        if not in_use:
            self._free_parameters.append(parameters)

    @contextmanager
    def recorded_by(self, timeline: Timeline) -> Iterator[Timeline]:
        """Record the body with ``timeline`` instead of an enclosing timeline."""
        outer, self.stages.timeline = self.stages.timeline, timeline
        try:
            yield timeline
        finally:
            self.stages.timeline = outer

    def _start(
        self, schedule: Schedule, batch: Batch, checkpoint: str, *, trains: bool
    ) -> MiniBatchRun:
        """Make the next mini-batch."""
        stages = self.stages
        # What is known of layers holds until layers change, not parameters.
        if self._layers.have_changed(with_hooks=True):
            stages.inspect_layers()
            self._layers = Layers(stages.modules)
        enabled = torch.is_grad_enabled()
        wanted = [enabled and tensor.requires_grad for tensor in batch.tensors]
        learns = any(p.requires_grad for p in self._layers.every_parameter)
        grad = enabled and (trains or learns or any(wanted))
        if any(wanted):  # The pipe's node holds the graph of the inputs.
            batch = replace(batch, tensors=[tensor.detach() for tensor in batch.tensors])
        inputs = Scatter(batch, wanted, device=stages.devices[0])
        count = len(inputs.sizes)
        dropped = 0
        if grad and checkpoint != "never":
            dropped = count - 1 if checkpoint == "except_last" else count
        run = MiniBatchRun(stages=stages, schedule=schedule, inputs=inputs, dropped=dropped)
        if grad and (trains or not run.is_direct):
            # Copies that no other mini-batch has.
            while self._free_parameters and run.parameters is None:
                kept = self._free_parameters.pop()
                if kept.layers is self._layers and kept.memory == kept.memory_now():
                    run.parameters = kept
            run.parameters = run.parameters or Parameters(self._layers)
        return run

    @contextmanager
    def _in_autograd(self) -> Iterator[None]:
        """A context in which a training step runs autograd: without autocast, as users call
        backwards, and with the lock, which is held once, free for autograd's threads."""
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            self.lock.release()
            try:
                yield
            finally:
                self.lock.acquire()


@contextmanager
def _in_pipe(*, is_backward: bool = False) -> Iterator[None]:
    """Mark what runs in the body as a pipe's. RuntimeError if it is already, except for a backward,
    which autograd's thread may begin in another."""
    if _is_in_pipe.get() and not is_backward:
        raise RuntimeError(
            "a layer, loss_fn or hook of a pipe calls a pipe, whose parameter copies would be "
            "in its way; give it that pipe's layers, pipe.to_sequential()"
        )
    token = _is_in_pipe.set(True)
    try:
        yield
    finally:
        _is_in_pipe.reset(token)


class PipeNode(torch.autograd.Function):
    """A whole pipe as one node: inputs and parameters in, outputs out."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, run: MiniBatchRun, *given: Any) -> Any:
        whole = run.forward(given)
        ctx.engine, ctx.run = engine, run
        ctx.set_materialize_grads(False)
        wants = run.outputs.wants_grad
        ctx.mark_non_differentiable(*[o for o, want in zip(whole, wants, strict=True) if not want])
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_differentiated_once("a pipe")
        keep_graph = keeps_graph()
        with _in_pipe(is_backward=True), ctx.engine.lock:
            found = ctx.run.backward(grads, keep_graph)
            # Autograd may run what a loss has besides the pipe's output after this node.
            when_backward_ends(partial(ctx.engine.recycle, ctx.run.parameters, in_use=keep_graph))
        return (None, None, *found)


class GivenGradients(torch.autograd.Function):
    """A scalar whose backward gives ``tensors`` the gradients ``grads``, without its Nones. It
    empties the list, because autograd copies gradients that others refer to."""

    @staticmethod
    def forward(
        ctx: Any, grads: list[torch.Tensor | None], device: torch.device, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.grads = grads
        # On a device with streams, if any, so that autograd makes the accumulation wait for the
        # current stream.
        return torch.zeros((), device=device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = tuple([grad for grad in ctx.grads if grad is not None])
        ctx.grads.clear()
        return None, None, *grads
