"""Overhead of the engine: pipes of layers that do nothing, and micro-batches on one device.

``no pipe`` is the bare model: over the same micro-batches where layers do nothing, and on the whole
batch on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from bench.harness import Options, Turns
from bench.pipeline.pipe import build, data, loop, step
from pipekernels import Pipe

STAGES = 2
CANDIDATES = {
    "no-op": ("no pipe", "8 chunks", "32 chunks"),
    "one device": ("no pipe", "1 chunks", "4 chunks"),
}
QUICK = CANDIDATES
BASE = "no pipe"
CONDITIONS = {
    "no-op": f"{STAGES} stages of nn.Identity, forward and backward, per (stage, micro-batch)",
    "one device": "1 stage of 8 x (Linear(512) + GELU), batch 2048, one thread, forward and "
    "backward",
    "timing": "candidates in turn, medians",
}


def _no_op(candidate: str) -> Callable[[], float]:
    """Seconds per stage and micro-batch."""
    layers = nn.Sequential(*(nn.Identity() for _ in range(STAGES)))
    x, grad = torch.zeros(64, 4, requires_grad=True), torch.ones(64, 4)
    threads = torch.get_num_threads()
    if candidate == BASE:
        chunks, run = 8, loop(layers, x, grad, threads=threads)
    else:
        chunks = int(candidate.split()[0])
        devices = ["cpu"] * STAGES
        pipe = Pipe(layers, [1] * STAGES, devices=devices, chunks=chunks, checkpoint="never")
        run = step(pipe, x, grad, threads=threads)

    def per_micro_batch() -> float:
        x.grad = None
        return run() / (STAGES * chunks)

    return per_micro_batch


def _one_device(candidate: str) -> Callable[[], float]:
    x, grad = data(512, 2048)
    if candidate == BASE:
        return step(build(512), x, grad, threads=1)
    chunks = int(candidate.split()[0])
    pipe = Pipe(build(512), [16], devices=["cpu"], chunks=chunks, checkpoint="never")
    return step(pipe, x, grad, threads=1)


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Both kinds of pipes, beside none."""
    if case == "no-op":
        return Turns({name: _no_op(name) for name in names}, 15, 50 if options.quick else 400)
    warmup, rounds = (1, 4) if options.quick else (3, 33)
    return Turns({name: _one_device(name) for name in names}, warmup, rounds)
