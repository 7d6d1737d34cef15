"""Checks for operations with custom backwards, which support no forward-mode differentiation, no
backward inside vmap, and often no second derivative."""

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


def check_differentiated_once(what: str) -> None:
    """Refuse ``create_graph=True``; call this first in a backward whose gradients have no graph.

    PyTorch's ``once_differentiable`` raises only if the gradients of the outputs have a graph. So
    in ``torch.autograd.grad(y.sum(), x, create_graph=True)`` a gradient penalty would silently have
    no effect on the parameters.

    Args:
        what: what is differentiated, for the error.

    Raises:
        RuntimeError: the backward runs with ``create_graph=True``.
    """
    # Grad mode says nothing while a backward is compiled; compiled backwards refuse by themselves.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{what} can be differentiated once only; call this without create_graph=True"
        )


def _is_differentiated(tensor: Tensor) -> bool:
    while is_wrapped(tensor):
        if tracks_gradient(tensor):
            return True
        tensor = unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None
