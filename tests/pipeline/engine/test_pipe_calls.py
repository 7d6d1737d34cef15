"""What the host does for a task of a pipe, for a transfer between GPUs and for a split."""

import pytest
from support.cuda.pipe_calls import own, splits, tasks_and_transfers

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGETS = {  # Calls of functions of the package.
    "task on a CPU, forward": 8,
    "task on a CPU, backward": 1,
    "task on one GPU, forward": 8,
    "task on one GPU, backward": 1,
    "task on two GPUs, forward": 8,
    "task on two GPUs, backward": 5,
    "transfer of 1, forward": 10,
    "transfer of 1, backward": 10,
    "transfer of 8, forward": 10,
    "transfer of 8, backward": 10,
}


def test_the_host_calls_few_functions() -> None:
    for what, calls in tasks_and_transfers().items():
        assert 0 < own(calls) <= BUDGETS[what], f"{what}: {calls}"
    (calls,) = splits().values()
    assert 0 < sum(calls.values()) <= 24 and not calls["new_empty"], calls
