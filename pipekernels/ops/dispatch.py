"""How operations are registered with torch, and when a call may bypass the dispatcher and autograd:
for an operation in Python both take longer than a small copy or product. And checks of derivatives
that torch would silently leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pipekernels import _backend
from pipekernels._torch_private import (
    below_autograd,
    dispatch_mode_count,
    in_forward_mode,
    is_profiler_enabled,
    tangents_are_enabled,
)

_library = torch.library.Library("pipekernels", "FRAGMENT")


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
    apply: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register an operation.

    Args:
        schema: ``name(arguments) -> results``.
        kernel: for all devices, below autograd.
        fake: makes the results without values.
        backward, setup: as for ``torch.library.register_autograd``; or
        apply: the operation as a node of autograd. It is called with the operation's arguments, of
            which the first are tensors, if a derivative may be asked for.
    """
    name = schema.partition("(")[0]
    qualified = f"pipekernels::{name}"
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    operation: Callable[..., Any] = getattr(torch.ops.pipekernels, name).default
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)
    if apply is not None:

        def with_autograd(tensors: Sequence[Tensor], *options: Any) -> Any:
            if has_derivatives(tensors):
                return apply(tensors, *options)
            with below_autograd():
                return operation(tensors, *options)

        _library.impl(name, with_autograd, "Autograd")
    return operation


def can_skip_dispatcher(tensors: list[Tensor]) -> bool:
    """Whether the dispatcher and autograd would only forward a call with these tensors."""
    return not is_observed() and not has_derivatives(tensors) and _backend.load().are_plain(tensors)


def has_derivatives(tensors: Iterable[Tensor]) -> bool:
    """Whether a backward or forward-mode differentiation may involve ``tensors``."""
    return (torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), tensors))) or (
        in_forward_mode() and tangents_are_enabled()
    )


def is_observed() -> bool:
    """Whether a compiler, a dispatch mode or the profiler records which operations are called."""
    return torch.compiler.is_compiling() or dispatch_mode_count() > 0 or is_profiler_enabled()


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
