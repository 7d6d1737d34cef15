"""How the operands of ``A B^T`` lie in memory, and what follows for the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def has_rows(tensor: Tensor) -> bool:
    """Whether its rows are dense, and rows and base lie at multiples of 16 bytes.

    Then a tensor descriptor can describe it, and threads can load 16 bytes at a time.
    """
    rows = tensor.shape[0] == 1 or (
        tensor.stride(0) >= tensor.shape[1] and tensor.stride(0) * tensor.itemsize % 16 == 0
    )
    return rows and tensor.stride(1) == 1 and tensor.data_ptr() % 16 == 0


def layout_of(a: Tensor, b: Tensor) -> str | None:
    """Which product of a linear layer ``A B^T`` looks like; ``None`` for an odd one.

    ``'forward'``: both have dense rows. ``'grad_input'``: A has, and B dense columns.
    ``'grad_weight'``: both have dense columns.
    """
    if has_rows(a) and has_rows(b):
        return "forward"
    if has_rows(b.t()):
        if has_rows(a):
            return "grad_input"
        if has_rows(a.t()):
            return "grad_weight"
    return None


def signature(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """Equal where one compiled kernel serves, given the same configuration and kind.

    It has what Triton compiles in (which sizes are 1, which are multiples of 16) or a little more:
    the strides as they are.
    """
    return tuple(None if tensor is None else _signature(tensor) for tensor in tensors)


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    rows, columns = tensor.shape[0], tensor.shape[-1]
    sizes = rows == 1, columns == 1, columns % 16 == 0
    return tensor.device, tensor.dtype, *sizes, tensor.stride(), tensor.data_ptr() % 16 == 0
