"""A pipe over all GPUs in one process, against the same model with ``.to()`` between the stages.

Forward and backward of the same micro-batches; the result must have the same bits. ``.to`` is what
one would write by hand: micro-batch by micro-batch, each handed on by
``x.to(device, non_blocking=True)``. Size is that of what one micro-batch hands on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.nccl.ranks import OURS, Work
from bench.timing import synchronize
from pipekernels import Pipe

BY_HAND = ".to"
CHUNKS = 8
LAYERS = 4  # of a stage
WIDTH, ROWS = 4096, [16, 256, 2048]  # rows of a micro-batch
TINY_WIDTH, TINY_ROWS = 16, [2]


def stage(width: int) -> nn.Sequential:
    """Matrix products and activations."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def by_hand(stages: list[nn.Sequential], devices: list[torch.device], x: Tensor) -> Tensor:
    """The model's result, on the last device."""
    results = []
    for part in x.chunk(CHUNKS):
        for module, device in zip(stages, devices, strict=True):
            part = module(part.to(device, non_blocking=True))
        results.append(part)
    return torch.cat(results)


def steps(rows: int, width: int, devices: list[torch.device]) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of both; each returns its output."""
    torch.manual_seed(0)
    stages = [stage(width).to(device, torch.bfloat16) for device in devices]
    layers = nn.Sequential(*(layer for module in copy.deepcopy(stages) for layer in module))
    pipe = Pipe(layers, [LAYERS] * len(devices), devices=devices, chunks=CHUNKS, checkpoint="never")
    x = torch.randn(rows * CHUNKS, width, device=devices[0]).to(torch.bfloat16)

    def step(forward: Callable[[], Tensor], modules: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            modules.zero_grad()
            output = forward()
            output.float().square().mean().backward()
            for device in devices:
                synchronize(device)
            return output.detach()

        return run

    return {
        BY_HAND: step(lambda: by_hand(stages, devices, x), nn.ModuleList(stages)),
        OURS: step(lambda: pipe(x), pipe),
    }


def work(rows: int, width: int, devices: list[torch.device]) -> Work:
    """Called by one rank alone."""
    calls = steps(rows, width, devices)

    def wrong(call: Callable[[], Tensor]) -> int:
        return int((call() != calls[BY_HAND]()).sum())

    fields = {"size": rows * width * 2, "count": rows * width, "type": "bfloat16", "redop": "none"}
    return Work(calls, wrong, fields)
