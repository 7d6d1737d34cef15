"""What operations with a backward of their own have no rules for: forward-mode differentiation, and
backwards inside vmap."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def deny_tangents(name: str, tensors: Iterable[Tensor]) -> None:
    """Whether nothing differentiates ``tensors`` other than by a backward; ``name`` says what needs that.

    Raises:
        RuntimeError: one has a tangent (``torch.autograd.forward_ad``), or a transform of
            ``torch.func`` differentiates it.
    """
    if forward_ad._current_level < 0 and (
        torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()
    ):
        return
    if torch._C._is_fwd_grad_enabled() and any(map(_is_differentiated, tensors)):
        raise RuntimeError(
            f"{name} has a backward, but no forward-mode derivative, and torch.func cannot "
            "differentiate it; use backward() or torch.autograd.grad()"
        )


def deny_batched(name: str, grads: Iterable[Tensor | None]) -> None:
    """Refuse several gradients at once, at the beginning of the backward of what ``name`` says.

    Raises:
        RuntimeError: vmap goes through it backwards.
    """
    of_vmap = torch._C._functorch
    for grad in grads:
        # The former vmap is still that of torch.autograd.
        if grad is not None and (
            of_vmap.is_batchedtensor(grad) or of_vmap.is_legacy_batchedtensor(grad)
        ):
            raise RuntimeError(
                f"{name} is gone through backwards for one gradient at a time, not inside vmap; do "
                "without is_grads_batched=True, vectorize=True or vmap"
            )


def _is_differentiated(tensor: Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None
