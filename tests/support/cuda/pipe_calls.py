"""How many functions of Python run for a task of a pipe, a hand-over between GPUs, and a split.

The GPUs are pretended. ``python -m support.cuda.pipe_calls`` (in ``tests``) prints the numbers, and
those of each function with ``--list``. Stand-ins for CUDA's functions are in the lists alone.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from pipekernels import Pipe
from pipekernels.ops import split_micro_batches
from support.cuda.host_time import python_calls
from support.cuda.pretended_gpus import GPUS, pretended_gpus
from support.function_layer import FunctionLayer

A, B = GPUS
Calls = dict[str, float]  # By function.
Passes = tuple[Calls, Calls]  # Those of a forward, and of its backward.


def scaled(value: Any) -> Any:
    return value * 2 if isinstance(value, torch.Tensor) else tuple([each * 2 for each in value])


def less(calls: Calls, others: Calls, count: float) -> Calls:
    """The difference, divided by ``count``."""
    found = {name: (calls.get(name, 0) - others.get(name, 0)) / count for name in calls | others}
    return {name: calls for name, calls in found.items() if calls}


def warm(devices: Sequence[Any], chunks: int, tensors: int) -> Passes:
    """Of a pipe whose stages pass on so many tensors."""
    options: dict[str, Any] = {"checkpoint": "never", "execution": "inline"}
    layers = [FunctionLayer(scaled) for _ in devices]
    pipe = Pipe(
        nn.Sequential(*layers), [1] * len(layers), devices=devices, chunks=chunks, **options
    )
    given = tuple(torch.zeros(8, 4, requires_grad=True) for _ in range(tensors))
    kept: list[Any] = []
    for _ in range(2):
        forward = python_calls(lambda: kept.append(pipe(given if tensors > 1 else given[0])))
        kept[:] = [output.sum() for output in (kept[0] if tensors > 1 else kept)]
        backward = python_calls(lambda: torch.autograd.backward(kept))
        kept.clear()
    return Counter(forward), Counter(backward)


def per_micro_batch(devices: Sequence[Any], tensors: int = 1) -> Passes:
    with pretended_gpus() if A in devices else nullcontext():
        eight, four = (warm(devices, chunks, tensors) for chunks in (8, 4))
    forward, backward = map(less, eight, four, (4, 4))
    return forward, backward


def tasks_and_hand_overs() -> dict[str, Calls]:
    """Per stage or hand-over, and micro-batch."""
    none: Passes = {}, {}
    found = {
        "task on a CPU": (per_micro_batch(["cpu", "cpu"]), none),
        "task on one GPU": (per_micro_batch([A, A]), none),
        # Stages of one device run as one; these do not.
        "task on two GPUs": (per_micro_batch([A, A, B, B]), per_micro_batch([A, B])),
    }
    for count in (1, 8):
        more, fewer = (per_micro_batch(places, count) for places in ([A, B, A, B], [A, A, B, B]))
        found[f"hand-over of {count}"] = more, fewer
    return {
        f"{what}, {('forward', 'backward')[way]}": less(more[way], fewer[way], 2)
        for what, (more, fewer) in found.items()
        for way in (0, 1)
    }


def splits() -> dict[str, Calls]:
    """Of one tensor into eight: the operation, and what a pipe does before its first layer, less
    what it does there for one micro-batch."""
    x = torch.zeros(8, 4, requires_grad=True)
    begun = []
    for chunks in (8, 1):
        pipe = Pipe(nn.Sequential(FunctionLayer(scaled)), [1], devices=["cpu"], chunks=chunks)
        pipe(x)
        names = python_calls(lambda: pipe(x))  # noqa: B023
        begun.append(Counter(names[: names.index(f"{__name__}.scaled")]))
    operation = Counter(python_calls(lambda: split_micro_batches(x.detach(), 8)))
    return {"split_micro_batches": operation, "a pipe's split": less(*begun, 1)}


def own(calls: Calls) -> float:
    """The number of calls of the package's functions."""
    return sum(count for name, count in calls.items() if name.startswith("pipekernels."))


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':28} {'of the package':>15} {'of all':>8}")
    for what, calls in (tasks_and_hand_overs() | splits()).items():
        others = {name: count for name, count in calls.items() if "pretended_gpus" not in name}
        print(f"{what:28} {own(calls):15g} {sum(others.values()):8g}")
        if "--list" in sys.argv:
            listed = sorted(calls, key=calls.__getitem__, reverse=True)
            print("".join(f"{calls[name]:8g} {name}\n" for name in listed))


if __name__ == "__main__":
    main()
