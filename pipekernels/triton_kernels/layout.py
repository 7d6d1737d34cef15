"""Memory layouts of the operands of ``A B^T``, on which the kernel's choice depends."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def has_rows(tensor: Tensor) -> bool:
    """Whether the rows are dense and all start at multiples of 16 bytes.

    A tensor descriptor needs that, and it lets threads load 16 bytes at a time.
    """
    rows = tensor.shape[0] == 1 or (
        tensor.stride(0) >= tensor.shape[1] and tensor.stride(0) * tensor.itemsize % 16 == 0
    )
    return rows and tensor.stride(1) == 1 and tensor.data_ptr() % 16 == 0


def layout_of(a: Tensor, b: Tensor) -> str | None:
    """Which product of a linear layer ``A B^T`` has the layout of; ``None`` for other layouts.

    ``'forward'``: dense rows of A and B. ``'grad_input'``: dense rows of A, dense columns of B.
    ``'grad_weight'``: dense columns of A and B.
    """
    if has_rows(a) and has_rows(b):
        return "forward"
    if has_rows(b.t()):
        if has_rows(a):
            return "grad_input"
        if has_rows(a.t()):
            return "grad_weight"
    return None


def signature(tensor: Tensor) -> tuple[Any, ...]:
    """What the compiled kernel depends on: Triton specialises on sizes and strides that are 1 or
    multiples of 16."""
    rows, columns = tensor.shape[0], tensor.shape[-1]
    sizes = rows == 1, columns == 1, columns % 16 == 0
    return tensor.device, tensor.dtype, *sizes, tensor.stride(), tensor.data_ptr() % 16 == 0
