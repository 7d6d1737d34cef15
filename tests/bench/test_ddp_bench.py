"""The benchmark of DDP compares losses with those of one process before it times."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench import processes
from bench.distributed import ddp

pytestmark = [pytest.mark.full, pytest.mark.project]
CASE = "4 sequences"


@pytest.fixture(autouse=True)
def small_group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ddp, "BLOCKS", 1)
    monkeypatch.setattr(ddp, "WIDTH", 32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_steps_with_the_same_losses_are_timed() -> None:
    step = ddp.stepper(ddp.build(), *ddp.data(CASE))
    ddp.check_losses(step, CASE)
    assert processes.repeated(step, 2)() > 0


def test_other_losses_are_an_error() -> None:
    module = ddp.build()
    for parameter in module.parameters():  # As if no gradients were averaged.
        parameter.register_hook(torch.zeros_like)
    with pytest.raises(AssertionError, match="not close"):
        ddp.check_losses(ddp.stepper(module, *ddp.data(CASE)), CASE)
