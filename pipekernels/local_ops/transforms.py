"""Checks for operations with custom backwards, which support neither forward-mode differentiation
nor backwards inside vmap."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pipekernels._torch_private import (
    in_forward_mode,
    is_batched,
    is_wrapped,
    tangents_are_enabled,
    tracks_gradient,
    transforms_are_active,
    unwrapped,
)


def deny_tangents(name: str, tensors: Iterable[Tensor]) -> None:
    """Refuse every differentiation of ``tensors`` but a backward, for the operation ``name``.

    Raises:
        RuntimeError: a tensor has a tangent (``torch.autograd.forward_ad``), or a transform of
            ``torch.func`` differentiates it.
    """
    if not in_forward_mode() and (torch.compiler.is_compiling() or not transforms_are_active()):
        return
    if tangents_are_enabled() and any(map(_is_differentiated, tensors)):
        raise RuntimeError(
            f"{name} has a backward, but no forward-mode derivative, and torch.func cannot "
            "differentiate it; use backward() or torch.autograd.grad()"
        )


def deny_batched(name: str, grads: Iterable[Tensor | None]) -> None:
    """Refuse a batch of gradients; call this first in the backward of the operation ``name``.

    Raises:
        RuntimeError: the backward runs inside vmap.
    """
    for grad in grads:
        if grad is not None and is_batched(grad):
            raise RuntimeError(
                f"{name} is gone through backwards for one gradient at a time, not inside vmap; do "
                "without is_grads_batched=True, vectorize=True or vmap"
            )


def _is_differentiated(tensor: Tensor) -> bool:
    while is_wrapped(tensor):
        if tracks_gradient(tensor):
            return True
        tensor = unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None
