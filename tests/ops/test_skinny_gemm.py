"""Products of a few rows on a CPU."""

import pytest
import torch
from support.reference import gamma
from torch import Tensor
from torch.nn import functional

from pipekernels import _backend
from pipekernels.ops.weights.base import FEW_ROWS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.new_empty((*x.shape[:-1], len(weight)))
    assert _backend.load().skinny_gemm(out, x, weight, bias, torch.get_num_threads())
    return out


def partial_product(x: Tensor, weight: Tensor, slabs: int) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_empty((*x.shape[:-1], len(weight)), dtype=wide)
    threads = torch.get_num_threads()
    assert _backend.load().skinny_gemm_partial(out, x, weight, slabs, threads)
    return out


def assert_close(found: Tensor, exact: Tensor, absolute: Tensor, terms: int) -> None:
    """A sum of ``terms`` products in at least float32, perhaps rounded to its dtype; ``absolute``
    is that of the absolute products. ``exact`` is rounded in float64."""
    unit = torch.finfo(found.dtype).eps / 2
    bound = gamma(terms, min(unit, 2**-24)) + unit + gamma(terms, 2**-53)
    assert found.shape == exact.shape
    subnormal = unit * torch.finfo(found.dtype).smallest_normal
    assert ((found.double() - exact).abs() <= bound * absolute + subnormal).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(70,), (1, 1, 70), (2, 2, 70), (3, 1000), (4, 1)])
def test_the_product_is_linear(shape: tuple[int, ...], biased: bool, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    weight, bias = torch.randn(33, shape[-1]).to(dtype), torch.randn(33).to(dtype)
    y = linear(x, weight, bias if biased else None)
    operands = None, None, bias if biased else None, len(weight)
    assert torch.equal(torch.ops.pipekernels.linear(x, weight, *operands), y)
    transposed = weight.t().contiguous().t()
    z = torch.ops.pipekernels.linear(x, transposed, *operands)
    a, b, c = (t.double() for t in (x, weight, bias))
    exact = functional.linear(a, b, c if biased else None)
    absolute = functional.linear(a.abs(), b.abs(), c.abs())
    for found in (y, z):
        assert_close(found, exact, absolute, shape[-1] + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("slab", [1, 7, 16, 43, 172, 333])
def test_slabs_have_the_same_bits_in_one_call_or_in_several(
    slab: int, rows: int, dtype: torch.dtype
) -> None:
    inner = 8 * slab
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(33, inner).to(dtype)
    absolute = functional.linear(x.abs().double(), weight.abs().double())
    exact = functional.linear(x.double(), weight.double())

    def partial(begin: int, end: int, slabs: int) -> Tensor:
        a, b = (t[:, begin:end].contiguous() for t in (x, weight))
        return partial_product(a, b, slabs)

    def tree(begin: int, end: int, slabs: int, calls: int) -> Tensor:
        if calls == 1:
            return partial(begin, end, slabs)
        middle, rest = (begin + end) // 2, (slabs // 2, calls // 2)
        return tree(begin, middle, *rest) + tree(middle, end, *rest)

    for slabs in (1, 2, 4, 8):
        whole = partial(0, inner, slabs)
        assert_close(whole, exact, absolute, inner)
        for calls in (2, 4, 8):
            if calls <= slabs:
                assert torch.equal(tree(0, inner, slabs, calls), whole), (slabs, calls)
    assert torch.equal(partial(0, inner, 1).to(dtype), linear(x, weight))


def test_layers_know_how_many_rows_are_few() -> None:
    assert _backend.load().FEW_ROWS == FEW_ROWS


def test_rows_do_not_depend_on_threads_or_other_rows(one_thread: None) -> None:
    x, weight = torch.randn(4, 8 * 333), torch.randn(300, 8 * 333)
    alone = partial_product(x[2], weight, 8)
    torch.set_num_threads(3)
    assert torch.equal(alone, partial_product(x, weight, 8)[2])
