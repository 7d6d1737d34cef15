"""Measuring the sharded GEMM against the vendor's library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gemm_cases import Case, check, on_gpu

from pipekernels.kernels import table
from pipekernels.kernels.layout import layout_of
from pipekernels.kernels.table import Shape
from pipekernels.ops import sharded_gemm
from pipekernels.ops.gemm_tuning import by_library
from pipekernels.ops.sharded_gemm import measured


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
