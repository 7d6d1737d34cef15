"""A training step: forwards, losses and backwards of one mini-batch in one program."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from pipekernels.device.autocast import cast_cache
from pipekernels.device.streams import has_streams
from pipekernels.pipeline.engine.backward import Backward
from pipekernels.pipeline.engine.forward import Forward
from pipekernels.pipeline.engine.losses import Losses
from pipekernels.pipeline.engine.mini_batch import MiniBatch
from pipekernels.pipeline.schedule.program import Action
from pipekernels.pipeline.stage.context import CallerContext
from pipekernels.pipeline.stage.parameters import installed, unique
from pipekernels.pipeline.stage.random_state import preserved


def train(
    mini_batch: MiniBatch, losses: Losses, waiting: AbstractContextManager[Any] | None
) -> list[torch.Tensor | None]:
    """Run the whole program, with the losses between forwards and backwards; returns the gradients
    of the inputs, then those of the parameters. ``waiting`` is that of :class:`Backward`."""
    with cast_cache(False):
        mini_batch.context = context = CallerContext()
    forward, backward = Forward(mini_batch, losses), Backward(mini_batch, waiting)

    def compute(action: Action, value: Any) -> Any:
        if action.kind == "F":
            with context.applied():
                return forward.run(action, value)
        return backward.run(losses, False, action, value)

    with (
        context.without_autocast(),
        mini_batch.phase(),
        backward.accumulating() as results,
        preserved(mini_batch.stages.devices),
        installed(mini_batch.parameters),
    ):
        mini_batch.execute(mini_batch.runner.program, compute)
    inputs, own = results
    return [*inputs, *losses.gradients.added_to(own, unique(mini_batch.parameters))]


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
