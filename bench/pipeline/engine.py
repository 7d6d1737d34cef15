"""Overhead of the engine, of narrow layers.

``no pipe`` is the bare model over the same microbatches, without checkpointing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bench.harness import Options, Turns
from bench.processes import Serve, started
from pipekernels import Pipe

STAGES = 2
NARROW = {  # Chunks and the mode of checkpointing.
    "narrow, 8 micro-batches": (8, "never"),
    "narrow, 1 micro-batch": (1, "never"),
    "narrow, checkpointed": (8, "always"),
}
CANDIDATES = dict.fromkeys(NARROW, ("no pipe", "pipekernels", "torchgpipe"))
QUICK = CANDIDATES
BASE = "no pipe"
CONDITIONS = {
    "narrow": f"CPU time of {STAGES} stages of 4 x (Linear(64) + GELU), 32 rows per micro-batch, "
    "one thread, forward and backward",
    "timing": "candidates in turn, medians",
}


def _narrow(case: str, make: Callable[..., nn.Module] | None) -> Callable[[], float]:
    """CPU seconds of a step of a pipe, or of the loop, whose gradients are right."""
    chunks, checkpoint = NARROW[case]
    torch.manual_seed(0)
    bare = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())))
    x, grad = torch.randn(2, 32 * chunks, 64)
    module: nn.Module = copy.deepcopy(bare)
    parts = chunks
    if make is not None:
        options = {"devices": ["cpu"] * STAGES, "chunks": chunks, "checkpoint": checkpoint}
        module, parts = make(module, [8] * STAGES, **options), 1

    def step() -> None:
        for part, part_grad in zip(x.chunk(parts), grad.chunk(parts), strict=True):
            module(part).backward(part_grad)

    def run() -> float:
        """The second of two steps: in training each step finds warm caches, but here the steps of
        other candidates leave them cold."""
        torch.set_num_threads(1)
        for _ in range(2):
            module.zero_grad()
            begin = time.process_time()
            step()
        return time.process_time() - begin

    run()
    bare(x).backward(grad)
    found, wanted = ([p.grad for p in each.parameters()] for each in (module, bare))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    return run


def _torchgpipe(rank: int, port: int, serve: Serve, case: str) -> None:
    from torchgpipe import GPipe

    serve(_narrow(case, GPipe))


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """The pipes of a case, beside none."""
    makers = {"no pipe": None, "pipekernels": Pipe}
    runners: dict[str, Any] = {
        name: _narrow(case, makers[name]) for name in names if name in makers
    }
    peers = [name for name in names if name not in makers]
    runners |= started({"torchgpipe": (1, _torchgpipe)}, peers, case)
    return Turns(runners, 5, 50 if options.quick else 600)
