"""A pipe's stages with the schedules of ``torch.distributed.pipelining``, on a process each."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.function_layer import FunctionLayer
from support.ranks import run_processes
from support.skip_layers import Pop, Stash
from torch import Tensor, nn

from pipekernels import Communicator, Pipe

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


def forked_model() -> nn.Sequential:
    """Its second stage takes a tuple."""
    torch.manual_seed(3)
    fork = FunctionLayer(lambda x: (x, x.sin()))
    join = FunctionLayer(lambda pair: pair[0] * pair[1])
    return nn.Sequential(nn.Linear(6, 6), fork, join, nn.Linear(6, 6)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, target = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, target


def assert_trained(stages: list[Any], losses: list[Tensor], module: nn.Sequential) -> None:
    """After a step, ``stages`` have the gradients of ``module``, and its names of parameters."""
    x, target = batch()
    loss = F.mse_loss(module(x), target)
    loss.backward()
    if any(stage.is_last for stage in stages):
        assert torch.stack(losses).mean().item() == pytest.approx(loss.item(), rel=0, abs=1e-10)
    for stage in stages:
        assert any(True for _ in stage.submod.parameters())
        for name, parameter in stage.submod.named_parameters():
            wanted = module.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-10)


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


def train(comm: Communicator) -> None:
    """Schedules equal the unwrapped module."""
    done = 0
    x, target = batch()
    for schedule, stages, module in schedules(comm):
        losses: list[Tensor] = []
        inputs = [x] if any(stage.is_first for stage in stages) else []
        is_last = any(stage.is_last for stage in stages)
        schedule.step(*inputs, **({"target": target, "losses": losses} if is_last else {}))
        assert_trained(stages, losses, module)
        done += 1
    assert done == 5


def several_arguments(comm: Communicator) -> None:
    """The first stage takes the arguments of the first layer."""
    from torch.distributed import pipelining

    scaled = FunctionLayer(lambda x, factor, *, shift: x * factor + shift)
    pipe = Pipe(nn.Sequential(scaled, *model()), [1, 8], devices=["cpu"] * 2, chunks=CHUNKS)
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


def take_stages(comm: Communicator) -> None:
    """Stages share the layers, and bad arguments are refused."""
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

    def refused(message: str, pipe: Pipe, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=message):
            pipe.to_torch_stage(*args, **kwargs)

    def piped(*layers: nn.Module, balance: Sequence[int], **options: Any) -> Pipe:
        return Pipe(nn.Sequential(*layers), balance, devices=["cpu"] * 2, **options)

    for rank, members in ((comm.rank, 1), (1 - comm.rank, 0)):
        refused(f"2 stages and this rank's group has {members} ranks", pipe, group=pairs[rank])
    for index in (2, -1):
        refused(f"stage_index is {index}; it must be in 0..1", pipe, index)
    tied = model()
    tied[6].weight = tied[0].weight
    refused("'6.weight' is shared by stages 0 and 1", piped(*tied, balance=[4, 4]))
    norm = piped(nn.BatchNorm1d(6), nn.Tanh(), balance=[1, 1], deferred_batch_norm=True)
    refused("stage 0 has deferred batch norm", norm)
    layers = Stash(), Pop(), nn.Tanh()
    piped(*layers, balance=[2, 1]).to_torch_stage()
    message = "stage 1 pops 'skip', which an earlier stage stashes"
    refused(message, piped(*layers, balance=[1, 2]))


@pytest.mark.processes
@pytest.mark.parametrize(
    "body",
    [take_stages, *(pytest.param(f, marks=needs_averages) for f in (train, several_arguments))],
)
def test_on_ranks(body: Callable[[Communicator], None]) -> None:
    run_processes(2, body, limit=LIMIT)


def test_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        Pipe(model(), [8], devices=["cpu"]).to_torch_stage()
