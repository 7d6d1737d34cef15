"""What a pipe keeps from mini-batch to mini-batch, and the one autograd node that each of them
becomes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from pipekernels.device.graphs import has_graphs
from pipekernels.device.restoring import restore_despite_interrupt, restoring
from pipekernels.device.streams import has_streams
from pipekernels.local_ops.once import check_differentiated_once
from pipekernels.local_ops.transforms import deny_batched
from pipekernels.pipeline.cuda_graphs.stage_graphs import StageGraphs
from pipekernels.pipeline.engine.mini_batch import Run
from pipekernels.pipeline.engine.outputs import Losses, Outputs
from pipekernels.pipeline.engine.pace import Pace
from pipekernels.pipeline.schedule.program import GPIPE, Schedule
from pipekernels.pipeline.schedule.timeline import Timeline
from pipekernels.pipeline.stage.batchnorm import committed, has_deferred_batch_norm
from pipekernels.pipeline.stage.parameters import StageParameters, unique
from pipekernels.pipeline.stage.partition import has_collectives
from pipekernels.pipeline.stage.skip import SkipLayout
from pipekernels.pipeline.stage.task import Task, differentiable
from pipekernels.pipeline.values.micro_batch import Batch, Scatter

# Engines whose layers run, on this thread or on one whose lane this is: lanes have their caller's variables.
_running: ContextVar[tuple[Engine, ...]] = ContextVar("pipekernels_running", default=())


class Engine:
    """Runs mini-batches through stages.

    Lanes run only where every stage is on the CPU. On CUDA a launch returns at once, so one thread
    keeps every device busy; and a backward that waited for other threads there would block
    autograd's only thread for that device.

    With stages on CUDA devices, a backward runs on autograd's thread for the output's device. While
    that waits for another device it may begin the next backward that is due, of another run
    of this pipe, before the first one has ended. So there runs do not share what a backward changes:
    each has aliases of its own, and what one puts in place of the other's it gives back.

    Args:
        partitions: the stages.
        devices: one per stage.
        cuda_graphs: whether to capture the stages on CUDA devices.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        devices: Sequence[torch.device],
        *,
        cuda_graphs: bool = False,
    ) -> None:
        self.stages = list(partitions)
        self.devices = list(devices)
        self.skips = SkipLayout(partitions)
        self.tasks = [
            Task([stage], index, device, self.skips.received[index], self.skips.sent[index])
            for index, (stage, device) in enumerate(zip(partitions, devices, strict=True))
        ]
        self.with_streams = [device for device in dict.fromkeys(devices) if has_streams(device)]
        self.graphs: dict[int, StageGraphs] = {}  # by stage
        if cuda_graphs:
            self.graphs = {
                index: StageGraphs(task)
                for index, task in enumerate(self.tasks)
                if has_graphs(task.device)
            }
        # On one thread, stages of one device need not be cut apart; but a graph has one seed.
        whole = len(set(devices)) == 1 and not self.graphs
        self.chain = Task(partitions, 0, devices[0]) if whole else None
        # Stages whose work the thread that runs them all does itself.
        self.waits = frozenset(i for i, device in enumerate(devices) if not has_streams(device))
        self._look_at_layers()
        # Ids of buffers that layers change in their forwards.
        self.changing_buffers: set[int] = set()
        self._hidden_randomness = self._draws = self._restores = False
        self.pace = Pace()
        self.timeline: Timeline | None = None
        # Held by one forward or backward at a time: both put the aliases in place and take what
        # they accumulate.
        self.lock = threading.RLock()
        # Entered where a training step waits for autograd's threads: one of these may be at the
        # beginning of a backward of this pipe, which gets the lock meanwhile. Other steps and forwards do
        # not: they would take the aliases for parameters.
        self.unlocked = _Unlocked(self.lock)
        self._turns = threading.RLock()
        self._parameters = [StageParameters(stage) for stage in partitions]
        # Of runs that have ended.
        self._spare: list[list[StageParameters]] = []

    def run(self, batch: Batch, checkpoint: str) -> Any:
        """Run a mini-batch through all stages; returns the last one's value.

        Args:
            batch: the mini-batch and how to cut it up.
            checkpoint: one of ``checkpoint.MODES``.
        """
        # A step may wait for the thread of a backward, so that does not wait for the step.
        in_backward = torch._C._current_graph_task_id() != -1
        turn = nullcontext() if in_backward else self._turns
        around = self._around()
        with turn, self.lock:
            outputs, tensors = self._run(around, batch, checkpoint)
        return outputs.build(tensors)

    @restore_despite_interrupt
    def _run(
        self, around: tuple[Engine, ...], batch: Batch, checkpoint: str
    ) -> tuple[Outputs, Sequence[torch.Tensor]]:
        with self._running_in(around):
            run = self._start(GPIPE, batch, checkpoint, may_split=True)
            outputs = Outputs(run.sizes, batch.dim)
            with self._committed():
                if not run.grad:
                    return outputs, run.forward(outputs, batch.tensors)
                parameters = unique(self._parameters)
                return outputs, _PipeNode.apply(run, outputs, *batch.tensors, *parameters)

    def train(
        self,
        batch: Batch,
        make_losses: Callable[[Sequence[int]], Losses],
        *,
        checkpoint: str,
        schedule: Schedule,
    ) -> torch.Tensor:
        """Run a mini-batch forward and backward, and accumulate its gradients.

        Args:
            batch: the mini-batch and how to cut it up.
            make_losses: called with the rows of each micro-batch.
            checkpoint: one of ``checkpoint.MODES``.
            schedule: who runs what when.

        Returns:
            The loss, a scalar without a graph.
        """
        around = self._around()
        with self._turns, self.lock:
            losses, root = self._train(around, batch, make_losses, checkpoint, schedule)
        if root is not None:
            torch.autograd.backward(root)
        return losses.total()

    @restore_despite_interrupt
    def _train(
        self,
        around: tuple[Engine, ...],
        batch: Batch,
        make_losses: Callable[[Sequence[int]], Losses],
        checkpoint: str,
        schedule: Schedule,
    ) -> tuple[Losses, torch.Tensor | None]:
        """The losses, and what a backward of hands all gradients to what they are of."""
        with self._running_in(around), restoring(self.unlocked.lock_again), torch.enable_grad():
            run = self._start(schedule, batch, checkpoint, may_split=False)
            losses = make_losses(run.sizes)
            targets = [*batch.tensors, *unique(self._parameters)]
            with self._committed():
                grads = [grad for part in run.train(losses) for grad in part]
                losses.check()
            wanted = [
                target for target, grad in zip(targets, grads, strict=True) if grad is not None
            ]
            # Through autograd, so that hooks are called.
            return losses, _Given.apply(grads, *wanted) if wanted else None

    def note_hidden_randomness(self) -> None:
        """Keep to one thread from the next mini-batch on: random numbers are drawn where no lane
        could keep them apart."""
        self._hidden_randomness = True

    def note_draws(self) -> None:
        """Layers draw random numbers where lanes keep them apart."""
        self._draws = True

    def note_restores(self) -> None:
        """Layers put the process's generator into an earlier state, as those do that recompute themselves.
        Lanes that draw from it meanwhile would draw other numbers."""
        self._restores = True

    def refuse_hidden_randomness(self) -> None:
        """For random numbers that a backward draws on a lane."""
        self.note_hidden_randomness()
        raise RuntimeError(
            "a layer of the pipe has begun to draw random numbers in its backward, as layers do that "
            "checkpoint themselves; run this mini-batch again, and the pipe will keep to one thread"
        )

    def has_hidden_randomness(self) -> bool:
        """Whether layers draw random numbers where no lane could keep them apart, as far as known."""
        return (
            self._hidden_randomness
            or (self._draws and self._restores)
            or any(layer.dropout > 0 and layer.training for layer in self._recurrent)
        )

    def give_back(self, parameters: list[StageParameters]) -> None:
        """Take over the aliases of a run that has ended."""
        if self.with_streams:
            self._spare.append(parameters)

    def _look_at_layers(self) -> None:
        """Find out how the layers may run, at first and whenever they have changed."""
        layers = [layer for stage in self.stages for layer in stage.modules()]
        _refuse_fsdp(layers)
        for task in (*self.tasks, *filter(None, [self.chain])):
            task.look_at_layers()
        self._has_deferred_batch_norm = any(map(has_deferred_batch_norm, self.stages))
        self.modes = tuple(layer.training for layer in layers)
        # Their dropout is drawn in one call with all else that they do.
        self._recurrent = [layer for layer in layers if isinstance(layer, nn.RNNBase)]
        self.may_use_lanes = (
            all(device.type == "cpu" for device in self.devices)
            and not self.graphs
            # Stages that share a layer would run it, and accumulate into its parameters, in an
            # order left to timing.
            and len(layers) == len(set(layers))
            # Ranks must call collectives in one order, and lanes know none between stages.
            and not any(map(has_collectives, layers))
        )

    def _around(self) -> tuple[Engine, ...]:
        """Those whose layers call this one. Not itself: on a lane they would wait for a lock that the caller
        of the pipe holds, who waits for them."""
        around = _running.get()
        if self in around:
            raise RuntimeError(
                "a layer of a pipe calls the pipe that it is in; give the layer, in place of the pipe, the "
                "module that it is to call"
            )
        return around

    @contextmanager
    def _running_in(self, around: tuple[Engine, ...]) -> Iterator[None]:
        with restoring(partial(_running.set, around)):
            _running.set((*around, self))
            yield

    def _committed(self) -> AbstractContextManager[None]:
        return committed(self.stages) if self._has_deferred_batch_norm else nullcontext()

    def _start(self, schedule: Schedule, batch: Batch, checkpoint: str, *, may_split: bool) -> Run:
        known: Sequence[StageParameters | None] = self._parameters
        if self.with_streams:
            known = self._spare.pop() if self._spare else [None] * len(self.stages)
        parameters = [
            StageParameters(stage, previous)
            for stage, previous in zip(self.stages, known, strict=True)
        ]
        if not all(map(StageParameters.is_made_up_as, parameters, self._parameters)):
            self._look_at_layers()
        self._parameters = parameters
        grad = torch.is_grad_enabled()
        wants_grad = tuple(grad and t.requires_grad and differentiable(t) for t in batch.tensors)
        grad = grad and (any(wants_grad) or bool(unique(self._parameters)))
        tensors = [t.detach() for t in batch.tensors] if grad else batch.tensors
        scatter = Scatter(tensors, batch.chunks, batch.dim)
        if not grad:
            self.give_back(parameters)
        structure = batch.structure.on(self.devices[0])
        return Run(
            *(self, schedule, scatter, wants_grad, structure),
            *(parameters if grad else None, checkpoint, may_split),
        )


def _refuse_fsdp(layers: Sequence[nn.Module]) -> None:
    """FSDP puts the gathered parameters where the aliases are, and keeps gradients to itself until
    a backward, as autograd knows it, has ended."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    sharded = next((type(layer).__name__ for layer in layers if isinstance(layer, kinds)), None)
    if sharded is not None:
        raise ValueError(
            f"FSDP shards {sharded}, a layer of the pipe; shard the pipe as a whole, "
            "fully_shard(pipe), or have torch's schedules run stages of sharded layers "
            "(pipe.to_torch_stage())"
        )


class _Unlocked:
    """Releases a lock, held once, while the body runs."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, *error: object) -> None:
        self.lock_again()

    def lock_again(self) -> None:
        """Whether or not it was released: Ctrl-C may have come in between."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.acquire()


class _Given(torch.autograd.Function):
    """A scalar above tensors, which get ``grads`` as their gradients, those that are None left out. The
    list is emptied: autograd copies a gradient that anybody else refers to."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor | None], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        # On a device that has streams, if any: autograd then has who accumulates wait for the current one.
        devices = [tensor.device for tensor in tensors]
        return torch.zeros((), device=next(filter(has_streams, devices), devices[0]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = tuple([grad for grad in ctx.grads if grad is not None])
        ctx.grads.clear()
        return None, *given


class _PipeNode(torch.autograd.Function):
    """A whole pipe as one node: inputs and parameters in, outputs out; the backward is driven by
    the schedule."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, outputs: Outputs, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        whole = run.forward(outputs, tensors)
        ctx.run, ctx.outputs = run, outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for o, wants in zip(whole, outputs.wants_grad, strict=True) if not wants)
        )
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_differentiated_once("a pipe")
        deny_batched("a pipe", grads)
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        input_grads, parameter_grads = ctx.run.backward(ctx.outputs, grads, keep_graph)
        return (None, None, *input_grads, *parameter_grads)
