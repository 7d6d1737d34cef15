"""torch's own schedules of pipelines, and ``execute_pipeline``, on the backend's messages."""

import copy
from typing import Any

import pytest
import torch
from support.ranks import in_group
from support.spmd_cases import WIDTH, assert_same_grads, exactly, mlp, randn, run, stages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

pytestmark = pytest.mark.processes

pytest.importorskip("pipekernels.distributed", exc_type=ImportError)

MICROBATCHES = 4
# By name of the schedule, the stages of each rank.
PLACES = {
    "1F1B": [[0], [1]],
    "Interleaved1F1B": [[0, 2], [1, 3]],
    "ZBVZeroBubble": [[0, 3], [1, 2]],
}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("name", PLACES)
@in_group(2)
def test_schedules_equal_the_model(rank: int, name: str) -> None:
    places = PLACES[name]
    count = sum(map(len, places))
    modules = stages(count)
    reference = nn.Sequential(*copy.deepcopy(modules))
    device = torch.device("cpu")
    mine: list[Any] = [PipelineStage(modules[i], i, count, device) for i in places[rank]]
    if name == "1F1B":
        schedule: Any = Schedule1F1B(mine[0], MICROBATCHES, loss_fn=loss_of)
    else:
        of = {"Interleaved1F1B": ScheduleInterleaved1F1B, "ZBVZeroBubble": ScheduleZBVZeroBubble}
        schedule = of[name](mine, MICROBATCHES, loss_fn=loss_of)
    x, target = randn(8, WIDTH), randn(8, WIDTH, seed=2)
    for _ in range(2):
        for i in places[rank]:
            modules[i].zero_grad()
        losses: list[Tensor] = []
        is_last = count - 1 in places[rank]
        given = (x,) if 0 in places[rank] else ()
        schedule.step(*given, **({"target": target, "losses": losses} if is_last else {}))
        reference.zero_grad()
        expected = [
            loss_of(reference(part), wanted)
            for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        ]
        (sum(expected) / MICROBATCHES).backward()
        if is_last:
            torch.testing.assert_close(losses, expected, **exactly)
        for i in places[rank]:
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
