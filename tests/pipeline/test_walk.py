"""How many functions, files and frames a reader goes through to follow a mini-batch."""

import traceback
from typing import Any

import pytest
import torch
from support.cuda.host_time import COMPREHENSIONS, ROOT, is_own, python_calls
from support.pipes import on_cpus
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDS = {
    "functions of a forward": 70,
    "files of a forward": 12,
    "frames around a layer": 8,
    "functions of a backward": 35,
}


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_mini_batch_is_a_short_walk(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    pipe = on_cpus(layers, [4, 4], chunks=chunks, checkpoint="never", execution="inline")
    x, linear = torch.randn(8, 4), nn.functional.linear
    pipe(x).sum().backward()
    outputs: list[torch.Tensor] = []
    forward = dict.fromkeys(filter(is_own, python_calls(lambda: outputs.append(pipe(x)))))
    loss = outputs[0].sum()
    backward = dict.fromkeys(filter(is_own, python_calls(loss.backward)))
    stacks: list[list[str]] = []

    def linear_with_stack(*args: Any) -> torch.Tensor:
        stack = [each for each in traceback.extract_stack() if each.name not in COMPREHENSIONS]
        names = [f"{each.filename.removeprefix(ROOT)} {each.name}" for each in stack]
        stacks.append([name for name in names if is_own(name)])
        return linear(*args)

    monkeypatch.setattr(nn.functional, "linear", linear_with_stack)
    pipe(x)
    frames = max(stacks, key=len)
    files = dict.fromkeys(name.partition(":")[0] for name in forward)
    for bound, found in zip(BOUNDS, (forward, files, frames, backward), strict=True):
        assert len(found) <= BOUNDS[bound], "\n".join([f"{len(found)} {bound}:", *found])
    # A single microbatch runs in the caller's graph, whose backward is autograd's.
    assert forward and frames and bool(backward) == (chunks > 1)
