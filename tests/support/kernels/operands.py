"""Operands of ``A B^T`` in the memory layouts of a linear layer's three products."""

from collections.abc import Callable

import torch
from torch import Tensor

LAYOUTS = ["forward", "grad_input", "grad_weight"]  # Those of kernels.layout.layout_of().
DTYPES = {"tfloat32": torch.float32}  # Every other precision is named as its dtype.


def dtype_of(precision: str) -> torch.dtype:
    found: torch.dtype = DTYPES.get(precision) or getattr(torch, precision)
    return found


def operands(
    layout: str, m: int, n: int, k: int, dtype: torch.dtype,
    make: Callable[[tuple[int, int]], Tensor] = torch.randn,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A [m, k] and B [n, k], whose values ``make`` gives."""

    def operand(rows: int, by_columns: bool) -> Tensor:
        data = make((k, rows) if by_columns else (rows, k)).to(dtype)
        return data.t() if by_columns else data

    return operand(m, layout == "grad_weight"), operand(n, layout.startswith("grad"))
