"""Tests of products of groups in Triton's interpreter; test_grouped_gemm.py runs this file.

The interpreter computes bfloat16 incorrectly, so the dtypes are float32 and float16.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipekernels import Communicator
from pipekernels.local_ops import grouped_gemm as module
from pipekernels.local_ops.expert_linear import expert_linear
from pipekernels.local_ops.grouped_gemm import grouped_gemm
from pipekernels.tensor_parallel.experts import ParallelExperts
from support.error_bounds import gamma
from support.kernels.experts import Experts
from support.kernels.interpreter import skip_unless_it_works
from support.levels import pairwise
from support.ranks import run_threads


@pytest.fixture(autouse=True)
def _setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_triton", lambda *_: None)
    monkeypatch.setattr(module, "gpu_of", lambda device: SimpleNamespace(capability=(8, 0)))
    torch.manual_seed(0)


one = torch.ones(1, 4, 4)
skip_unless_it_works(lambda: module._product("float32", one[0, :1], one, torch.tensor([1]), None))


@pytest.mark.parametrize(
    *pairwise(
        dtype=[torch.float32, torch.float16],
        rows=[(3, 0, 70, 1, 64), (0, 0, 0), (0, 130), (5,)],
        sizes=[(40, 24), (33, 65), (1, 1)],
        layout=["dense", "transposed", "strided"],
        is_biased=[True, False],
    )
)
def test_values_and_gradients(
    dtype: torch.dtype, rows: tuple[int, ...], sizes: tuple[int, int], layout: str, is_biased: bool
) -> None:
    n, k = sizes
    x = torch.randn(sum(rows), k).to(dtype)
    weight = torch.randn(len(rows), n, k).to(dtype)
    if layout == "transposed":
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "strided":
        x, weight = x.repeat(1, 2)[:, ::2], weight.repeat(1, 2, 1)[:, ::2]
    bias = torch.randn(len(rows), n).to(dtype) if is_biased else None
    dy = torch.randn(sum(rows), n).to(dtype)

    def results(product: Any, count: Any, cast: torch.dtype, magnitudes: bool) -> list[Tensor]:
        leaves = [t.detach().to(cast) for t in (x, weight, bias, dy) if t is not None]
        leaves = [t.abs() if magnitudes else t for t in leaves]
        *inputs, grad = (t.requires_grad_() for t in leaves)
        y = product(*inputs, *([] if is_biased else [None]), count)
        return [y.detach(), *torch.autograd.grad(y, inputs, grad.detach())]

    found = results(grouped_gemm, torch.tensor(rows), dtype, False)
    exact = results(expert_linear, rows, torch.float64, False)
    magnitudes = results(expert_linear, rows, torch.float64, True)
    depth = max(n, k, *rows) + 3
    for value, right, size in zip(found, exact, magnitudes, strict=True):
        bound = gamma(depth, torch.finfo(torch.float32).eps / 2) + torch.finfo(dtype).eps / 2
        assert value.shape == right.shape
        assert ((value.double() - right).abs() <= bound * size + 1e-7).all()


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_layer_of_experts(expert_parallel: bool) -> None:
    full = Experts(has_bias=True, is_transposed=True, dtype=torch.float32)
    x, chosen = torch.randn(9, 12), torch.randint(0, 5, (9, 1)).repeat(1, 2)
    chosen[:, 1] = (chosen[:, 0] + 1) % 5
    weights = torch.rand(9, 2)
    expected = full(x, chosen, weights)

    def body(comm: Communicator) -> None:
        layer = ParallelExperts(full, comm, expert_parallel=expert_parallel, algorithm="triton")
        torch.testing.assert_close(layer(x, chosen, weights), expected)

    run_threads(1, body)  # The interpreter runs one kernel at a time.
