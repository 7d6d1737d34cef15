"""How row-parallel products are called."""

import torch
from support.ranks import on, run_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipekernels import Communicator, RowParallelLinear


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
