"""Products of groups of rows, each with the matrix of its expert."""

from typing import Any

import pytest
import torch
from support.reference import gamma
from torch import Tensor

from pipekernels.ops.expert_linear import expert_linear, few_rows_expert_linear
from pipekernels.ops.weights import DenseWeight


@pytest.mark.parametrize("counts", [(3, 0, 70, 1), (0, 0, 13), (5,)])
@pytest.mark.parametrize("is_biased", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_values_and_gradients(counts: tuple[int, ...], is_biased: bool, transposed: bool) -> None:
    torch.manual_seed(0)
    n, k, rows = 24, 40, torch.tensor(counts)
    x, weight = torch.randn(sum(counts), k), torch.randn(len(counts), n, k)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    operands = [x, weight] + [torch.randn(len(counts), n)] * is_biased
    operands, grad = [t.bfloat16() for t in operands], torch.randn(sum(counts), n).bfloat16()

    def results(product: Any, cast: torch.dtype, magnitudes: bool = False) -> list[Tensor]:
        *leaves, dy = (t.to(cast) for t in (*operands, grad))
        if magnitudes:
            *leaves, dy = (t.abs() for t in (*leaves, dy))
        leaves = [t.detach().requires_grad_() for t in leaves]
        y = product(*leaves, *([] if is_biased else [None]), rows)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def by_experts(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
        return expert_linear(x, DenseWeight(weight), bias, rows)

    found, exact = (results(by_experts, dtype) for dtype in (torch.bfloat16, torch.float64))
    sizes = results(by_experts, torch.float64, magnitudes=True)
    unit = torch.finfo(torch.bfloat16).eps / 2
    # The product and its sum with a bias are rounded; a bias's gradient is summed in bfloat16.
    bounds = [gamma(2, unit)] * 3 + [gamma(max(counts), unit)]
    for value, right, size, bound in zip(found, exact, sizes, bounds[: len(found)], strict=True):
        assert value.shape == right.shape
        limit = (bound + gamma(max(n, k, *counts), 2**-24)) * size
        assert ((value.double() - right).abs() <= limit).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_operator_of_compiled_programs(transposed: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-9, 9, (4, 7, 5)).float()
    if transposed:  # Which the kernel for few rows does not take.
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    x, bias = torch.randn(3, 5), torch.randn(4, 7)
    chosen = torch.tensor([[0, 3], [1, 1], [2, 0]])
    operands = x, weight, None, None, bias, chosen, 7
    full = weight.double()
    expected = torch.einsum("tk,tcnk->tcn", x.double(), full[chosen]) + bias[chosen]
    found = torch.ops.pipekernels.chosen_experts(*operands)
    sizes = torch.einsum("tk,tcnk->tcn", x.abs().double(), full[chosen].abs()) + bias[chosen].abs()
    assert ((found - expected).abs() <= gamma(8, 2**-24) * sizes).all()
    torch.library.opcheck(torch.ops.pipekernels.chosen_experts, operands)
    elsewhere = (t.to("meta") for t in (x, weight, bias, chosen))
    assert few_rows_expert_linear(next(elsewhere), DenseWeight(next(elsewhere)), *elsewhere) is None
