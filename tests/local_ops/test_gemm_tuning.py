"""Measurements of the sharded GEMM, compared with the vendor's library."""

from typing import Any

import pytest
import torch
from support.kernels.gemm_cases import Case, check, on_gpu

from pipekernels.kernels import table
from pipekernels.kernels.config import Blocks, Config
from pipekernels.kernels.layout import layout_of
from pipekernels.kernels.table import Shape
from pipekernels.local_ops import gemm_tuning
from pipekernels.local_ops.gemm_choice import gpu_of, tf32_allowed
from pipekernels.local_ops.gemm_tuning import by_library
from pipekernels.ops import sharded_gemm

CONFIGS = [Config(Blocks(128, 128, 64, 8, 4)), Config(Blocks(64, 128, 64, 4, 5))]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tuner's module, with operands on the CPU."""
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
        shape: {None: 3.0, CONFIGS[1]: 2.5, CONFIGS[0]: 2.0},
        other: {None: 2.0, CONFIGS[0]: 1.6},
    }
    asked: list[Any] = []

    def measure(shape: Shape, library: Any, configs: Any = None) -> Any:
        asked.append((shape, configs))
        return dict(times[shape])

    monkeypatch.setattr(tuner, "measure_product", measure)
    expected = table.Measurement(shape, CONFIGS[0], 2.0, 3.0, 1.25)
    assert tuner.measure_class(shape, None) == expected
    assert asked == [(shape, None), (other, CONFIGS[:1])]
    times[other] = {None: 9.0, CONFIGS[0]: 1.0}
    assert tuner.measure_class(shape, None) == expected._replace(speedup=1.5)
    for wrong in (other, shape):
        times[wrong] = {None: 1.0}
        assert tuner.measure_class(shape, None) is None


def test_a_failing_product_does_not_affect_others(
    tuner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [Shape("bfloat16", "forward", m, 64, 64) for m in (16, 32, 64)]

    def measure(shape: Shape, library: Any) -> table.Measurement:
        if shape.m == 32:
            raise torch.OutOfMemoryError("CUDA out of memory.\nfurther lines")
        return table.Measurement(shape, CONFIGS[0], 2.0, 3.0, 1.5)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(tuner, "launch_seconds", lambda: 1e-5)
    monkeypatch.setattr(tuner, "measure_class", measure)
    lines: list[str] = []
    found = tuner.measure(shapes, None, seconds=60, report=lines.append)
    assert [entry.shape.m for entry in found.entries.values()] == [16, 64]
    assert len(lines) == 3 and lines[1].endswith("is not measured: CUDA out of memory.")


def test_a_failing_configuration_is_not_right(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    product = tuner.random_product(Shape("float32", "forward", 64, 512, 48))
    by_library(product)
    expected = product.out.clone()

    def fail() -> None:
        raise RuntimeError("PassManager::run failed")

    assert tuner._is_right(product, lambda: by_library(product), expected)
    assert not tuner._is_right(product, fail, expected)


@pytest.mark.parametrize("kind", ["float32", "tfloat32"])
def test_the_library_allows_tf32_as_the_kind_says_and_restores_the_setting(
    kind: str, tuner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(gemm_tuning, "gemm_into", lambda *_, **__: seen.append(tf32_allowed()))
    product = tuner.random_product(Shape(kind, "forward", 4, 4, 4))
    before = tf32_allowed()
    by_library(product)
    assert seen == [kind == "tfloat32"] and tf32_allowed() == before


@pytest.mark.parametrize("layout", table.LAYOUTS)
def test_operands_have_the_layout_of_their_shape(layout: str, tuner: Any) -> None:
    product = tuner.random_product(Shape("bfloat16", layout, 64, 32, 48))
    assert (product.a.shape, product.b.shape) == ((64, 48), (32, 48))
    assert layout_of(product.a, product.b) == layout


@on_gpu
@pytest.mark.usefixtures("cache")
def test_tuning_on_a_gpu(device: torch.device) -> None:
    """The saved table can be loaded, and all algorithms compute the measured products correctly."""
    from pipekernels.kernels import tuner

    shapes = [
        Shape("bfloat16", "forward", 16, 1024, 2048),
        Shape("bfloat16", "grad_weight", 1024, 1024, 1024),
    ]
    found = tuner.measure(shapes, by_library, seconds=60)
    assert [entry.shape for entry in found.entries.values()] == shapes
    table.save(found)
    assert table.for_gpu(gpu_of(device).name) is not None
    for shape in shapes:
        case = Case.make(torch.bfloat16, device, *shape[2:], layout=shape.layout)
        assert layout_of(case.x, case.weight) == shape.layout
        for algorithm in ("auto", "triton"):
            check(sharded_gemm(case.x, case.weight, algorithm=algorithm), case.x, case.weight)
