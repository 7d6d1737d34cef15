"""Pipe against a plain loop and against every pipeline that pip can install, on CPU stages.

Forward and backward of 8 x (Linear + GELU), 2 stages, 8 chunks, no checkpointing, one intra-op
thread per worker:

* ``sequential``: the bare module on the whole batch, one thread: the base of ``speed-up``.
* ``two threads``: the same with as many threads as the pipes have.
* ``loop``: the bare module over the same 8 micro-batches, one thread: gradient accumulation.
* ``independent stages``: a thread per stage, each over its own 8 micro-batches without waiting:
  this machine's speed without a bubble. GPipe's ideal, with its bubble, is 8/9 of it.
* ``pipekernels``: two lanes of one thread each.
* ``fairscale``, ``torchgpipe``: ``devices=['cpu', 'cpu']``, for which both start one worker.
* ``torch.distributed.pipelining``: one process per stage, ScheduleGPipe, Gloo; slower rank's time.

Before they are timed, the gradients of all but the independent stages are compared with those of
the bare module.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.harness import Measured
from bench.processes import Processes, closing
from bench.report.tables import duration, markdown, spread
from pipekernels import Pipe

STAGES, CHUNKS, LAYERS = 2, 8, 8
BALANCE = [2 * LAYERS // STAGES] * STAGES
OPTIONS: dict[str, Any] = {"devices": ["cpu"] * STAGES, "chunks": CHUNKS, "checkpoint": "never"}
CASES = {"wide": (512, 2048), "narrow": (64, 256)}  # width, batch
CANDIDATES = dict.fromkeys(
    CASES,
    (
        *("sequential", "two threads", "loop", "independent stages", "pipekernels"),
        *("fairscale", "torchgpipe", "torch.distributed.pipelining"),
    ),
)
QUICK = {
    "narrow": ("sequential", "two threads", "loop", "pipekernels", "torch.distributed.pipelining")
}
BASE = "sequential"
CONDITIONS = {
    "model": f"{LAYERS} x (Linear + GELU), float32",
    "pipeline": f"{STAGES} stages, {CHUNKS} chunks, no checkpointing, one thread per worker",
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


def step(
    module: nn.Module, x: torch.Tensor, grad: torch.Tensor, *, threads: int
) -> Callable[[], float]:
    """One forward and backward; gradients are dropped before the clock starts."""

    def run() -> float:
        torch.set_num_threads(threads)
        module.zero_grad()
        begin = time.perf_counter()
        module(x).backward(grad)
        return time.perf_counter() - begin

    return run


def warmed(turn: Callable[[], float]) -> Callable[[], float]:
    """Two steps, of which the second counts: in training each step finds warm caches, but here the
    steps of other candidates leave them cold."""

    def run() -> float:
        turn()
        return turn()

    return run


def loop(
    module: nn.Module, x: torch.Tensor, grad: torch.Tensor, *, threads: int = 1
) -> Callable[[], float]:
    """A plain loop over the micro-batches."""

    def run() -> float:
        torch.set_num_threads(threads)
        module.zero_grad()
        begin = time.perf_counter()
        for part, part_grad in zip(x.chunk(CHUNKS), grad.chunk(CHUNKS), strict=True):
            module(part).backward(part_grad)
        return time.perf_counter() - begin

    return run


def independent(module: nn.Sequential, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], float]:
    """All stages at once, as if none needed another's results."""
    half = len(module) // STAGES
    stages = [module[i * half : (i + 1) * half] for i in range(STAGES)]

    def work(index: int) -> None:
        torch.set_num_threads(1)
        # The first stage's input wants no gradient, as in the pipeline.
        inputs = [part.detach().requires_grad_(index > 0) for part in x.chunk(CHUNKS)]
        outputs = [stages[index](part) for part in inputs]
        for output, part_grad in zip(reversed(outputs), reversed(grad.chunk(CHUNKS)), strict=True):
            output.backward(part_grad)

    def run() -> float:
        module.zero_grad()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(STAGES)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    return run


def _checked(module: nn.Module, width: int, batch: int, threads: int = 1) -> Callable[[], float]:
    """A step of ``module``, whose gradients are right."""
    x, grad = data(width, batch)
    run = step(module, x, grad, threads=threads)
    run()
    check(module.parameters(), gradients(build(width), x, grad))
    return run


def _fairscale(rank: int, port: int, serve: Callable[..., None], width: int, batch: int) -> None:
    from fairscale.nn import Pipe

    serve(_checked(Pipe(build(width), BALANCE, **OPTIONS), width, batch))


def _torchgpipe(rank: int, port: int, serve: Callable[..., None], width: int, batch: int) -> None:
    from torchgpipe import GPipe

    serve(_checked(GPipe(build(width), BALANCE, **OPTIONS), width, batch))


def _pipelining(rank: int, port: int, serve: Callable[..., None], width: int, batch: int) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=STAGES
    )
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
    serve(run)


def candidates(width: int, batch: int, names: Sequence[str]) -> dict[str, Callable[[], float]]:
    """Those of ``names`` that are installed."""
    x, grad = data(width, batch)
    pipe = Pipe(build(width), BALANCE, **OPTIONS)
    here: dict[str, Callable[[], float]] = {
        "sequential": step(build(width), x, grad, threads=1),
        "two threads": step(build(width), x, grad, threads=STAGES),
        "loop": loop(build(width), x, grad),
        "independent stages": independent(build(width), x, grad),
        "pipekernels": _checked(pipe, width, batch, threads=STAGES),
    }
    processes = {
        "fairscale": (1, _fairscale),
        "torchgpipe": (1, _torchgpipe),
        "torch.distributed.pipelining": (STAGES, _pipelining),
    }
    found: dict[str, Callable[[], float]] = {}
    for name in names:
        if name in here:
            found[name] = here[name]
        elif importlib.util.find_spec(name.split(".")[0]) is None:
            print(f"{name} is not installed: left out")
        else:
            ranks, worker = processes[name]
            found[name] = Processes(ranks, worker, width, batch)
    return found


def measure(plan: Mapping[str, Sequence[str]], quick: bool) -> Iterator[Measured]:
    """Every candidate that is installed, in turn."""
    threads = torch.get_num_threads()
    for case, names in plan.items():
        width, batch = CASES[case]
        rounds = (5 if quick else 42) * (1 if case == "wide" else 5)
        with closing(candidates(width, batch, names)) as runners:
            turns = {name: warmed(runner) for name, runner in runners.items()}
            try:
                # Pipe times its ways to run on its first passes, so the warm-up covers that too.
                samples = harness.alternate(turns, warmup=4 if quick else 7, rounds=rounds)
            finally:
                torch.set_num_threads(threads)
        found = harness.against(samples, BASE)
        shape = {"case": case, "width": width, "batch": batch}
        rows = [
            {
                **shape,
                "candidate": name,
                **figures,
                "time over loop": figures["median"] / found["loop"]["median"],
            }
            for name, figures in found.items()
        ]
        yield Measured(case, samples, rows)


def table(rows: list[dict[str, Any]]) -> str:
    """A row per candidate and case."""
    return markdown(
        ["case", "candidate", "median", "p10 to p90", "speed-up over sequential", "time over loop"],
        [
            [
                f"{row['width']} wide, batch {row['batch']}",
                row["candidate"],
                duration(row["median"]),
                spread(row),
                f"{row['speed-up over sequential']:.2f}",
                f"{row['time over loop']:.2f}",
            ]
            for row in rows
        ],
    )
