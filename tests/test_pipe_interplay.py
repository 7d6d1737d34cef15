"""A pipe together with what its users wrap around it or put into it."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from ranks import run_processes
from torch import nn

from pipekernels import Communicator, Pipe
from pipekernels.pipeline.pace import Way


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)).double()


def assert_same_gradients(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_compiled_layers(checkpoint: str, way: Way) -> None:
    module = mlp()
    reference = copy.deepcopy(module)
    compiled = nn.Sequential(*(torch.compile(layer, backend="aot_eager") for layer in module))
    pipe = Pipe(compiled, [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    x = torch.randn(6, 4, dtype=torch.float64)
    pipe(x).square().sum().backward()
    reference(x).square().sum().backward()
    assert_same_gradients(module, reference)


def train_with_ddp(comm: Communicator) -> None:
    reference = mlp()
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference(x).square().mean().backward()
    pipe = Pipe(mlp(), [2, 2], devices=["cpu"] * 2, chunks=3)
    ddp = nn.parallel.DistributedDataParallel(pipe)
    for _ in range(2):  # DDP rebuilds its buckets after the first.
        pipe.zero_grad()
        ddp(x.chunk(comm.world_size)[comm.rank]).square().mean().backward()
        assert_same_gradients(pipe, reference)


def test_ddp_averages_over_replicas() -> None:
    run_processes(2, train_with_ddp)


def test_grad_scaler(place: torch.device) -> None:
    module = mlp().float()
    reference = copy.deepcopy(module)
    pipe = Pipe(module, [2, 2], devices=[place] * 2, chunks=2)
    x = torch.randn(6, 4)
    for model in (pipe, reference):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler(place.type, init_scale=2.0**10)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_thousand_pipes_leave_nothing_behind(way: Way) -> None:
    alive = weakref.WeakSet()
    threads = 0
    for i in range(1000):
        pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2,
                    chunks=2, checkpoint="never")  # fmt: skip
        alive.update([pipe, pipe._engine])
        pipe(torch.ones(2, 3)).sum().backward()
        if i == 10:
            threads = threading.active_count()
        del pipe
    gc.collect()
    assert not alive
    assert threading.active_count() <= threads
