"""Products by slabs; their values are tested in tests/support/kernels/interpreted_slabs.py."""

from types import SimpleNamespace

import pytest
import torch
from support.kernels.interpreter import run_apart
from torch import Tensor

from pipekernels.ops.weights import k_slices as module
from pipekernels.ops.weights.k_slices import k_slice_gemm


@pytest.mark.compile
@pytest.mark.processes
@pytest.mark.parametrize("level", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_the_kernel_in_the_interpreter(level: str) -> None:
    run_apart("interpreted_slabs.py", level, TRITON_INTERPRET="1")


@pytest.mark.slow  # Imports Triton.
def test_a_kernel_that_is_not_loaded_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.6")
    from pipekernels.triton_kernels import launch

    launched: list[Tensor] = []
    monkeypatch.setattr(launch, "launch_slabs", lambda product, *_, **__: launched.append(product))
    monkeypatch.setattr(module, "_precision_on_gpu", lambda a: "float32")
    monkeypatch.setattr(module, "gpu_of", lambda device: SimpleNamespace(generation=90))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    a, b = torch.ones(2, 16), torch.ones(3, 16)
    with pytest.raises(RuntimeError, match="run the layer once before the capture"):
        k_slice_gemm(a, b, k_slices=2)
    monkeypatch.setattr(launch, "are_slabs_loaded", lambda *_: True)
    out = k_slice_gemm(a, b, k_slices=2, out_dtype=torch.float64)
    assert len(launched) == 1 and out is not None
    assert out.shape == (2, 3) and out.dtype == torch.float64


@pytest.mark.slow  # Imports Triton.
def test_slabs_of_other_sizes_are_another_kernel() -> None:
    """Triton specialises on a slab's size, and descriptors are for multiples of a block only."""
    pytest.importorskip("triton", minversion="3.6")
    from pipekernels.triton_kernels import launch

    rows, out = torch.empty(16, 512), torch.empty(16, 16)
    keys = {
        launch._key(launch.Product("float32", part, part, out), 8, part.shape[1])
        for part in (rows[:, :64], rows[:, :128], rows[:, :256])
    }
    assert len(keys) == 3
