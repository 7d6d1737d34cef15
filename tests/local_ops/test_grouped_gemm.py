"""Products of groups; their values are tested in tests/support/kernels/interpreted_groups.py."""

import pytest
import torch
from support.kernels.experts import Experts
from support.kernels.interpreter import run_interpreted

from pipekernels import Communicator
from pipekernels.local_ops import grouped_gemm as module
from pipekernels.local_ops.gemm_choice import Gpu
from pipekernels.local_ops.grouped_gemm import grouped_gemm
from pipekernels.tensor_parallel.experts import ParallelExperts


@pytest.mark.compile
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_the_kernels_in_the_interpreter(level: str) -> None:
    run_interpreted("interpreted_groups.py", level)


@pytest.mark.parametrize(
    ("dtype", "capability", "error"),
    [(torch.float64, (9, 0), TypeError), (torch.bfloat16, (7, 5), RuntimeError)],
)
def test_where_triton_cannot_compute_it(
    dtype: torch.dtype,
    capability: tuple[int, int],
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu("a GPU", capability, 80, 100)
    monkeypatch.setattr(module, "gpu_of", lambda device: gpu)
    x, weight = torch.ones(2, 4, dtype=dtype), torch.ones(1, 4, 4, dtype=dtype)
    with pytest.raises(error, match=r"float64; use|capability 8\.0, but a GPU has 7\.5"):
        grouped_gemm(x, weight, None, torch.tensor([2]))


def test_an_unknown_algorithm_is_refused() -> None:
    (comm,) = Communicator.threads(1)
    with pytest.raises(ValueError, match="one of auto, triton, cublas, got 'best'"):
        ParallelExperts(Experts(), comm, algorithm="best")
