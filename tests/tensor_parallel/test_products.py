"""How products of sharded layers are called."""

from functools import partial

import pytest
import torch
from support.ranks import on, run_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipekernels import Communicator, RowParallelLinear
from pipekernels.ops import int8_linear
from pipekernels.ops import linear as products


def test_modes_see_the_operation_and_bits_stay_the_same(device: torch.device) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    full, x = nn.Linear(13, 7).to(device), torch.randn(12, 13).to(device)

    def on_rank(comm: Communicator) -> None:
        layer = RowParallelLinear.from_linear(full, comm)
        with torch.no_grad():
            plain = layer(x)
            with Names():
                seen = layer(x)
        assert torch.equal(plain, seen) and torch.equal(plain, layer(x).detach())

    run_threads(1, on(device, on_rank))
    assert names.count("pipekernels.row_linear.default") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_without_instructions_are_multiplied_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in int8_linear, products:
        monkeypatch.setattr(module, "is_emulated", lambda dtype: dtype.itemsize == 2)
    monkeypatch.setattr(int8_linear, "BLOCK", 600)  # 18 rows of the weight.
    x, weight = torch.randn(2, 5, 33).to(dtype), torch.randn(50, 33).to(dtype)
    bias = torch.randn(50).to(dtype)
    exact = x.double() @ weight.double().t()
    rounded = partial(torch.testing.assert_close, rtol=torch.finfo(dtype).eps, atol=1e-5)
    comm = Communicator.threads(1)[0]
    with torch.no_grad():
        rounded(products.linear(x, weight, bias).double(), exact + bias)
        rounded(products.row_linear(x, weight, comm, False).double(), exact)
    weight.requires_grad_()
    products.linear(x, weight).sum().backward()
    assert weight.grad is not None
