"""Pipes whose layers are sharded over ranks: every rank runs a pipe of its own, and their collectives
have to meet in the same order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch
from ranks import run_processes
from torch import nn

from pipekernels import Communicator, Pipe, tensor_parallelize
from pipekernels.pipeline.pace import Pace, Way

PLAN = {"[024]": "column", "[135]": "row"}


def pipe_on_rank(comm: Communicator, schedule: str | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).double()
    x = torch.randn(12, 8, dtype=torch.float64)
    expected = plain(x).square().mean()
    expected.backward()

    choose = Pace.choose

    def unlike_the_other_rank(self: Pace, key: Hashable, ways: Sequence[Way]) -> Way:
        choose(self, key, ways)
        return ways[comm.rank]

    Pace.choose = unlike_the_other_rank  # type: ignore[method-assign]
    torch.manual_seed(0)
    sharded = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).double()
    pipe = Pipe(tensor_parallelize(sharded, PLAN, comm), [2, 2, 2], devices=["cpu"] * 3, chunks=6)
    for _ in range(5):
        pipe.zero_grad()
        if schedule is None:
            loss = pipe(x).square().mean()
            loss.backward()
        else:
            loss = pipe.train_step(x, x, lambda y, _: y.square().mean(), schedule=schedule)
        torch.testing.assert_close(loss, expected)
        for i, layer in enumerate(pipe):
            dim = 0 if i % 2 == 0 else 1
            own = plain[i].weight.grad.tensor_split(2, dim)[comm.rank]
            torch.testing.assert_close(layer.weight.grad, own)


@pytest.mark.parametrize("schedule", [None, "1f1b", "zb-h1"])
def test_a_pipe_of_sharded_layers(schedule: str | None) -> None:
    run_processes(2, pipe_on_rank, schedule)
