"""A check for backwards that cannot be differentiated again."""

from __future__ import annotations

import torch


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
