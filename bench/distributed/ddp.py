"""Training steps of a GPT under DistributedDataParallel on CPU ranks, on this backend and on Gloo.

Each rank runs forward, backward and an AdamW step on its part of a batch; DDP averages the
gradients, one all-reduce per bucket, while the backward goes on. ``one thread`` and ``two threads``
are the bare model on the whole batch in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from bench.harness import Options, Turns
from bench.processes import Serve, join, repeated, started

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


def _bare(rank: int, port: int, serve: Serve, case: str, threads: int) -> None:
    torch.set_num_threads(threads)
    serve(repeated(stepper(build(), *data(case)), CASES[case][1]))


def _ddp(rank: int, port: int, serve: Serve, case: str, backend: str) -> None:
    join(backend, rank, RANKS, port)
    x, y = (part.chunk(RANKS)[rank] for part in data(case))
    step = stepper(nn.parallel.DistributedDataParallel(build()), x, y)
    check_losses(step, case)
    serve(repeated(step, CASES[case][1]))


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


WORKERS = {
    "one thread": (1, _bare, 1),
    "two threads": (1, _bare, RANKS),
    "DDP, pipekernels": (RANKS, _ddp, "pipekernels"),
    "DDP, Gloo": (RANKS, _ddp, "gloo"),
}


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every candidate."""
    return Turns(started(WORKERS, names, case), 1, 2 if options.quick else 40)
