"""How products of sharded layers are called."""

import pytest
import torch
from support.reference import gamma
from torch import Tensor

from pipekernels import Communicator
from pipekernels.ops.weights import DenseWeight, base, dense
from pipekernels.tensor_parallel.functional import column_linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_without_instructions_are_multiplied_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in base, dense:
        monkeypatch.setattr(module, "is_emulated", lambda dtype: dtype.itemsize == 2)
    monkeypatch.setattr(base, "BLOCK", 600)  # 18 rows of the weight.
    x, weight = torch.randn(2, 5, 33).to(dtype), torch.randn(50, 33).to(dtype)
    bias = torch.randn(50).to(dtype)
    exact, magnitude = (
        x.double() @ weight.double().t(),
        x.double().abs() @ weight.double().abs().t(),
    )
    comm = Communicator.threads(1)[0]

    def check(found: Tensor, exact: Tensor, magnitude: Tensor) -> None:
        """Sums of 33 products and a bias in float32, and one rounding."""
        bound = gamma(34, 2**-24) * magnitude
        bound += (exact.abs() + bound) * torch.finfo(dtype).eps / 2
        assert ((found.double() - exact).abs() <= bound).all()

    with torch.no_grad():
        product = DenseWeight(weight)
        check(product.linear(x, bias), exact + bias, magnitude + bias.abs())
        check(product.row_linear(x, comm, False), exact, magnitude)
    weight.requires_grad_()
    column_linear(x, DenseWeight(weight), None, comm).sum().backward()
    assert weight.grad is not None
