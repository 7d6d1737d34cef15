"""Operands, an error bound and a pretended GPU for tests of the sharded GEMM."""

import functools
import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipekernels.ops import gemm_choice
from pipekernels.triton_kernels.config import generation
from support.kernels.operands import operands
from support.reference import gamma

module = importlib.import_module("pipekernels.ops.gemm")

FLOAT8 = torch.float8_e4m3fn


def on_gpu(test: Any) -> Any:
    """Decorator: run the test with the fixture ``device`` being CUDA only."""
    return pytest.mark.cuda(pytest.mark.parametrize("device", ["cuda"], indirect=True)(test))


def check(y: Tensor, a: Tensor, b: Tensor, *added: Tensor, tf32: bool = False) -> None:
    """Compare ``a @ b.T`` plus the terms in ``added`` with float64.

    Error model: products are accumulated in at least float32 (float64 for float64). Up to three
    roundings to the result's dtype follow: of the product, and of each sum with a term. TF32
    truncates operands to 10 bits. Hopper keeps at least 13 bits in sums of 128 float8 products.
    """
    unit = torch.finfo(y.dtype).eps / 2
    bound = gamma(a.shape[1] + 20, min(unit, 2**-24)) + gamma(3, unit)
    bound += 2.1 * 2**-10 if tf32 else 0.0
    bound += gamma(128, 2**-13) if a.dtype == FLOAT8 else 0.0
    a, b = a.double(), b.double()
    exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
    for term in added:
        exact, magnitude = exact + term.double(), magnitude + term.double().abs()
    excess = (y.double() - exact).abs() - bound * magnitude
    assert y.shape == exact.shape
    assert (excess <= 0).all(), f"error exceeds its bound by {excess.max():.3e}"


class Case(NamedTuple):
    """Operands of a product, and the terms that may be added to it."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor

    @classmethod
    def make(
        cls, dtype: torch.dtype, device: torch.device, m: int, n: int, k: int,
        *, out_dtype: torch.dtype | None = None, layout: str = "forward",
    ) -> "Case":  # fmt: skip
        torch.manual_seed(0)
        make = functools.partial(torch.randn, device=device)
        x, weight = operands(layout, m, n, k, dtype, make)
        added = [torch.randn(size, device=device) for size in ((n,), (m, n))]
        return cls(x, weight, *(term.to(out_dtype or dtype) for term in added))


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch,
    *,
    capability: tuple[int, int] = (9, 0),
    name: str = "NVIDIA H200",
) -> None:
    """Let the choice of an algorithm see a GPU."""
    fake = gemm_choice.Gpu(name, capability, generation(capability), 132)
    for user in (gemm_choice, module):
        monkeypatch.setattr(user, "gpu_of", lambda device: fake)
    monkeypatch.setattr(gemm_choice, "has_triton", lambda: True)
