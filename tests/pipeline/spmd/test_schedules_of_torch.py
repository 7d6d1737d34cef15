"""A schedule of torch's own pipelines, and ``execute_pipeline``, on the backend's messages."""

import copy

import pytest
import torch
from support.ranks import in_group
from support.spmd_cases import WIDTH, assert_same_grads, exactly, mlp, randn, run, stages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

pytestmark = pytest.mark.processes

pytest.importorskip("pipekernels.distributed", exc_type=ImportError)

MICROBATCHES = 4
PLACES = [[0, 2], [1, 3]]  # The stages of each rank.


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@in_group(2)
def test_interleaved_stages_equal_the_model(rank: int) -> None:
    modules = stages(4)
    reference = nn.Sequential(*copy.deepcopy(modules))
    mine = [PipelineStage(modules[i], i, 4, torch.device("cpu")) for i in PLACES[rank]]
    schedule = ScheduleInterleaved1F1B(mine, MICROBATCHES, loss_fn=loss_of)
    x, target = randn(8, WIDTH), randn(8, WIDTH, seed=2)
    expected = [
        loss_of(reference(part), wanted)
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    ]
    (sum(expected) / MICROBATCHES).backward()
    for _ in range(2):
        for i in PLACES[rank]:
            modules[i].zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
            torch.testing.assert_close(losses, expected, **exactly)
        for i in PLACES[rank]:
            assert_same_grads(modules[i], reference[i])


@in_group(3)
def test_execute_pipeline(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pipe",))
    modules = stages(3, lambda _: mlp())
    reference = nn.Sequential(*copy.deepcopy(modules))
    x = randn(12, WIDTH)
    output = run(modules[rank], x, mesh, 6)
    expected = reference(x)
    torch.testing.assert_close(output, expected if rank == 2 else 0 * expected, **exactly)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_same_grads(modules[rank], reference[rank])
