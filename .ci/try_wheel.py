"""Smoke test of an installed wheel: a training step through a pipe, a copy and a collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pipekernels import Communicator, Pipe
from pipekernels.ops import concat_micro_batches, split_micro_batches

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
x = torch.randn(6, 4, dtype=torch.float64)
expected = model(x)
output = Pipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=3)(x)
output.sum().backward()
torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
assert model[0].weight.grad is not None
assert torch.equal(concat_micro_batches(split_micro_batches(x, 4)), x)
assert dist.is_backend_available("pipekernels"), "the entry point of the wheel is missing"
(comm,) = Communicator.threads(1)
with comm:
    assert torch.equal(comm.all_reduce(x.clone()), x)
print(f"a pipe, a copy and a collective ran on torch {torch.__version__}")
