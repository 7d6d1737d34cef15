"""What torch.profiler shows of a pipe."""

from __future__ import annotations

import collections

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipekernels import Pipe


def piped(checkpoint: str = "never") -> Pipe:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return Pipe(layers, [2, 2], devices=["cpu", "cpu"], chunks=3, checkpoint=checkpoint)


def names(found: profile) -> collections.Counter[str]:
    ranges = [event.name for event in found.events() if event.name.startswith("pipekernels::")]
    return collections.Counter(ranges)


def test_every_action_has_a_range() -> None:
    pipe, x = piped(), torch.randn(6, 4)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        pipe(x).sum().backward()
    assert names(found) == {
        f"pipekernels::{kind} stage {stage}, micro-batch {m}": 1
        for kind in "FB"
        for stage in range(2)
        for m in range(3)
    }


def test_recomputations_have_ranges_of_their_own() -> None:
    pipe, x = piped("except_last"), torch.randn(6, 4)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        pipe(x).sum().backward()
    recomputed = {name for name in names(found) if "recomputation" in name}
    assert recomputed == {
        f"pipekernels::recomputation stage {stage}, micro-batch {m}"
        for stage in range(2)
        for m in range(2)
    }


def test_backwards_in_two_parts_have_two_ranges() -> None:
    pipe, x = piped(), torch.randn(6, 4)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        pipe.train_step(x, x, nn.functional.mse_loss, schedule="zb-h1")
    kinds = {name.partition("::")[2].partition(" ")[0] for name in names(found)}
    assert {"F", "I", "W"} <= kinds


def test_results_are_those_without_a_profiler() -> None:
    pipe, x = piped(), torch.randn(6, 4)
    expected = pipe(x)
    with profile(activities=[ProfilerActivity.CPU]):
        assert torch.equal(pipe(x), expected)
