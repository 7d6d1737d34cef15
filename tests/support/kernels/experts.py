"""A module of experts whose weights are stacked, as transformers' are."""

import torch
from torch import Tensor, nn
from torch.nn import functional

EXPERTS, HIDDEN, INNER = 5, 12, 10


class Experts(nn.Module):
    """As transformers' modules of experts are, in one of their layouts."""

    def __init__(
        self,
        *,
        has_gate: bool = True,
        has_bias: bool = False,
        is_transposed: bool = False,
        is_concatenated: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.has_gate, self.has_bias = has_gate, has_bias
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self.act_fn = nn.SiLU()
        name = "gate_up_proj" if has_gate else "up_proj"
        first = INNER * (2 if has_gate else 1)
        shapes = {name: (EXPERTS, first, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}
        for key, (count, rows, columns) in shapes.items():
            shape = (count, columns, rows) if is_transposed else (count, rows, columns)
            self.register_parameter(key, nn.Parameter(torch.randn(shape, dtype=dtype) / 3))
            if has_bias:
                bias = nn.Parameter(torch.randn(count, rows, dtype=dtype))
                self.register_parameter(f"{key}_bias", bias)

    def _apply_gate(self, both: Tensor) -> Tensor:
        if self.is_concatenated:
            gate, up = both.chunk(2, -1)
        else:
            gate, up = both[..., ::2], both[..., 1::2]
        return self.act_fn(gate) * up

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Token by token."""
        rows = []
        for t, row in enumerate(x):
            total = torch.zeros_like(row)
            for expert, weight in zip(chosen[t], weights[t], strict=True):
                name = "gate_up_proj" if self.has_gate else "up_proj"
                inner = self._product(row, name, expert)
                inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
                total = total + weight * self._product(inner, "down_proj", expert)
            rows.append(total)
        return torch.stack(rows)

    def _product(self, row: Tensor, name: str, expert: Tensor) -> Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return functional.linear(row, weight.t() if self.is_transposed else weight, bias)
