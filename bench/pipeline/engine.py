"""Overhead of the engine: of layers that do nothing, and of narrow layers.

``no pipe`` is the bare model over the same microbatches, without checkpointing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.harness import Options, Turns
from bench.pipeline.pipe import build, check, data, gradients, loop, step, warm
from bench.processes import Serve, started
from pipekernels import Pipe

STAGES = 2
NARROW = {  # Chunks and the mode of checkpointing.
    "narrow, 8 micro-batches": (8, "never"),
    "narrow, 1 micro-batch": (1, "never"),
    "narrow, checkpointed": (8, "always"),
}
CANDIDATES = {
    "no-op": ("no pipe", "8 chunks", "32 chunks"),
    **dict.fromkeys(NARROW, ("no pipe", "pipekernels", "torchgpipe")),
}
QUICK = CANDIDATES
BASE = "no pipe"
CONDITIONS = {
    "no-op": f"{STAGES} stages of nn.Identity, forward and backward, per (stage, microbatch)",
    "narrow": f"CPU time of {STAGES} stages of 4 x (Linear(64) + GELU), 32 rows per microbatch, "
    "one thread, forward and backward",
    "timing": "candidates in turn, medians",
}


def _no_op(candidate: str) -> Callable[[], float]:
    """Seconds per stage and microbatch."""
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


def _narrow(case: str, make: Callable[..., nn.Module] | None) -> Callable[[], float]:
    """CPU seconds of a step of a pipe, or of the loop, whose gradients are right."""
    chunks, checkpoint = NARROW[case]
    x, grad = data(64, 32 * chunks)
    module, parts = build(64), chunks
    if make is not None:
        options = {"devices": ["cpu"] * STAGES, "chunks": chunks, "checkpoint": checkpoint}
        module, parts = make(module, [8] * STAGES, **options), 1
    run = warm(loop(module, x, grad, chunks=parts, clock=time.process_time))
    run()
    check(module.parameters(), gradients(build(64), x, grad))
    return run


def _torchgpipe(rank: int, port: int, serve: Serve, case: str) -> None:
    from torchgpipe import GPipe

    serve(_narrow(case, GPipe))


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """The pipes of a case, beside none."""
    if case == "no-op":
        return Turns({name: _no_op(name) for name in names}, 15, 50 if options.quick else 400)
    makers = {"no pipe": None, "pipekernels": partial(Pipe, execution="inline")}
    runners: dict[str, Any] = {
        name: _narrow(case, makers[name]) for name in names if name in makers
    }
    peers = [name for name in names if name not in makers]
    runners |= started({"torchgpipe": (1, _torchgpipe)}, peers, case)
    return Turns(runners, 5, 50 if options.quick else 600)
