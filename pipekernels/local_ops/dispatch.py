"""When a registered operation may be called past the dispatcher and autograd, which to an operation in
Python take longer than a small copy or product does."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pipekernels import _backend


def can_skip_dispatcher(tensors: list[Tensor]) -> bool:
    """Whether both would do no more than pass a call with these tensors on."""
    return not is_observed() and not has_derivatives(tensors) and _backend.load().are_plain(tensors)


def has_derivatives(tensors: Iterable[Tensor]) -> bool:
    """Whether gradients may be asked for, or tensors may have tangents (of forward-mode
    differentiation)."""
    return (torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), tensors))) or (
        forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
    )


def is_observed() -> bool:
    """Whether a compiler, a mode or the profiler is to see which operations are called."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._autograd._profiler_enabled()
    )
