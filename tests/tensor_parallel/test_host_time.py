"""What the host does for an eager row-parallel layer on a GPU (a pretended one)."""

from typing import Any

import pytest
import torch
from support.cuda.host_time import FEATURES, is_own, layer_on_gpu, pretended_gpu, python_calls
from torch.nn import functional

from pipekernels import Communicator
from pipekernels.comm.cuda import CudaBackend
from pipekernels.tensor_parallel.functional import row_linear


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
