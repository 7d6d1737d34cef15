"""How many functions of Python run for a task of a pipe, a transfer between GPUs, and a split.

The GPUs are pretended.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from pipekernels import Pipe
from pipekernels.ops import split_micro_batches
from support.cuda.host_time import is_own, python_calls
from support.cuda.pretended_gpus import GPUS, pretended_gpus

A, B = GPUS
Calls = dict[str, float]  # By function.


class EachLinear(nn.Linear):
    """Applied to each tensor that it is given."""

    def forward(self, value: Any) -> Any:
        forward = super().forward
        return forward(value) if isinstance(value, torch.Tensor) else tuple(map(forward, value))


def pipe_on(devices: Sequence[Any], chunks: int) -> Pipe:
    layers = nn.Sequential(*(EachLinear(4, 4) for _ in devices))
    options: dict[str, Any] = {"checkpoint": "never", "execution": "inline"}
    return Pipe(layers, [1] * len(devices), devices=devices, chunks=chunks, **options)


def less(calls: Calls, others: Calls, count: float) -> Calls:
    """The difference, divided by ``count``."""
    found = {name: (calls.get(name, 0) - others.get(name, 0)) / count for name in calls | others}
    return {name: calls for name, calls in found.items() if calls}


def warm(devices: Sequence[Any], chunks: int, tensors: int) -> list[Calls]:
    """Of a forward and its backward, of a pipe whose stages pass on so many tensors."""
    pipe = pipe_on(devices, chunks)
    given = tuple(torch.zeros(8, 4, requires_grad=True) for _ in range(tensors))
    kept: list[Any] = []
    for _ in range(2):
        forward = python_calls(lambda: kept.append(pipe(given if tensors > 1 else given[0])))
        kept[:] = [output.sum() for output in (kept[0] if tensors > 1 else kept)]
        backward = python_calls(lambda: torch.autograd.backward(kept))
        kept.clear()
    return [Counter(forward), Counter(backward)]


def per_micro_batch(devices: Sequence[Any], tensors: int = 1) -> list[Calls]:
    with pretended_gpus() if A in devices else nullcontext():
        return [*map(less, warm(devices, 8, tensors), warm(devices, 4, tensors), (4, 4))]


def tasks_and_transfers() -> dict[str, Calls]:
    """Per stage or transfer, and microbatch."""
    compared: dict[str, Any] = {
        "task on a CPU": (per_micro_batch(["cpu", "cpu"]), ({}, {})),
        "task on one GPU": (per_micro_batch([A, A]), ({}, {})),
        # Stages of one device run as one; these do not.
        "task on two GPUs": (per_micro_batch([A, A, B, B]), per_micro_batch([A, B])),
    }
    for count in (1, 8):
        crossing = [per_micro_batch(devices, count) for devices in ([A, B, A, B], [A, A, B, B])]
        compared[f"transfer of {count}"] = crossing
    return {
        f"{what}, {way}": less(more[i], fewer[i], 2)
        for what, (more, fewer) in compared.items()
        for i, way in enumerate(("forward", "backward"))
    }


def splits() -> dict[str, Calls]:
    """Of one tensor into eight, on a GPU; functions in C as well."""
    with pretended_gpus():
        x = torch.zeros(8, 4)
        calls = python_calls(lambda: split_micro_batches(x, 8), in_c=True)
    return {"split_micro_batches": Counter(calls)}


def own(calls: Calls) -> float:
    """The number of calls of the package's functions."""
    return sum(count for name, count in calls.items() if is_own(name))
