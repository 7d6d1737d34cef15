"""Clipping by the norm of the full model's gradients."""

import copy
from math import inf
from typing import Any

import pytest
import torch
from support.checks import assert_full_gradients
from support.ranks import on, run_threads
from torch import nn

from pipekernels import Communicator
from pipekernels.tensor_parallel import clip_grad_norm_, tensor_parallelize

PLAN = {"0": "column", "1": "row", "3": "column_gather_output"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Linear(7, 4), nn.LayerNorm(4), nn.Linear(4, 6)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_the_norm_is_that_of_the_full_model(
    world_size: int, norm_type: float, max_norm: float, device: torch.device
) -> None:
    plain = model().to(device)
    copies = [copy.deepcopy(plain) for _ in range(world_size)]
    x = torch.randn(8, 5, dtype=torch.float64).to(device)
    plain(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)

    def on_rank(comm: Communicator) -> float:
        sharded = tensor_parallelize(copies[comm.rank], PLAN, comm)
        sharded(x).square().sum().backward()
        norm = clip_grad_norm_(sharded, max_norm, norm_type)
        torch.testing.assert_close(norm, expected)
        assert_full_gradients(sharded, plain)
        return norm.item()

    assert len(set(run_threads(world_size, on(device, on_rank)))) == 1


def test_parameters_are_not_enough() -> None:
    with pytest.raises(TypeError, match="got generator; pass the model in place of its parameters"):
        clip_grad_norm_(model().parameters(), 1.0)  # type: ignore[arg-type]


def test_all_ranks_learn_that_the_norm_of_one_is_not_finite() -> None:
    copies: list[Any] = [model(), model()]  # Threads share torch's generator.

    def on_rank(comm: Communicator) -> None:
        sharded = tensor_parallelize(copies[comm.rank], PLAN, comm)
        assert clip_grad_norm_(sharded, 1.0) == 0  # There are no gradients.
        if comm.rank == 1:
            sharded[0].weight.grad = torch.full_like(sharded[0].weight, inf)
        sharded[2].weight.grad = torch.ones(4, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(sharded, 1.0, error_if_nonfinite=True)
        assert sharded[2].weight.grad.tolist() == [1.0] * 4
        assert clip_grad_norm_(sharded, 1.0) == inf

    run_threads(2, on_rank)
