"""Pipe against a plain loop and against every pipeline that pip can install, on CPU stages.

Forward and backward of 8 x (Linear + GELU), 2 stages, 8 chunks, no checkpointing, two intra-op
threads in all:

* ``sequential``: the bare module on the whole batch, one thread.
* ``two threads``: the same with two.
* ``loop``: the bare module over the same 8 micro-batches, two threads: gradient accumulation.
* ``pipekernels``: two threads.
* ``fairscale``, ``torchgpipe``: ``devices=['cpu', 'cpu']``, for which both start one worker; two
  threads.
* ``torch.distributed.pipelining``: one process of one thread per stage, ScheduleGPipe, Gloo; slower
  rank's time.

Before they are timed, their gradients are compared with those of the bare module.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from bench.harness import Options, Turns
from bench.processes import Serve, join, started
from pipekernels import Pipe

Clock = Callable[[], float]
STAGES, CHUNKS, LAYERS = 2, 8, 8
BALANCE = [2 * LAYERS // STAGES] * STAGES
OPTIONS: dict[str, Any] = {"devices": ["cpu"] * STAGES, "chunks": CHUNKS, "checkpoint": "never"}
CASES = {"wide": (512, 2048), "narrow": (64, 256)}  # Width, batch.
PEERS = ("fairscale", "torchgpipe", "torch.distributed.pipelining")
CANDIDATES = dict.fromkeys(CASES, ("sequential", "two threads", "loop", "pipekernels", *PEERS))
QUICK = {
    "narrow": ("sequential", "two threads", "loop", "pipekernels", "torch.distributed.pipelining")
}
BASE = "two threads"
CONDITIONS = {
    "model": f"{LAYERS} x (Linear + GELU), float32; wide: width 512, batch 2048; narrow: width 64, "
    "batch 256",
    "pipeline": f"{STAGES} stages, {CHUNKS} chunks, no checkpointing, two threads; "
    "sequential: one; torch.distributed.pipelining: one per stage",
    "timing": "forward and backward, candidates in turn, each with one step that does not count "
    "and one that does; medians",
}


def build(width: int) -> nn.Sequential:
    """The model, with the same weights for all candidates."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


def data(width: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(batch, width, generator=generator) for _ in range(2))
    return x, grad


def gradients(module: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Those of all parameters after one step of ``module``, which drops them."""
    module.zero_grad()
    module(x).backward(grad)
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return [gradient for gradient in found if gradient is not None]


def check(found: Iterable[nn.Parameter], wanted: Sequence[torch.Tensor]) -> None:
    """Compare the gradients of ``found`` with ``wanted``.

    Raises:
        AssertionError: one differs by more than rounding can explain.
    """
    for parameter, gradient in zip(found, wanted, strict=True):
        assert parameter.grad is not None, "a parameter has no gradient"
        error = float((parameter.grad - gradient).norm() / gradient.norm())
        assert error < 1e-4, f"gradients differ from the bare module's by {error:.1e} of their norm"


def timed(
    module: nn.Module, threads: int, step: Callable[[], Any], *, clock: Clock = time.perf_counter
) -> Callable[[], float]:
    """``step`` with gradients dropped before the clock starts."""

    def run() -> float:
        torch.set_num_threads(threads)
        module.zero_grad()
        begin = clock()
        step()
        return clock() - begin

    return run


def step(
    module: nn.Module, x: torch.Tensor, grad: torch.Tensor, *, threads: int
) -> Callable[[], float]:
    """One forward and backward."""
    return timed(module, threads, lambda: module(x).backward(grad))


def warm(turn: Callable[[], float]) -> Callable[[], float]:
    """Two steps, of which the second counts: in training each step finds warm caches, but here the
    steps of other candidates leave them cold."""

    def run() -> float:
        turn()
        return turn()

    return run


def loop(
    module: nn.Module, x: torch.Tensor, grad: torch.Tensor, *, threads: int,
    chunks: int = CHUNKS, clock: Clock = time.perf_counter,
) -> Callable[[], float]:  # fmt: skip
    """A plain loop over the microbatches."""

    def step() -> None:
        for part, part_grad in zip(x.chunk(chunks), grad.chunk(chunks), strict=True):
            module(part).backward(part_grad)

    return timed(module, threads, step, clock=clock)


def _checked(module: nn.Module, width: int, batch: int) -> Callable[[], float]:
    """Warm steps of ``module``, whose gradients are right."""
    x, grad = data(width, batch)
    run = step(module, x, grad, threads=STAGES)
    run()
    check(module.parameters(), gradients(build(width), x, grad))
    return warm(run)


def _peer(rank: int, port: int, serve: Serve, width: int, batch: int, name: str) -> None:
    serve(_checked(pkgutil.resolve_name(name)(build(width), BALANCE, **OPTIONS), width, batch))


def _pipelining(rank: int, port: int, serve: Serve, width: int, batch: int) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    join("gloo", rank, STAGES, port)
    module = build(width)
    half = len(module) // STAGES
    part = module[rank * half : (rank + 1) * half]
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))

    def loss(output: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.dot(output.flatten(), grad.flatten())  # Its gradient is that of the others.

    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=loss, scale_grads=False)
    x, grad = data(width, batch)

    def run() -> float:
        part.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=grad)
        return time.perf_counter() - begin

    wanted = gradients(module, x, grad)
    run()
    mine = len(wanted) // STAGES
    check(part.parameters(), wanted[rank * mine : (rank + 1) * mine])
    serve(warm(run))


PROCESSES: dict[str, tuple[Any, ...]] = {
    "fairscale": (1, _peer, "fairscale.nn.Pipe"),
    "torchgpipe": (1, _peer, "torchgpipe.GPipe"),
    "torch.distributed.pipelining": (STAGES, _pipelining),
}


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Those that are installed."""
    width, batch = CASES[case]
    x, grad = data(width, batch)
    here = {
        "sequential": warm(step(build(width), x, grad, threads=1)),
        "two threads": warm(step(build(width), x, grad, threads=STAGES)),
        "loop": warm(loop(build(width), x, grad, threads=STAGES)),
        "pipekernels": _checked(Pipe(build(width), BALANCE, **OPTIONS), width, batch),
    }
    others = started(PROCESSES, [name for name in names if name not in here], width, batch)
    runners = {name: found for name, found in (here | others).items() if name in names}
    rounds = (5 if options.quick else 42) * (1 if case == "wide" else 5)
    return Turns(runners, 3, rounds)
