"""Memory layouts of operands."""

import torch

from pipekernels.kernels.layout import layout_of


def test_layouts() -> None:
    rows = torch.empty(32, 64, dtype=torch.bfloat16)
    columns = torch.empty(64, 32, dtype=torch.bfloat16).t()
    assert layout_of(rows, rows) == "forward"
    assert layout_of(rows, columns) == "grad_input"
    assert layout_of(columns, columns) == "grad_weight"
    assert layout_of(columns, rows) is None
    assert layout_of(rows[:, 1:], rows) is None  # Not aligned to 16 bytes.
    assert layout_of(rows[:, :60], rows[:, :60]) == "forward"
    assert layout_of(torch.empty(32, 60, dtype=torch.bfloat16), rows) is None
    assert layout_of(torch.empty(1, 60, dtype=torch.bfloat16), rows) == "forward"  # One row.
    assert layout_of(rows[:1].expand(32, 64), rows) is None
