"""What a pipe keeps from mini-batch to mini-batch, and the one autograd node that each of them
becomes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from pipekernels.pipeline.pace import Pace
from pipekernels.pipeline.parameters import StageParameters, unique
from pipekernels.pipeline.run import Run
from pipekernels.pipeline.task import Task, differentiable
from pipekernels.pipeline.timeline import Timeline


class Engine:
    """Runs mini-batches through stages.

    Lanes run only where every stage is on the CPU. On CUDA a launch returns at once, so one thread
    keeps every device busy; and a backward that waited for other threads there would block
    autograd's only thread for that device.

    Args:
        partitions: the stages.
        devices: one per stage.
    """

    def __init__(
        self, partitions: Sequence[nn.Sequential], devices: Sequence[torch.device]
    ) -> None:
        self.stages = list(partitions)
        self.devices = list(devices)
        self.tasks = [
            Task([stage], index, device)
            for index, (stage, device) in enumerate(zip(partitions, devices, strict=True))
        ]
        on_cpu = all(device.type == "cpu" for device in devices)
        # On one thread, stages of one device need not be cut apart.
        self.chain = Task(partitions, 0, devices[0]) if on_cpu else None
        # Stages that share a layer would run it, and accumulate into its parameters, in an order
        # left to timing.
        layers = [id(layer) for stage in partitions for layer in stage.modules()]
        self.may_use_lanes = on_cpu and len(layers) == len(set(layers))
        # Forwards that draw random numbers where no lane can see it stay on one thread.
        self.hidden_randomness = False
        self.pace = Pace()
        self.timeline: Timeline | None = None
        # Held by one forward or backward at a time: both put the aliases in place and take what
        # they accumulate.
        self.lock = threading.RLock()
        self._parameters = [StageParameters(stage) for stage in partitions]

    def run(
        self, inputs: Sequence[torch.Tensor], single: bool, *, chunks: int, checkpoint: str
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a mini-batch through all stages.

        Args:
            inputs: tensors ``[batch, ...]``.
            single: whether the first stage takes a lone tensor instead of a tuple.
            chunks: the most micro-batches.
            checkpoint: one of ``checkpoint.MODES``.
        """
        with self.lock:
            self._parameters = [
                StageParameters(stage, previous)
                for stage, previous in zip(self.stages, self._parameters, strict=True)
            ]
            grad = torch.is_grad_enabled()
            wants_grad = tuple(grad and t.requires_grad and differentiable(t) for t in inputs)
            parameters = unique(self._parameters) if grad else []
            run = Run(
                self,
                inputs,
                wants_grad,
                single,
                self._parameters if parameters or any(wants_grad) else None,
                chunks,
                checkpoint,
            )
            if run.grad:
                outputs = _PipeNode.apply(run, len(inputs), *inputs, *parameters)
            else:
                outputs = run.forward()
        return outputs[0] if run.single_output else tuple(outputs)


class _PipeNode(torch.autograd.Function):
    """A whole pipe as one node: inputs and parameters in, outputs out; the backward is driven by
    the schedule."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, num_inputs: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = run.forward()
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for o, wants in zip(outputs, run.output_wants_grad, strict=True) if not wants)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        input_grads, parameter_grads = ctx.run.backward(grads, keep_graph)
        return (None, None, *input_grads, *parameter_grads)
