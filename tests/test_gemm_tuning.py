"""Measuring the sharded GEMM against the vendor's library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_cases import Case, check, on_gpu

from pipekernels.kernels import table
from pipekernels.kernels.config import Blocks, Config
from pipekernels.kernels.layout import layout_of
from pipekernels.kernels.table import Shape
from pipekernels.ops import sharded_gemm
from pipekernels.ops.gemm_tuning import by_library
from pipekernels.ops.sharded_gemm import measured

CONFIGS = [Config(Blocks(128, 128, 64, 8, 4)), Config(Blocks(64, 128, 64, 4, 5))]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, for operands on the CPU."""
    pytest.importorskip("triton", minversion="3.6")
    from pipekernels.kernels import tuner

    monkeypatch.setattr(tuner, "DEVICE", "cpu")
    return tuner


@pytest.mark.parametrize(
    ("layout", "sizes", "smaller"),
    [
        ("forward", (64, 32, 16), (48, 32, 16)),
        ("grad_input", (64, 32, 16), (48, 32, 16)),
        ("grad_weight", (64, 32, 16), (64, 32, 12)),
    ],
)
def test_a_class_is_as_fast_as_the_slower_of_its_products(
    layout: str, sizes: tuple[int, ...], smaller: tuple[int, ...], tuner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shape, other = (Shape("bfloat16", layout, *each) for each in (sizes, smaller))
    times = {
        shape: tuner.Times(3.0, [(CONFIGS[0], 2.0), (CONFIGS[1], 2.5)]),
        other: tuner.Times(2.0, [(CONFIGS[0], 1.6)]),
    }
    asked: list[Any] = []

    def measure(shape: Shape, library: Any, launching: float, configs: Any = None) -> Any:
        asked.append((shape, configs))
        return times[shape]

    monkeypatch.setattr(tuner, "measure_product", measure)
    expected = table.Entry(shape, CONFIGS[0], 2.0, 3.0, 1.25)
    assert tuner.measure_class(shape, None, 1e-5) == expected
    assert asked == [(shape, None), (other, CONFIGS[:1])]
    times[other] = tuner.Times(9.0, [(CONFIGS[0], 1.0)])
    assert tuner.measure_class(shape, None, 1e-5) == expected._replace(speedup=1.5)
    for wrong in (other, shape):
        times[wrong] = times[wrong]._replace(configs=[])
        assert tuner.measure_class(shape, None, 1e-5) is None


@pytest.mark.parametrize("layout", table.LAYOUTS)
@pytest.mark.parametrize(("least", "copies"), [(0, 1), (40_000, 5), (1 << 20, 64)])
def test_operands_that_no_cache_holds(layout: str, least: int, copies: int, tuner: Any) -> None:
    products = tuner._products(Shape("bfloat16", layout, 64, 32, 48), least)  # 9 KiB each
    assert len(products) == copies
    for product in products:
        assert (product.a.shape, product.b.shape) == ((64, 48), (32, 48))
        assert layout_of(product.a, product.b) == layout
    assert len({float(p.a.double().sum()) for p in products}) == copies  # Of different contents.


@on_gpu
def test_tuning_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A product that was measured is taken as the table says, and both ways agree."""
    from pipekernels.kernels import tuner

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.for_gpu.cache_clear()
    shapes = [
        Shape("bfloat16", "forward", 16, 1024, 2048),
        Shape("bfloat16", "grad_weight", 1024, 1024, 1024),
    ]
    found = tuner.measure(shapes, by_library, seconds=60)
    assert [entry.shape for entry in found.entries.values()] == shapes
    table.save(found)
    assert measured(device) is not None
    for shape in shapes:
        case = Case.make(torch.bfloat16, device, *shape[2:], layout=shape.layout)
        assert layout_of(case.x, case.weight) == shape.layout
        for algorithm in ("auto", "triton"):
            check(sharded_gemm(case.x, case.weight, algorithm=algorithm), case.x, case.weight)
    table.for_gpu.cache_clear()
