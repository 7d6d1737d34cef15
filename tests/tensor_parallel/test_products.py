"""How row-parallel products are called: by which algorithm, through how many functions."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on, run_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pipekernels
from pipekernels import Communicator, RowParallelLinear
from pipekernels.tensor_parallel.functional import row_linear


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("trains", [False, True])
def test_an_input_meets_few_functions_before_its_product(trains: bool, world_size: int) -> None:
    """Of ours, from the forward on; each takes a share of a small product's time."""
    package = str(Path(pipekernels.__file__).parent)
    full, x = nn.Linear(12, 7), torch.randn(1, 12)
    product = "mm" if trains else "skinny_gemm"  # Its native call.

    def on_rank(comm: Communicator) -> list[str]:
        layer = RowParallelLinear.from_linear(full, comm)
        own = x.chunk(world_size, 1)[comm.rank].contiguous()
        called: list[str] = []
        products: list[int] = []

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(package):
                called.append(frame.f_code.co_name)
            elif event == "c_call" and argument.__name__ == product:
                products.append(len(called))

        with torch.set_grad_enabled(trains):
            layer(own)
            sys.setprofile(note)
            try:
                layer.forward(own)
            finally:
                sys.setprofile(None)
        assert len(products) == 1
        return called[: products[0]]

    for called in run_threads(world_size, on_rank):
        assert called[0] == "forward" and len(called) <= 8, called


def test_unknown_and_unavailable_algorithms() -> None:
    (comm,) = Communicator.threads(1)
    x, meta = torch.ones(4, 4), torch.ones(4, 4, device="meta")
    with pytest.raises(ValueError, match="auto, triton, cublas, got 'gemm'"):
        row_linear(x, x, comm, algorithm="gemm")
    for tensor in (x, meta):
        message = f"'triton' needs CUDA tensors, got {tensor.device}; use 'auto'"
        with pytest.raises(ValueError, match=message):
            row_linear(tensor, tensor, comm, algorithm="triton")


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
