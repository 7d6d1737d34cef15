"""What the host does for an eager row-parallel layer on a GPU, on a machine without one.

CPU tensors say that they are on an H200. All that Python does before and after CUDA's own calls
then runs as it is: the layer, the choice of the product, symmetric memory, the checks of the
collective. Launches and queries of the driver are left out: the native communicator reduces
nothing, so a sum is only right on one rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.walk import is_own, python_calls
from torch.nn import functional

from pipekernels import Communicator, RowParallelLinear, _backend
from pipekernels.comm import cuda
from pipekernels.comm.cuda import CudaBackend
from pipekernels.ops import gemm_choice
from pipekernels.tensor_parallel.functional import row_linear

DEVICE = torch.device("cuda", 0)
FEATURES = 64
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)


class Native:
    """A communicator of the extension, whose collectives do nothing."""

    def __init__(self, core: Any, *_: Any) -> None:
        self._allocate = core.allocate
        self.broken_links, self.has_slow_links = "", False

    def allocate(self, sizes: Any, dtype: int, stream: int) -> Any:
        return self._allocate(sizes, dtype)

    def all_reduce(self, *_: Any) -> None:
        pass

    def check(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self, abort: bool) -> None:
        pass


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """A context in which all tensors say that they are on :data:`DEVICE`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
        patch.setattr(torch.Tensor, "device", property(lambda _: DEVICE))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
        patch.setattr(_backend, "require_cuda", lambda device: None)
        patch.setattr(_backend.load(), "CudaCommunicator", Native, raising=False)
        patch.setattr(cuda, "current_raw_stream", lambda index: 0)
        gemm_choice._gpu.cache_clear()
        try:
            yield
        finally:
            gemm_choice._gpu.cache_clear()


def layer_on_gpu(comm: Communicator) -> RowParallelLinear:
    """A layer for :func:`pretended_gpu`; of several ranks, all but this one are pretended too."""
    # The native call returns False for tensors on a GPU.
    comm._all_reduce_tensor = lambda *_: False
    return RowParallelLinear(FEATURES * comm.world_size, FEATURES, comm=comm, dtype=torch.bfloat16)


@pytest.mark.parametrize("trains", [False, True])
def test_a_row_goes_through_few_functions(trains: bool) -> None:
    """Of ours, each of which takes a share of a small product's time; and gives the same bits."""
    layer = layer_on_gpu(Communicator.threads(1)[0])
    x = torch.randn(1, FEATURES, dtype=torch.bfloat16, requires_grad=trains)
    with torch.set_grad_enabled(trains):
        expected = functional.linear(x, layer.weight) + layer.bias
        with pretended_gpu():
            y = layer(x)
            names = python_calls(lambda: layer(x))
        assert torch.equal(y, expected) and y.requires_grad is trains
        own = [name for name in names if is_own(name)]
        assert len(own) <= 32, own


def test_a_result_is_reduced_once_in_place_and_dtypes_are_still_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        CudaBackend, "all_reduce", lambda self, out, *rest: seen.append((out.data_ptr(), *rest))
    )
    comm = Communicator.threads(1)[0]
    layer = layer_on_gpu(comm)
    with torch.no_grad(), pretended_gpu():
        y = layer(torch.randn(3, 5, FEATURES, dtype=torch.bfloat16))
        assert seen == [(y.data_ptr(), "sum", "auto")] and y.shape == (3, 5, FEATURES)
        complex_row = torch.randn(1, FEATURES, dtype=torch.complex64)
        with pytest.raises(TypeError, match="cannot reduce torch.complex64"):
            row_linear(complex_row, complex_row, comm)
        assert len(seen) == 1


def test_where_symmetric_memory_is_full_an_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPEKERNELS_SYMMETRIC_BYTES", "4096")
    comm = Communicator.threads(1)[0]
    with pretended_gpu():
        kept = comm.empty(512, dtype=torch.bfloat16, device=DEVICE)
        monkeypatch.setattr(Native, "allocate", lambda self, sizes, dtype, stream: None)
        with pytest.raises(RuntimeError) as raised:
            comm.empty(3, 1024, dtype=torch.bfloat16, device=DEVICE)
    assert kept.shape == (512,)
    assert str(raised.value) == (
        "no room for 6144 bytes of symmetric memory on cuda:0; drop symmetric tensors that are no "
        "longer needed, free device memory, or set PIPEKERNELS_SYMMETRIC_BYTES to more than 4096"
    )
