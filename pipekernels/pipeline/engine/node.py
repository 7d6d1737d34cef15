"""What a mini-batch is to autograd: one node, whose backward the schedule drives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from pipekernels._torch_private import keeps_graph
from pipekernels.device.restoring import holding, restore_despite_interrupt
from pipekernels.device.streams import has_streams
from pipekernels.local_ops.once import check_differentiated_once
from pipekernels.local_ops.transforms import deny_batched
from pipekernels.pipeline.engine.mini_batch import MiniBatch
from pipekernels.pipeline.engine.outputs import Outputs
from pipekernels.pipeline.stage.task import Grads


class PipeNode(torch.autograd.Function):
    """A whole pipe as one node: inputs and parameters in, outputs out.

    Args of ``apply``:
        mini_batch: what runs.
        outputs: filled by its forward.
        lock: held during each backward.
        recycle: called after the last one.
        *tensors: the inputs, then the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mini_batch: MiniBatch,
        outputs: Outputs,
        lock: threading.RLock,
        recycle: Callable[[MiniBatch], None],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        whole = mini_batch.forward(outputs, tensors)
        ctx.mini_batch, ctx.outputs = mini_batch, outputs
        ctx.lock, ctx.recycle = lock, recycle
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for o, wants in zip(whole, outputs.wants_grad, strict=True) if not wants)
        )
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_differentiated_once("a pipe")
        deny_batched("a pipe", grads)
        return (None, None, None, None, *_backward(ctx, grads, keeps_graph()))


@restore_despite_interrupt
def _backward(ctx: Any, grads: tuple[torch.Tensor | None, ...], keep_graph: bool) -> Grads:
    with holding(ctx.lock):
        inputs, parameters = ctx.mini_batch.backward(ctx.outputs, grads, keep_graph)
        if not keep_graph:
            ctx.recycle(ctx.mini_batch)
    return (*inputs, *parameters)


class Given(torch.autograd.Function):
    """A scalar above tensors, which get ``grads`` as their gradients, those that are None left out.
    The list is emptied: autograd copies a gradient that anybody else refers to."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor | None], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        # On a device that has streams, if any: autograd then has who accumulates wait for the
        # current one.
        devices = [tensor.device for tensor in tensors]
        return torch.zeros((), device=next(filter(has_streams, devices), devices[0]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = tuple([grad for grad in ctx.grads if grad is not None])
        ctx.grads.clear()
        return None, *given
