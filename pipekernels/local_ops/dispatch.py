"""When a registered operation may bypass the dispatcher and autograd. For an operation in Python
both take longer than a small copy or product."""

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
