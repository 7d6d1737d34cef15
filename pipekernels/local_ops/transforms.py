"""Checks for operations with custom backwards whose derivatives torch would silently leave out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pipekernels._torch_private import in_forward_mode


def deny_tangents(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise a RuntimeError if one of ``tensors``, of the operation ``name``, has a tangent: a
    registered operation drops it. (torch itself refuses all other transforms of a custom
    backward.)"""
    if in_forward_mode() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            f"{name} has a backward, but no forward-mode derivative; use backward() or "
            "torch.autograd.grad()"
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
