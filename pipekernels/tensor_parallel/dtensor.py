"""Parameters that may be of class ``DTensor``, as those of FSDP2."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def as_full_tensor(value: Tensor) -> Tensor:
    """``value``, gathered if it is a ``DTensor``, as FSDP2's parameters are."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def distributed_like(parameter: Any, value: Tensor) -> Tensor:
    """``value`` as a ``DTensor`` if ``parameter`` is one: the inverse of :func:`as_full_tensor`."""
    if not hasattr(parameter, "full_tensor"):
        return value
    # Costs nothing here: a DTensor exists, so the module has been imported.
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
