"""A pipe over all GPUs in one process, against the same model with ``.to()`` between the stages.

Forward and backward of the same micro-batches; the result must have the same bits. ``.to`` is what
one would write by hand: micro-batch by micro-batch, each handed on by
``x.to(device, non_blocking=True)``. Size is that of what one micro-batch hands on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench import harness
from bench.gpu.timing import synchronize
from bench.nccl.collectives import Row
from bench.nccl.ranks import OURS, WARMUP
from pipekernels import Pipe

BY_HAND = ".to"
CHUNKS = 8
LAYERS = 4  # of a stage
WIDTH, ROWS = 4096, [16, 256, 2048]  # rows of a micro-batch
TINY_WIDTH, TINY_ROWS = 16, [2]


class Layer(nn.Module):
    """A matrix product and an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def stages_of(width: int, devices: list[torch.device]) -> list[nn.Sequential]:
    """The model's stages, each on its device."""
    torch.manual_seed(0)
    return [
        nn.Sequential(*(Layer(width) for _ in range(LAYERS))).to(device, torch.bfloat16)
        for device in devices
    ]


def by_hand(stages: list[nn.Sequential], devices: list[torch.device], x: Tensor) -> Tensor:
    """The model's result, on the last device."""
    results = []
    for part in x.chunk(CHUNKS):
        for stage, device in zip(stages, devices, strict=True):
            part = stage(part.to(device, non_blocking=True))
        results.append(part)
    return torch.cat(results)


def steps(rows: int, width: int, devices: list[torch.device]) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of both; each returns its output."""
    stages = stages_of(width, devices)
    layers = nn.Sequential(*(layer for stage in copy.deepcopy(stages) for layer in stage))
    pipe = Pipe(layers, [LAYERS] * len(devices), devices=devices, chunks=CHUNKS, checkpoint="never")
    x = torch.randn(rows * CHUNKS, width, device=devices[0]).to(torch.bfloat16)

    def step(forward: Callable[[], Tensor], modules: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            modules.zero_grad()
            output = forward()
            output.float().square().mean().backward()
            return output.detach()

        return run

    return {
        OURS: step(lambda: pipe(x), pipe),
        BY_HAND: step(lambda: by_hand(stages, devices, x), nn.ModuleList(stages)),
    }


def measure(rows: int, width: int, devices: list[torch.device], rounds: int) -> Row:
    """One row; called by one rank alone."""
    ways = steps(rows, width, devices)

    def timed(step: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            step()
            for device in devices:
                synchronize(device)

        return run

    def wrong() -> int:
        ours, theirs = (step() for step in ways.values())
        return int((ours != theirs).sum())

    before = wrong()
    turns = {name: timed(step) for name, step in ways.items()}
    samples = harness.alternate(turns, warmup=WARMUP, rounds=rounds)
    found = {OURS: before + wrong(), BY_HAND: 0}
    size = rows * width * torch.bfloat16.itemsize
    candidates: dict[str, dict[str, Any]] = {
        name: {**harness.summary(times), "wrong": found[name]} for name, times in samples.items()
    }
    return {"size": size, "count": rows * width, "redop": "none", "candidates": candidates}
