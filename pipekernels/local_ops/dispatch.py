"""When a registered operation may be called past the dispatcher and autograd, which to an operation
in Python take longer than a small copy or product does."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels._torch_private import (
    dispatch_mode_count,
    in_forward_mode,
    is_profiler_enabled,
    tangents_are_enabled,
)


def can_skip_dispatcher(tensors: list[Tensor]) -> bool:
    """Whether both would do no more than pass a call with these tensors on."""
    return not is_observed() and not has_derivatives(tensors) and _backend.load().are_plain(tensors)


def has_derivatives(tensors: Iterable[Tensor]) -> bool:
    """Whether gradients may be asked for, or tensors may have tangents (of forward-mode
    differentiation)."""
    return (torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), tensors))) or (
        in_forward_mode() and tangents_are_enabled()
    )


def is_observed() -> bool:
    """Whether a compiler, a mode or the profiler is to see which operations are called."""
    return torch.compiler.is_compiling() or dispatch_mode_count() > 0 or is_profiler_enabled()
