"""Training steps through ``Pipe`` under each schedule against the bare model, on CPU stages.

2 stages, no checkpointing, one intra-op thread per lane. The time is that of forward, loss and
backward; ``sequential`` is the bare module on the whole batch with one thread, ``two threads`` the
same with two. ``autograd`` is ``loss_fn(pipe(x), y).backward()``, the others are
``pipe.train_step`` under the schedule of that name. Gradients are compared with those of the bare
module before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from bench.harness import Options, Turns
from bench.pipeline.pipe import build, check, timed
from demo.gpt import VOCABULARY, gpt
from pipekernels import Pipe

STAGES = 2
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
WIDTH, BATCH = 512, 2048
BLOCKS, HEADS, GPT_WIDTH, CONTEXT, SEQUENCES = 8, 4, 256, 128, 16
CHUNKS = (2, 4, 8, 16)
CANDIDATES = {
    f"{model}, {chunks} chunks": ("sequential", "two threads", "autograd", *SCHEDULES)
    for model in ("wide", "gpt")
    for chunks in CHUNKS
}
QUICK = {"wide, 8 chunks": CANDIDATES["wide, 8 chunks"]}
BASE = "two threads"
GPT = (
    f"byte-level GPT, {BLOCKS} blocks of width {GPT_WIDTH}, {SEQUENCES} x {CONTEXT} bytes, "
    "cross-entropy, float32"
)
CONDITIONS = {
    "wide": f"8 x (Linear({WIDTH}) + GELU), batch {BATCH}, mean squared error, float32",
    "gpt": GPT,
    "pipeline": f"{STAGES} stages, no checkpointing, one thread per lane",
    "timing": "forward, loss and backward, candidates in turn, medians",
}
Task = tuple[nn.Sequential, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over all bytes of ``[batch, time, vocabulary]`` logits."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def wide() -> Task:
    """Model, input, target and loss function."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    return build(WIDTH), x, y, mse_loss


def byte_gpt() -> Task:
    """Model, input, target and loss function."""
    torch.manual_seed(0)
    x, y = (torch.randint(VOCABULARY, (SEQUENCES, CONTEXT)) for _ in range(2))
    return gpt(GPT_WIDTH, BLOCKS, HEADS, CONTEXT), x, y, token_loss


def accumulate(task: Task, chunks: int) -> None:
    """Forward and backward of each microbatch of the bare model in turn: gradient accumulation."""
    module, x, y, loss_fn = task
    for part, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        (loss_fn(module(part), target) * (len(part) / len(x))).backward()


MODELS: dict[str, Callable[[], Task]] = {"wide": wide, "gpt": byte_gpt}


def piped(layers: nn.Sequential, chunks: int, **options: Any) -> Pipe:
    """``layers`` in stages of as many layers, on the CPU."""
    balance = [len(layers) // 2, len(layers) - len(layers) // 2]
    return Pipe(layers, balance, devices=["cpu"] * STAGES, chunks=chunks, **options)


def candidates(make: Callable[[], Task], chunks: int) -> dict[str, Callable[[], float]]:
    """The bare model, the pipe under autograd, and every schedule; each pipe has a model of its
    own, and the right gradients."""
    module, x, y, loss_fn = make()

    def bare() -> None:
        loss_fn(module(x), y).backward()

    found = {"sequential": timed(module, 1, bare), "two threads": timed(module, STAGES, bare)}
    found["sequential"]()
    wanted = [p.grad.clone() for p in module.parameters() if p.grad is not None]

    def add(name: str, step: Callable[[Pipe], Any]) -> None:
        pipe = piped(make()[0], chunks, checkpoint="never")
        found[name] = timed(pipe, STAGES, lambda: step(pipe))
        found[name]()
        check(pipe.parameters(), wanted)

    add("autograd", lambda pipe: loss_fn(pipe(x), y).backward())
    for schedule in SCHEDULES:
        add(schedule, lambda pipe, s=schedule: pipe.train_step(x, y, loss_fn, schedule=s))
    return found


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every candidate."""
    model, _, chunks = case.partition(", ")
    # A pipe times its ways to run on its first passes; the warm-up covers that.
    warmup, rounds = (2, 4) if options.quick else (11, 40 if model == "wide" else 24)
    return Turns(candidates(MODELS[model], int(chunks.split()[0])), warmup, rounds)
