"""Products of a few rows on a CPU."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_threads
from torch import Tensor, nn
from torch.nn import functional

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear
from pipekernels.local_ops.few_rows import few_rows_linear

ERRORS = {  # Relative to the sum of absolute products.
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(70,), (1, 1, 70), (2, 2, 70), (3, 1000), (4, 1)])
def test_the_product_is_linear(shape: tuple[int, ...], biased: bool, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    weight, bias = torch.randn(33, shape[-1]).to(dtype), torch.randn(33).to(dtype)
    y = few_rows_linear(x, weight, bias if biased else None)
    assert y is not None and y.dtype == dtype
    wide = [t.double() for t in (x, weight, bias)]
    exact = functional.linear(*wide[:2], wide[2] if biased else None)
    absolute = functional.linear(*[t.abs() for t in wide])
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= ERRORS[dtype] * absolute).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(4, 300), torch.randn(17, 300)
    together = few_rows_linear(x, weight, None)
    assert together is not None
    for i in range(4):
        alone = few_rows_linear(x[i], weight, None)
        assert alone is not None and torch.equal(alone, together[i])


def test_where_the_kernel_does_not_apply() -> None:
    x, weight, bias = torch.randn(2, 8), torch.randn(3, 8), torch.randn(3)
    trained = nn.Parameter(weight)
    cases: list[tuple[Tensor, Tensor, Tensor | None]] = [
        (torch.randn(5, 8), weight, None),
        (torch.randn(0, 8), weight, None),
        (x, torch.randn(8, 3).t(), None),
        (torch.randn(8, 2).t(), weight, None),
        (x, weight.double(), None),
        (x, weight, bias.double()),
        (x.to(torch.int64), weight.to(torch.int64), None),
        (torch.randn(2, 7), weight, None),
        (x, weight, torch.randn(4)),
        (x, trained, None),
        (x.to("meta"), weight.to("meta"), None),
    ]
    for case in cases:
        assert few_rows_linear(*case) is None, [t.shape for t in case if t is not None]
    with torch.autocast("cpu"):
        assert few_rows_linear(x, weight, bias) is None
    with torch.no_grad():
        y = few_rows_linear(x, trained, bias)
    torch.testing.assert_close(y, functional.linear(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_sharded_layers_use_it_without_gradients(rows: int) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(9, 14), nn.Linear(14, 9)
    x = torch.randn(rows, 1, 9)
    expected = down(up(x)).detach()

    def body(comm: Communicator) -> None:
        pair = nn.Sequential(
            ColumnParallelLinear.from_linear(up, comm), RowParallelLinear.from_linear(down, comm)
        )
        with torch.no_grad():
            torch.testing.assert_close(pair(x), expected)
        torch.testing.assert_close(pair(x), expected)

    run_threads(3, body)
