"""Autocast of products."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def as_autocast(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """In the dtype that autocast, if on, has for linear layers."""
    first = tensors[0]
    device = "cpu" if first.is_cpu else first.device.type  # The latter takes longer.
    if first.is_meta or not torch.is_autocast_enabled(device):  # Which raises for "meta".
        return tensors
    dtype = torch.get_autocast_dtype(device)
    casts = [t.is_floating_point() and t.dtype != torch.float64 for t in tensors]
    return [t.to(dtype) if cast else t for t, cast in zip(tensors, casts, strict=True)]


def exactly(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which products have the dtypes of their operands, whatever autocast says."""
    device = tensor.device.type
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()
