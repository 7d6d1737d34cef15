"""Tensor-parallel layers on CPU ranks, against those of PyTorch.

An MLP, Linear + GELU + Linear, whose first layer is column-parallel and whose second one is
row-parallel: one all-reduce forward and one backward. Input and output are replicated.

* ``one thread``, ``two threads``: the bare module in one process.
* ``pipekernels``: ``tensor_parallelize`` on two processes of one thread each, as all below;
  ``invariant``: with bits that do not depend on the number of ranks.
* ``DTensor``: ``torch.distributed.tensor.parallel`` on Gloo; then the same program on the
  ``torch.distributed`` backend ``pipekernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bench.harness import Options, Turns
from bench.processes import Serve, join, repeated, started

RANKS = 2
WIDTH, HIDDEN = 768, 3072
CASES = {  # rows, whether there is a backward, steps per turn
    "1 row, forward": (1, False, 40),
    "16 rows, forward": (16, False, 20),
    "256 rows, forward": (256, False, 3),
    "256 rows, forward and backward": (256, True, 2),
}
DTENSORS = ("DTensor, Gloo", "DTensor, backend pipekernels")
OURS = ("pipekernels", "pipekernels, invariant")
CANDIDATES = dict.fromkeys(CASES, ("one thread", "two threads", *OURS, *DTENSORS))
QUICK = {"16 rows, forward": ("one thread", "two threads", "pipekernels", "DTensor, Gloo")}
BASE = "two threads"
CONDITIONS = {
    "model": f"Linear({WIDTH}, {HIDDEN}) + GELU + Linear({HIDDEN}, {WIDTH}), float32",
    "ranks": f"{RANKS} processes of one thread",
    "timing": "slowest rank, candidates in turn, the first step of each turn does not count, "
    "medians",
}


def build() -> nn.Sequential:
    """The whole MLP, with the same weights in all processes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def serve_steps(module: nn.Module, case: str, serve: Serve, threads: int = 1) -> None:
    """Check ``module`` once against the whole MLP, then serve turns of ``case``.

    Raises:
        AssertionError: results differ from the MLP's by more than rounding.
    """
    torch.set_num_threads(threads)
    rows, backward, steps = CASES[case]
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    x.requires_grad_(backward)

    def step() -> torch.Tensor:
        with torch.set_grad_enabled(backward):
            y = module(x)
        if backward:
            module.zero_grad()
            x.grad = None
            y.backward(grad)
        return y

    y, found = step().detach(), x.grad
    leaf = x.detach().requires_grad_()
    wanted = build()(leaf)
    wanted.backward(grad)
    torch.testing.assert_close(y, wanted.detach())
    if backward:
        torch.testing.assert_close(found, leaf.grad)
    serve(repeated(step, steps))


def _bare(rank: int, port: int, serve: Serve, case: str, threads: int) -> None:
    serve_steps(build(), case, serve, threads)


def _pipekernels(rank: int, port: int, serve: Serve, case: str, invariant: bool) -> None:
    from pipekernels import Communicator
    from pipekernels.tensor_parallel import tensor_parallelize

    join("gloo", rank, RANKS, port)
    with Communicator.from_process_group() as comm:
        module = build()
        tensor_parallelize(module, {"0": "column", "2": "row"}, comm, invariant=invariant)
        serve_steps(module, case, serve)


def _dtensor(rank: int, port: int, serve: Serve, case: str, backend: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    join(backend, rank, RANKS, port)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(build(), init_device_mesh("cpu", (RANKS,)), plan)
    serve_steps(module, case, serve)


WORKERS: dict[str, tuple[Any, ...]] = {
    "one thread": (1, _bare, 1),
    "two threads": (1, _bare, RANKS),
    "pipekernels": (RANKS, _pipekernels, False),
    "pipekernels, invariant": (RANKS, _pipekernels, True),
    "DTensor, Gloo": (RANKS, _dtensor, "gloo"),
    "DTensor, backend pipekernels": (RANKS, _dtensor, "pipekernels"),
}


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every candidate."""
    return Turns(started(WORKERS, names, case), 3, 5 if options.quick else 60)
