"""A pipe's stages with the schedules of ``torch.distributed.pipelining``, on a process each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_processes
from torch import Tensor, nn

from pipekernels import Communicator, Pipe
from pipekernels.skip import pop, skippable, stash

CHUNKS = 4
LIMIT = 100.0

needs_averages = pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="torch 2.6's schedules sum gradients instead of averaging them, and one hangs here",
)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers).double()


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Any]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Any]:
        skip = yield pop("skip")
        return x + skip


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.sin()


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


def forked_model() -> nn.Sequential:
    """Its second stage takes a tuple."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), Fork(), Join(), nn.Linear(6, 6)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, target = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, target


def expected(module: nn.Sequential) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the unwrapped module."""
    x, target = batch()
    loss = F.mse_loss(module(x), target)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in module.named_parameters()}


def assert_trained(stages: list[Any], losses: list[Tensor], module: nn.Sequential) -> None:
    """After a step, ``stages`` have the gradients of ``module``, and its names of parameters."""
    loss, grads = expected(module)
    if any(stage.is_last for stage in stages):
        assert torch.stack(losses).mean().item() == pytest.approx(loss, rel=0, abs=1e-10)
    seen = 0
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-10)
            seen += 1
    assert seen > 0


def step(schedule: Any, stages: list[Any]) -> list[Tensor]:
    x, target = batch()
    losses: list[Tensor] = []
    inputs = [x] if any(stage.is_first for stage in stages) else []
    outputs = {"target": target, "losses": losses} if any(s.is_last for s in stages) else {}
    schedule.step(*inputs, **outputs)
    return losses


def schedules(comm: Communicator) -> Iterator[tuple[Any, list[Any], nn.Sequential]]:
    from torch.distributed import pipelining

    for name in ("ScheduleGPipe", "Schedule1F1B"):
        for module, balance in ((model(), [3, 5]), (forked_model(), [2, 2])):
            unwrapped = copy.deepcopy(module)
            stage = Pipe(module, balance, devices=["cpu"] * 2, chunks=CHUNKS).to_torch_stage()
            assert stage.stage_index == comm.rank
            schedule = getattr(pipelining, name)(stage, CHUNKS, loss_fn=F.mse_loss)
            yield schedule, [stage], unwrapped
    module = model()
    unwrapped = copy.deepcopy(module)
    pipe = Pipe(module, [2, 2, 2, 2], devices=["cpu"] * 4, chunks=CHUNKS)
    stages = [pipe.to_torch_stage(index) for index in (comm.rank, comm.rank + 2)]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, CHUNKS, loss_fn=F.mse_loss)
    yield schedule, stages, unwrapped


def train(comm: Communicator) -> int:
    done = 0
    for schedule, stages, module in schedules(comm):
        assert_trained(stages, step(schedule, stages), module)
        done += 1
    return done


@pytest.mark.processes
@needs_averages
def test_schedules_equal_the_unwrapped_module() -> None:
    assert run_processes(2, train, limit=LIMIT) == [5, 5]


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: Tensor, *, shift: Tensor) -> Tensor:
        return x * factor + shift


def several_arguments(comm: Communicator) -> None:
    """The first stage takes the arguments of the first layer."""
    from torch.distributed import pipelining

    pipe = Pipe(nn.Sequential(Scaled(), *model()), [1, 8], devices=["cpu"] * 2, chunks=CHUNKS)
    x, target = batch()
    expected = F.mse_loss(pipe(x, x.sin(), shift=x.cos()), target)
    stage = pipe.to_torch_stage()
    schedule = pipelining.ScheduleGPipe(stage, CHUNKS, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    if stage.is_first:
        schedule.step(x, x.sin(), shift=x.cos())
    else:
        schedule.step(target=target, losses=losses)
        torch.testing.assert_close(torch.stack(losses).mean(), expected)


@pytest.mark.processes
@needs_averages
def test_the_first_stage_takes_the_arguments_of_the_pipe() -> None:
    run_processes(2, several_arguments, limit=LIMIT)


def take_stages(comm: Communicator) -> None:
    pipe = Pipe(model(), [4, 4], devices=["cpu"] * 2).eval()
    pipe[3].train()
    stage = pipe.to_torch_stage(1)
    assert list(stage.submod.state_dict()) == [
        f"{i}.{n}" for i in (4, 6) for n in ("weight", "bias")
    ]
    assert stage.submod[0] is pipe[4]
    assert not stage.submod.training
    assert pipe.to_torch_stage(0).submod[3].training
    moved = Pipe(model(), [4, 4], devices=["cpu"] * 2).to_torch_stage(1, device="meta")
    assert moved.submod[0].weight.is_meta
    pairs = [dist.new_group([0]), dist.new_group([1])]
    assert Pipe(model(), [8], devices=["cpu"]).to_torch_stage(group=pairs[comm.rank]).is_last

    with pytest.raises(ValueError, match="2 stages and the group has 1 ranks"):
        pipe.to_torch_stage(group=pairs[comm.rank])
    with pytest.raises(ValueError, match="not a member of the group"):
        pipe.to_torch_stage(group=pairs[1 - comm.rank])
    for index in (2, -1):
        with pytest.raises(ValueError, match=f"stage_index is {index}; it must be in 0..1"):
            pipe.to_torch_stage(index)
    tied = model()
    tied[6].weight = tied[0].weight
    with pytest.raises(ValueError, match="'6.weight' is shared by stages 0 and 1"):
        Pipe(tied, [4, 4], devices=["cpu"] * 2).to_torch_stage()
    layers = nn.Sequential(nn.BatchNorm1d(6), nn.Tanh())
    norm = Pipe(layers, [1, 1], devices=["cpu"] * 2, deferred_batch_norm=True)
    with pytest.raises(ValueError, match="stage 0 has deferred batch norm"):
        norm.to_torch_stage()
    skipping = nn.Sequential(Down(), Up(), nn.Tanh())
    Pipe(skipping, [2, 1], devices=["cpu"] * 2).to_torch_stage()
    with pytest.raises(ValueError, match="stage 1 pops 'skip', which an earlier stage stashes"):
        Pipe(skipping, [1, 2], devices=["cpu"] * 2).to_torch_stage()


@pytest.mark.processes
def test_stages_share_the_layers_and_bad_arguments_are_refused() -> None:
    run_processes(2, take_stages, limit=LIMIT)


def test_needs_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Pipe(model(), [8], devices=["cpu"]).to_torch_stage()
