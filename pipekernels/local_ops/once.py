"""Backwards that cannot be differentiated themselves."""

from __future__ import annotations

import torch


def check_differentiated_once(what: str) -> None:
    """Refuse ``create_graph=True``, at the beginning of a backward whose gradients have no graph.

    PyTorch's ``once_differentiable`` lets gradients without a graph pass where those of the outputs
    have none either, as in ``torch.autograd.grad(y.sum(), x, create_graph=True)``: a penalty on the
    gradient then has no effect on the parameters, and nothing says so.

    Args:
        what: is differentiated, for the error.

    Raises:
        RuntimeError: it is.
    """
    # Of a backward that is being compiled the mode says nothing; compiled ones refuse it
    # themselves.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{what} can be differentiated once only; call this without create_graph=True"
        )
