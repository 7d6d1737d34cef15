"""Tests of the sharded GEMM's kernel in Triton's interpreter; test_sharded_gemm.py runs this file.

It needs a process of its own: TRITON_INTERPRET must be set when kernels are defined. The
interpreter computes bfloat16 incorrectly, so the dtypes are float32, float16, and float8, which it
converts.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipekernels.triton_kernels import launch as launching
from pipekernels.triton_kernels.config import Blocks, Config, Gpu
from pipekernels.triton_kernels.launch import Product, launch
from support.kernels.interpreter import skip_unless_it_works
from support.kernels.operands import LAYOUTS, operands
from support.levels import in_gate, pairwise
from support.reference import gamma

sharded_gemm = importlib.import_module("pipekernels.ops.gemm")

DTYPES = [torch.float32, torch.float16]
GENERATIONS = [80, 90]  # 80 loads by pointers, 90 by tensor descriptors where layouts allow it.


@triton.jit
def _count_to(count, N):
    for _ in range(N):
        tl.store(count, tl.load(count) + 1)


skip_unless_it_works(lambda: _count_to[(1,)](torch.zeros(1), 3))
SMALL = Blocks(16, 32, 16, 4, 3)


def product(m: int, n: int, k: int, layout: str, dtype: torch.dtype, **added: Tensor) -> Product:
    a, b = operands(layout, m, n, k, dtype)
    precision = str(dtype).removeprefix("torch.")
    out_dtype = torch.float32 if dtype == torch.float8_e4m3fn else dtype
    return Product(precision, a, b, torch.full((m, n), float("nan"), dtype=out_dtype), **added)


def check(p: Product, config: Config) -> None:
    """Compare with float64.

    Error model: each element sums k products in float32 (in split_k partial sums), is scaled, gets
    up to two terms added, and is rounded to the result's dtype. 16-bit operands multiply exactly.
    """
    a, b = p.a.double(), p.b.double()
    scale = torch.ones(1, 1, dtype=torch.float64)
    if p.scale_a is not None and p.scale_b is not None:
        scale = p.scale_a.double().reshape(-1, 1) * p.scale_b.double().reshape(1, -1)
    exact, magnitude = a @ b.t() * scale, a.abs() @ b.abs().t() * scale
    for term in (p.bias, p.residual):
        if term is not None:
            exact, magnitude = exact + term.double(), magnitude + term.double().abs()
    terms = a.shape[1] + config.split_k + 4
    unit, single = torch.finfo(p.out.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    bound = gamma(terms, single) * magnitude
    bound += unit * (exact.abs() + bound) + torch.finfo(p.out.dtype).smallest_normal * unit
    excess = (p.out.double() - exact).abs() - bound
    assert (excess <= 0).all(), f"error exceeds its bound by {excess.max():.3e}"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    *pairwise(layout=list(LAYOUTS), generation=GENERATIONS, split_k=[1, 3], dtype=DTYPES)
)
def test_products_with_bias_and_residual(
    layout: str, generation: int, split_k: int, dtype: torch.dtype
) -> None:
    for m, n, k in ((33, 40, 48), (1, 37, 50)):
        added = {"bias": torch.randn(n).to(dtype), "residual": torch.randn(m, n).to(dtype)}
        p = product(m, n, k, layout, dtype, **added)
        config = Config(SMALL, 2, split_k)
        launch(p, config, generation=generation, sms=2)
        check(p, config)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_tile_may_be_written_in_parts(generation: int) -> None:
    p = product(70, 130, 40, "forward", torch.float32, bias=torch.randn(130))
    results = []
    for parts in (1, 2, 4):
        config = Config(Blocks(64, 64, 32, 1, 3, parts=parts))
        launch(p, config, generation=generation, sms=2)
        check(p, config)
        results.append(p.out.clone())
        p.out.fill_(float("nan"))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("generation", "per_row", "promote", "split_k"),
    [(80, False, 2, 1), (80, True, 0, 1), (90, False, 1, 1), (90, True, 2, 1), (90, False, 2, 2)],
)
def test_float8_with_scales(generation: int, per_row: bool, promote: int, split_k: int) -> None:
    m, n = 33, 40
    scales = [torch.rand(size if per_row else 1) + 0.5 for size in (m, n)]
    p = product(m, n, 160, "forward", torch.float8_e4m3fn, scale_a=scales[0], scale_b=scales[1])
    config = Config(Blocks(16, 32, 32, 4, 3, promote=promote), split_k=split_k)
    launch(p, config, generation=generation, sms=2)
    check(p, config)


sizes = st.integers(1, 40)
steps = st.integers(1, 3)


@st.composite
def views(draw: Callable[..., Any], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A strided view; the memory around it and between its elements is NaN."""
    by_columns = draw(st.booleans())
    rows, columns = shape[::-1] if by_columns else shape
    row_step, column_step = draw(steps), draw(st.sampled_from([1, 1, 2]))
    offset, pad = draw(st.integers(0, 9)), draw(st.integers(0, 20))
    whole = torch.full((rows * row_step + 2, columns * column_step + offset + pad), float("nan"))
    whole = whole.to(dtype)
    view = whole[1:-1:row_step, offset : offset + columns * column_step : column_step]
    view.copy_(torch.randn(rows, columns))
    return view.t() if by_columns else view


@pytest.mark.parametrize("examples", in_gate([6], [6, 30]))
def test_any_strides_are_correct_and_no_other_memory_is_used(examples: int) -> None:
    settings(max_examples=examples, deadline=None, derandomize=True)(given(st.data())(strides))()


def strides(data: st.DataObject) -> None:
    m, n, k = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    dtype = data.draw(st.sampled_from(DTYPES))
    a, b, out, residual = (
        data.draw(views(shape, dtype)) for shape in ((m, k), (n, k), (m, n), (m, n))
    )
    base = torch.empty(0, dtype=dtype).set_(out.untyped_storage())
    out.fill_(0)
    written = ~base.isnan()
    p = Product(str(dtype).removeprefix("torch."), a, b, out, residual=residual)
    steps = -(-k // SMALL.k)
    split_k = data.draw(st.integers(1, min(4, steps)))
    config = Config(SMALL, data.draw(st.integers(1, 5)), split_k)
    generation = data.draw(st.sampled_from(GENERATIONS))
    launch(p, config, generation=generation, sms=data.draw(st.integers(1, 9)))
    check(p, config)
    assert torch.equal(~base.isnan(), written)


def test_the_bits_depend_on_neither_grid_nor_groups() -> None:
    p = product(70, 100, 64, "forward", torch.float16)
    results = []
    for sms, group_m in ((1, 1), (3, 2), (50, 8)):
        launch(p, Config(SMALL, group_m), generation=90, sms=sms)
        results.append(p.out.clone())
    assert all(torch.equal(result, results[0]) for result in results)


def test_split_k_resets_its_counters_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.zeros(100, dtype=torch.int32)
    monkeypatch.setattr(launching, "_zeros", lambda device, count: counters[:count])
    for split_k in (2, 4, 3):
        p = product(33, 40, 64, "forward", torch.float32)
        launch(p, Config(SMALL, 2, split_k), generation=90, sms=2)
        check(p, Config(SMALL, 2, split_k))
        assert not counters.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_operation_passes_its_arguments_to_the_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("none", (9, 0), 90, 6)
    monkeypatch.setattr(sharded_gemm, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    added = {"bias": torch.randn(40), "residual": torch.randn(33, 40)}
    if dtype == torch.float8_e4m3fn:
        added |= {"scale_a": torch.rand(33) + 0.5, "scale_b": torch.rand(1) + 0.5}
    p = product(33, 40, 64, "forward", dtype, **added)
    config = Config(Blocks(16, 32, 32, 4, 3))
    sharded_gemm._by_triton(config, p.out, p.a, p.b, *p[4:])
    check(p, config)
