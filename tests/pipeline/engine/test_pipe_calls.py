"""How many functions of the package the host calls for a task of a pipe and for a transfer between
GPUs, which are fakes."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.cuda.host_time import is_own, python_calls
from support.cuda.recorded_streams import machine
from torch import nn

from pipekernels import Pipe
from pipekernels.ops import p2p_copy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

A, B = "cuda:0", "cuda:1"
Calls = dict[str, float]  # By function.


class EachLinear(nn.Linear):
    """Applied to each tensor that it is given."""

    def forward(self, value: Any) -> Any:
        forward = super().forward
        return forward(value) if isinstance(value, torch.Tensor) else tuple(map(forward, value))


def less(calls: Calls, others: Calls, count: int) -> Calls:
    """The difference, divided by ``count``."""
    found = {name: (calls.get(name, 0) - others.get(name, 0)) / count for name in calls | others}
    return {name: calls for name, calls in found.items() if calls}


def warm(devices: list[str], chunks: int, tensors: int) -> list[Calls]:
    """Of a second forward and its backward, of a pipe whose stages pass on so many tensors."""
    layers = nn.Sequential(*(EachLinear(4, 4) for _ in devices))
    options: dict[str, Any] = {"checkpoint": "never", "execution": "inline"}
    with nullcontext() if "cpu" in devices else machine():
        pipe = Pipe(layers, [1] * len(devices), devices=devices, chunks=chunks, **options)
        given = [p2p_copy(torch.zeros(8, 4), devices[0]).requires_grad_() for _ in range(tensors)]
        kept: list[Any] = []
        for _ in range(2):
            forward = python_calls(
                lambda: kept.append(pipe(*given) if tensors == 1 else pipe(given))
            )
            kept[:] = [output.sum() for output in (kept[0] if tensors > 1 else kept)]
            backward = python_calls(lambda: torch.autograd.backward(kept))
            kept.clear()
    return [Counter(filter(is_own, forward)), Counter(filter(is_own, backward))]


def per_micro_batch(devices: list[str], tensors: int = 1) -> list[Calls]:
    return [*map(less, warm(devices, 8, tensors), warm(devices, 4, tensors), (4, 4))]


def test_the_host_calls_few_functions() -> None:
    nothing: list[Calls] = [{}, {}]
    for what, fewer, more, bounds in (
        ("task on a CPU", nothing, per_micro_batch(["cpu"] * 2), (8, 1)),
        ("task on one GPU", nothing, per_micro_batch([A, A]), (8, 1)),
        # Stages of one device run as one; these do not.
        ("task on two GPUs", per_micro_batch([A, B]), per_micro_batch([A, A, B, B]), (8, 5)),
        *(
            (
                f"transfer of {count} tensors",
                per_micro_batch([A, A, B, B], count),
                per_micro_batch([A, B, A, B], count),
                (6, 6),
            )
            for count in (1, 3)
        ),
    ):
        for way, bound in enumerate(bounds):
            calls = less(more[way], fewer[way], 2)
            assert 0 < sum(calls.values()) <= bound, f"{what}: {calls}"
