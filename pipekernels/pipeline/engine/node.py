"""A mini-batch as one autograd node, whose backward runs the schedule's backwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pipekernels._torch_private import keeps_graph, when_backward_ends
from pipekernels.local_ops.transforms import check_differentiated_once
from pipekernels.pipeline.engine.backward import Backward
from pipekernels.pipeline.engine.forward import forward
from pipekernels.pipeline.engine.mini_batch import MiniBatch
from pipekernels.pipeline.engine.outputs import Outputs


class PipeNode(torch.autograd.Function):
    """A whole pipe as one node: inputs and parameters in, outputs out. ``lock`` is held during each
    backward, and ``recycle`` is called after the last one."""

    @staticmethod
    def forward(
        ctx: Any,
        mini_batch: MiniBatch,
        outputs: Outputs,
        lock: threading.RLock,
        recycle: Callable[[MiniBatch], None],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        whole = forward(mini_batch, outputs, tensors)
        ctx.mini_batch, ctx.outputs, ctx.backward = mini_batch, outputs, Backward(mini_batch)
        ctx.lock, ctx.recycle = lock, recycle
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for o, wants in zip(whole, outputs.wants_grad, strict=True) if not wants)
        )
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_differentiated_once("a pipe")
        keep_graph = keeps_graph()
        with ctx.lock:
            inputs, parameters = ctx.backward.run_all(ctx.outputs, grads, keep_graph)
            # Autograd may run what a loss has besides the pipe's output after this node.
            when_backward_ends(partial(_check, ctx.lock, ctx.mini_batch))
            if not keep_graph:
                ctx.recycle(ctx.mini_batch)
        return (None, None, None, None, *inputs, *parameters)


def _check(lock: threading.RLock, mini_batch: MiniBatch) -> None:
    with lock:
        mini_batch.stages.deny_foreign_backwards(mini_batch.parameters)
