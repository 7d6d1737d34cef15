"""Training steps of a GPT under DistributedDataParallel on CPU ranks, on this backend and on Gloo.

Each rank runs forward, backward and an AdamW step on its part of a batch; DDP averages the
gradients, one all-reduce per bucket, while the backward goes on.

* ``one thread``: the bare model on the whole batch in one process.
* ``two threads``: the same, with as many threads as there are ranks.
* ``pipekernels``, ``Gloo``: DDP on two processes of one thread each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.harness import Measured
from bench.processes import Processes, closing
from bench.report.tables import speed_ups

RANKS = 2
BLOCKS, HEADS, WIDTH, CONTEXT = 4, 4, 256, 32
CASES = {"4 sequences": (4, 2), "16 sequences": (16, 1)}  # Of the whole batch; steps per turn.
CANDIDATES = dict.fromkeys(CASES, ("one thread", "two threads", "DDP, pipekernels", "DDP, Gloo"))
QUICK = {"4 sequences": CANDIDATES["4 sequences"]}
BASE = "DDP, Gloo"
CHECKED = 3  # Steps whose losses are compared.
CONDITIONS = {
    "model": f"byte-level GPT, {BLOCKS} blocks of width {WIDTH}, sequences of {CONTEXT} bytes, "
    "cross-entropy, AdamW, float32",
    "ranks": f"{RANKS} processes of one thread; DDP's default buckets",
    "timing": "forward, backward and optimizer step, slowest rank, candidates in turn, the first "
    "step of each turn does not count, medians",
}

Serve = Callable[[Callable[[], float]], None]


def build() -> nn.Module:
    """The model, with the same weights in all processes."""
    from demo.gpt import gpt

    torch.manual_seed(0)
    return gpt(WIDTH, BLOCKS, HEADS, CONTEXT)


def stepper(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    """Returns a function that takes a training step and gives its loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> float:
        loss = nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def data(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the whole batch, and those to predict."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(256, (CASES[case][0], CONTEXT + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def serve_steps(step: Callable[[], float], case: str, serve: Serve) -> None:
    """Serve turns of ``case``."""

    def turn() -> float:
        step()
        begin = time.perf_counter()
        for _ in range(CASES[case][1]):
            step()
        return (time.perf_counter() - begin) / CASES[case][1]

    serve(turn)


def _bare(rank: int, port: int, serve: Serve, case: str, threads: int) -> None:
    torch.set_num_threads(threads)
    serve_steps(stepper(build(), *data(case)), case, serve)


def _ddp(rank: int, port: int, serve: Serve, case: str, backend: str) -> None:
    import torch.distributed as dist

    import pipekernels.distributed  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    x, y = (part.chunk(RANKS)[rank] for part in data(case))
    step = stepper(nn.parallel.DistributedDataParallel(build()), x, y)
    check_losses(step, case)
    serve_steps(step, case, serve)


def check_losses(step: Callable[[], float], case: str) -> None:
    """Compare the first losses, averaged over ranks, with those of one process.

    Raises:
        AssertionError: they differ by more than rounding.
    """
    import torch.distributed as dist

    losses = torch.tensor([step() for _ in range(CHECKED)])
    dist.all_reduce(losses)
    whole = stepper(build(), *data(case))
    expected = torch.tensor([whole() for _ in range(CHECKED)])
    torch.testing.assert_close(losses / dist.get_world_size(), expected, rtol=1e-4, atol=0)


def candidates(case: str) -> dict[str, Processes]:
    """All candidates, by name."""
    return {
        "one thread": Processes(1, _bare, case, 1),
        "two threads": Processes(1, _bare, case, RANKS),
        "DDP, pipekernels": Processes(RANKS, _ddp, case, "pipekernels"),
        "DDP, Gloo": Processes(RANKS, _ddp, case, "gloo"),
    }


def measure(plan: Mapping[str, Sequence[str]], quick: bool) -> Iterator[Measured]:
    """Every candidate in turn."""
    for case in plan:
        with closing(candidates(case)) as runners:
            samples = harness.alternate(runners, warmup=1, rounds=2 if quick else 40)
        yield harness.compared(case, samples, BASE)


def table(rows: list[dict[str, Any]]) -> str:
    """A row per candidate and case."""
    return speed_ups(rows, BASE)
