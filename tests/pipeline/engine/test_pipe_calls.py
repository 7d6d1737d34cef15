"""What the host does for a task of a pipe, for a hand-over between GPUs and for a split."""

import pytest
import torch
from support.cuda.pipe_calls import own, splits, tasks_and_hand_overs
from support.cuda.pretended_gpus import GPUS, pretended_gpus
from support.pipes import mlp, outcome

from pipekernels import Pipe

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGETS = {  # Calls of functions of the package.
    "task on a CPU, forward": 15,
    "task on a CPU, backward": 4.5,
    "task on one GPU, forward": 16.5,
    "task on one GPU, backward": 4.5,
    "task on two GPUs, forward": 25,
    "task on two GPUs, backward": 21,
    "hand-over of 1, forward": 48.5,
    "hand-over of 1, backward": 25.5,
    "hand-over of 8, forward": 251.5,
    "hand-over of 8, backward": 67.5,
    "split_micro_batches": 13,
    "a pipe's split": 17,
}


def test_the_host_calls_few_functions() -> None:
    for what, calls in (tasks_and_hand_overs() | splits()).items():
        assert own(calls) <= BUDGETS[what], f"{what}: {calls}"


@pretended_gpus()
def outcome_on_gpus(x: torch.Tensor) -> list[torch.Tensor]:
    pipe = Pipe(mlp(), [1, 1, 1, 1], devices=GPUS * 2, chunks=2, checkpoint="never")
    assert [layer.weight.device for layer in pipe if hasattr(layer, "weight")] == [GPUS[0], *GPUS]
    return outcome(pipe, x)


def test_pretended_gpus_compute() -> None:
    x = torch.randn(4, 4).double()
    torch.testing.assert_close(outcome_on_gpus(x), outcome(mlp(), x), rtol=0, atol=1e-10)
