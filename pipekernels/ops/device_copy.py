"""Differentiable copies of tensors to another device, on the streams of their channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from pipekernels._torch_private import below_autograd
from pipekernels.device import streams
from pipekernels.device.channel import channel
from pipekernels.ops.dispatch import define


@overload
def p2p_copy(tensors: Tensor, device: torch.device | str | int) -> Tensor: ...


@overload
def p2p_copy(tensors: Sequence[Tensor], device: torch.device | str | int) -> list[Tensor]: ...


def p2p_copy(
    tensors: Tensor | Sequence[Tensor], device: torch.device | str | int
) -> Tensor | list[Tensor]:
    """Copy ``tensors``, on any devices, of any dtypes and strides, to ``device``, differentiably.

    Synchronisation: a copy waits for the work issued so far on the source's current stream, but not
    for the target's. Work issued later on the target's current stream waits for the copy. Work
    issued later on the source's current stream may overwrite the tensor. The calling thread waits
    for copies to the CPU. A tensor in pinned memory is read until the copy is done, as by
    ``tensor.to(device, non_blocking=True)``: synchronise before you overwrite it.

    Returns:
        The copies, structured like ``tensors``; those from a CUDA device to the CPU are in pinned
        memory. A tensor that is already on ``device`` is returned itself.

    Raises:
        TypeError: an argument is not a strided tensor with values.
        RuntimeError: there is no such device, or a tensor is differentiated in forward mode.
    """
    single = isinstance(tensors, Tensor)
    group = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for i, tensor in enumerate(group):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected tensors, got {type(tensor).__name__} at position {i}")
    target = streams.with_index(device)
    moving = [tensor for tensor in group if tensor.device != target]
    for tensor in moving:
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(
                f"a tensor of layout {tensor.layout} on {tensor.device} cannot be copied to "
                f"{target}; use tensor.to_dense(), or torch.empty_like(tensor, device={target})"
            )
    copies = iter(_op(moving, target, False) if moving else ())
    result = [next(copies) if tensor.device != target else tensor for tensor in group]
    return result[0] if single else result


def _copy(tensors: list[Tensor], device: torch.device, backward: bool) -> list[Tensor]:
    # One transfer for all tensors of a device.
    copies: dict[int, Tensor] = {}
    for source in dict.fromkeys(tensor.device for tensor in tensors):
        group = [i for i, tensor in enumerate(tensors) if tensor.device == source]
        way = channel(source, device, backward=backward)
        sent, pending = way.send([tensors[i] for i in group], snapshot=True)
        pending.wait()
        if backward and source.type == "cpu":
            way.settle()  # A parameter may keep it as its gradient, which others overwrite.
        copies.update(zip(group, sent, strict=True))
    return [copies[i] for i in range(len(tensors))]


def _new_copies(tensors: Sequence[Tensor], device: torch.device, backward: bool) -> list[Tensor]:
    return [torch.empty_like(tensor, device=device) for tensor in tensors]


class _P2PCopy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, device: torch.device, backward: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sources = [tensor.device for tensor in tensors]
        ctx.is_backward = backward
        ctx.set_materialize_grads(False)
        with below_autograd():
            copies = _op(list(tensors), device, backward)
        needed = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(c for c, n in zip(copies, needed, strict=True) if not n))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result: list[Tensor | None] = [None] * len(grads)
        for source in dict.fromkeys(ctx.sources):
            group = [
                i
                for i, device in enumerate(ctx.sources)
                if device == source and grads[i] is not None and ctx.needs_input_grad[2 + i]
            ]
            if group:
                moved = _op([grads[i] for i in group], source, not ctx.is_backward)
                for i, grad in zip(group, moved, strict=True):
                    result[i] = grad
        return None, None, *result


def _apply(tensors: list[Tensor], device: torch.device, backward: bool) -> list[Tensor]:
    return list(_P2PCopy.apply(device, backward, *tensors))


_op: Callable[..., list[Tensor]] = define(
    "p2p_copy(Tensor[] tensors, Device device, bool backward) -> Tensor[]",
    _copy,
    _new_copies,
    apply=_apply,
)
