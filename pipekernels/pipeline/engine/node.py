"""A mini-batch as one autograd node, whose backward runs the schedule's backwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pipekernels._torch_private import keeps_graph, when_backward_ends
from pipekernels.device.streams import has_streams
from pipekernels.local_ops.transforms import check_differentiated_once
from pipekernels.pipeline.engine.outputs import Outputs
from pipekernels.pipeline.engine.step import Step


class PipeNode(torch.autograd.Function):
    """A whole pipe as one node: inputs and parameters in, outputs out. ``lock`` is held during each
    backward, and ``recycle`` is called after the last one."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        outputs: Outputs,
        lock: threading.RLock,
        recycle: Callable[[Step], None],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        whole = step.forward(outputs, tensors)
        ctx.step, ctx.outputs, ctx.lock, ctx.recycle = step, outputs, lock, recycle
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[o for o, wants in zip(whole, outputs.wants_grad, strict=True) if not wants]
        )
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_differentiated_once("a pipe")
        keep_graph = keeps_graph()
        with ctx.lock:
            inputs, parameters = ctx.step.backward(ctx.outputs, grads, keep_graph)
            # Autograd may run what a loss has besides the pipe's output after this node.
            when_backward_ends(partial(_check, ctx.lock, ctx.step))
            if not keep_graph:
                ctx.recycle(ctx.step)
        return (None, None, None, None, *inputs, *parameters)


def _check(lock: threading.RLock, step: Step) -> None:
    with lock:
        step.stages.deny_foreign_backwards(step.parameters)


class GivenGradients(torch.autograd.Function):
    """A scalar whose backward gives ``tensors`` the gradients ``grads``, without its Nones. It
    empties the list, because autograd copies gradients that others refer to."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor | None], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        # On a device with streams, if any, so that autograd makes the accumulation wait for the
        # current stream.
        devices = [tensor.device for tensor in tensors]
        return torch.zeros((), device=next(filter(has_streams, devices), devices[0]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = tuple([grad for grad in ctx.grads if grad is not None])
        ctx.grads.clear()
        return None, *given
